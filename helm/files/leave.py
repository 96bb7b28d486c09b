"""Ask the gateway for leave before this replica stops: the preStop hook of a replica's pods.

The gateway is told to route nothing here and to leave this replica out of the next group; then the
hook waits while it is a member of a weight update under way, since the others would hang without
it. A worker of a replica that spans nodes does the same in its leader's name, and then waits until
the leader is gone, which needs it for the rollouts that still run.

Everything is bounded, and the status is always 0, since a hook that fails changes nothing but the
log. Standard library only: it runs in vLLM's image.

Reads LEAVE_GATEWAY (URL), LEAVE_HOST (of the replica: an address or a name), LEAVE_PORT,
LEAVE_TIMEOUT_S, in workers LEAVE_AFTER_LEADER_S, and the operator's token from the file
LEAVE_TOKEN_FILE if there is one.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from typing import Any

UNDER_WAY = {
    "initializing",
    "pausing",
    "starting",
    "started",
    "updating",
    "finishing",
    "committed",
    "undoing",
}
CALL_TIMEOUT_S = 5.0
POLL_S = 1.0
NO_GATEWAY_S = 20.0  # none answers: perhaps the whole release is being deleted
TOKEN_FILE = "/etc/fleet/operator/token"
# Pods talk to the gateway directly; a proxy set for downloading models must not be asked.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> None:
    """Leave the fleet, wait for the round, and always return."""
    leave(float(os.environ["LEAVE_TIMEOUT_S"]))
    if "LEAVE_AFTER_LEADER_S" in os.environ:
        outlive_leader(float(os.environ["LEAVE_AFTER_LEADER_S"]))


def leave(budget_s: float) -> None:
    """Drain the replica and return once it is in no round, or when nothing more can be done."""
    began = last_answer = time.monotonic()
    drained = False
    while time.monotonic() - began < budget_s:
        try:
            replica = replica_id()
            drained = drained or drain(replica)
            if not in_round(replica):
                say(f"{replica} may stop")
                return
            last_answer = time.monotonic()
        except urllib.error.HTTPError as error:
            if error.code < 500:  # unknown here, or no right: asking again changes nothing
                say(f"the gateway says {error.code} to {error.url}")
                return
            last_answer = time.monotonic()
        except (OSError, ValueError) as error:
            if time.monotonic() - last_answer > NO_GATEWAY_S:
                say(f"no gateway answers: {error}")
                return
        time.sleep(POLL_S)
    say(f"stopping inside a round: {budget_s:g} s have passed")


def drain(replica: str) -> bool:
    """Ask for the replica to be drained, and say whether that was done.

    Not while it does not answer: then it may be the liveness probe that ends it. The container
    comes back at the same address, where it would be draining for ever.
    """
    try:
        OPENER.open(f"http://{replica}/health", timeout=CALL_TIMEOUT_S).close()
    except OSError:
        return False
    call("POST", f"/fleet/replicas/{replica}/drain")
    say(f"{replica} is draining")
    return True


def outlive_leader(budget_s: float) -> None:
    """Return once the leader accepts no connection any more."""
    began = time.monotonic()
    address = (os.environ["LEAVE_HOST"], int(os.environ["LEAVE_PORT"]))
    while time.monotonic() - began < budget_s:
        try:
            socket.create_connection(address, timeout=CALL_TIMEOUT_S).close()
        except OSError:
            return
        time.sleep(POLL_S)


def replica_id() -> str:
    """Return the id that the gateway knows this replica by, `address:port`; OSError if unknown."""
    host, port = os.environ["LEAVE_HOST"], os.environ["LEAVE_PORT"]
    address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def in_round(replica: str) -> bool:
    """Say whether this replica is a member of a weight update that is under way."""
    if call("GET", "/fleet")["phase"] not in UNDER_WAY:
        return False
    return any(member["id"] == replica for member in call("GET", "/fleet/layout")["replicas"])


def call(method: str, path: str) -> Any:
    """Make one call and return its JSON; HTTPError, OSError or ValueError if it fails."""
    url = os.environ["LEAVE_GATEWAY"].rstrip("/") + path
    request = urllib.request.Request(url, method=method)
    token = read_token()
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with OPENER.open(request, timeout=CALL_TIMEOUT_S) as answer:
        return json.load(answer)


def read_token() -> str | None:
    """Return the operator's token; it is read each time, since a Secret may change."""
    try:
        with open(os.environ.get("LEAVE_TOKEN_FILE", TOKEN_FILE), encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return None


def say(text: str) -> None:
    """Write to the container's own log where that is possible: a hook's output goes nowhere."""
    for name in ("/proc/1/fd/1", "/dev/stderr"):
        try:
            with open(name, "a", encoding="utf-8") as log:
                print(f"leave: {text}", file=log)
        except OSError:
            continue
        return


if __name__ == "__main__":
    main()
