"""Ask the gateway for leave before this replica stops: the preStop hook of a replica's pod.

The gateway is told to route nothing here and to leave this replica out of the next group; then the
hook waits while it is a member of a weight update under way, since the others would hang without
it. Everything is bounded: it ends after LEAVE_TIMEOUT_S whatever happens, with status 0, because a
hook that fails changes nothing but the log. Standard library only: it runs in vLLM's image.

Reads LEAVE_GATEWAY (URL), POD_IP, LEAVE_PORT, LEAVE_TIMEOUT_S, and the operator's token from the
file LEAVE_TOKEN_FILE if there is one.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

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


def main():
    """Leave the fleet, wait for the round, and always return."""
    began = time.monotonic()
    budget_s = float(os.environ["LEAVE_TIMEOUT_S"])
    host, port = os.environ["POD_IP"], os.environ["LEAVE_PORT"]
    replica = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    drained, last_answer = False, began
    while time.monotonic() - began < budget_s:
        try:
            if not drained:
                call("POST", f"/fleet/replicas/{replica}/drain")
                drained = True
                say(f"{replica} is draining")
            if not in_round(replica):
                say(f"{replica} may stop")
                return
            last_answer = time.monotonic()
        except urllib.error.HTTPError as error:
            last_answer = time.monotonic()
            if error.code < 500:  # unknown here, or no right: asking again changes nothing
                say(f"the gateway says {error.code} to {error.url}")
                return
        except (OSError, ValueError) as error:
            if time.monotonic() - last_answer > NO_GATEWAY_S:
                say(f"no gateway answers: {error}")
                return
        time.sleep(POLL_S)
    say(f"{replica} stops inside a round: {budget_s:g} s have passed")


def in_round(replica):
    """Say whether this replica is a member of a weight update that is under way."""
    if call("GET", "/fleet")["phase"] not in UNDER_WAY:
        return False
    return any(member["id"] == replica for member in call("GET", "/fleet/layout")["replicas"])


def call(method, path):
    """Make one call and return its JSON; HTTPError, OSError or ValueError if it fails."""
    url = os.environ["LEAVE_GATEWAY"].rstrip("/") + path
    request = urllib.request.Request(url, method=method)
    token = read_token()
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with OPENER.open(request, timeout=CALL_TIMEOUT_S) as answer:
        return json.load(answer)


def read_token():
    """Return the operator's token; it is read each time, since a Secret may change."""
    try:
        with open(os.environ.get("LEAVE_TOKEN_FILE", TOKEN_FILE), encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return None


def say(text):
    """Write to the container's own log where that is possible: a hook's output goes nowhere."""
    try:
        with open("/proc/1/fd/1", "w", encoding="utf-8") as log:
            print(f"leave: {text}", file=log)
    except OSError:
        pass
    print(f"leave: {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
