"""What a failed update leaves behind, and a replica that is killed in mid-broadcast.

    python -m bench.gpu.failures

First an update that every replica refuses half-way, in the middle of a fused layer: does the next
full update heal them, and if not, what does? Then SIGKILL to one of two replicas while weights are
on their way, with a third one coming: what the trainer, the survivor and the gateway do, how long
until the trainer's call is answered, how the elastic session goes on, and whether all come back.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.gpu.evidence import Evidence
from bench.gpu.fleets import BOOTED, SENT, boot_fleet
from bench.gpu.options import Options, parser
from bench.gpu.processes import Served
from bench.gpu.script import run_script
from bench.gpu.stage import Stage, staged
from bench.gpu.timed import Clock
from bench.gpu.watch import Watch
from fleet.client import FleetError, FleetWeightSyncClient
from fleet.client.calls import Call
from fleet.client.elastic import ElasticSession, Persistence

LOOK_S = 20.0
"""How long a survivor is watched after the session has gone on without it."""
PIECE_BYTES = 64 << 20  # of a packed update, so that it has a middle
STUCK = ("gone", "wedged")


class ClockedClient(FleetWeightSyncClient):
    """A client that keeps when each call began and ended."""

    def __init__(self, clock: Clock, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock = clock

    def call(self, call: Call) -> Any:
        """Make the call and keep its span."""
        return self.clock.run(str(call), lambda: super(ClockedClient, self).call(call))


def run(options: Options, evidence: Evidence) -> None:
    """Boot three replicas and a reference; then both stories."""
    with staged(options, evidence) as stage:
        fleet = boot_fleet(stage, 3)
        servers, sums = fleet.servers, fleet.of_seed
        if "heal" in options.extra.parts:
            with evidence.part("an update that fails half-way, and what heals it"):
                heal(stage, servers[:2], sums)
        if "kill" in options.extra.parts:
            packed = options.extra.packed
            with evidence.part(f"SIGKILL in mid-broadcast ({'packed' if packed else 'unpacked'})"):
                kill(stage, servers, sums, packed=packed)


# -- a failed update -------------------------------------------------------------------------------


def heal(stage: Stage, servers: Sequence[Served], sums: dict[int, dict[str, str]]) -> None:
    """Fail, and send it all again: alone, once more, and after «start, finish» on every server."""
    evidence, front = stage.evidence, stage.before(servers)
    with stage.client(front.url) as client:
        send_all(stage, client, servers, SENT)
        stage.compare(servers, sums[SENT], "a booted server's (before any failure)")
        fail_half_way(stage, client, servers, front)
        send_all(stage, client, servers, BOOTED)
        text = "a full update right after a failed one: a booted server's"
        if not stage.compare(servers, sums[BOOTED], text):
            send_all(stage, client, servers, SENT)
            stage.compare(servers, sums[SENT], "a second full update: a booted server's")
        fail_half_way(stage, client, servers, front)
        for server in servers:
            server.post("/start_weight_update")
            server.post("/finish_weight_update")
        evidence.line("every server was given a bare start and finish")
        send_all(stage, client, servers, SENT)
        stage.compare(
            servers, sums[SENT], "a full update after start and finish: a booted server's"
        )
    stage.stop(front)


def send_all(
    stage: Stage, client: FleetWeightSyncClient, servers: Sequence[Served], seed: int
) -> None:
    """A new group and one full update in it, unpacked."""
    stage.weights.take(seed)
    engine = stage.join(client, 1 + len(servers), packed=False)
    engine.send_weights()
    engine.shutdown()
    client.shutdown_weight_transfer_engine()


def fail_half_way(
    stage: Stage, client: FleetWeightSyncClient, servers: Sequence[Served], front: Served
) -> None:
    """Announce a tensor that nobody has behind some that everybody has, and send them all."""
    stage.weights.take(7)
    engine = stage.join(client, 1 + len(servers), packed=False)
    names = list(stage.weights.tensors())
    last = next((n for n, name in enumerate(names) if "q_proj" in name), 1)
    sent = list(stage.weights.tensors().items())[: last + 2]
    named = [name for name, _ in sent[:-1]] + ["nobody.weight"]
    info = {
        "names": named,
        "dtype_names": [str(tensor.dtype).rpartition(".")[2] for _, tensor in sent],
        "shapes": [list(tensor.shape) for _, tensor in sent],
    }
    client.start_weight_update()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.update_weights, info)
        for _, tensor in sent:
            group_of(engine).broadcast(tensor, src=0)
        failed = answer.exception(120)
    took = time.monotonic() - began
    stage.evidence.check(isinstance(failed, FleetError), f"after {took:.2f} s: {str(failed)[:300]}")
    shown = front.get("/fleet/replicas")["replicas"]
    states = [f"{replica['id']} {replica['state']}" for replica in shown]
    stage.evidence.line(f"the fleet then: {', '.join(states)}")
    engine.shutdown()


# -- a death ---------------------------------------------------------------------------------------


def kill(
    stage: Stage, servers: list[Served], sums: dict[int, dict[str, str]], *, packed: bool
) -> None:
    """Two in the group, one of them dies, a third one comes."""
    evidence, clock = stage.evidence, Clock()
    survivor, victim, newcomer = servers
    front = stage.before([survivor, victim])
    client = ClockedClient(clock, front.url, timeouts=stage.timeouts)
    session = stage.session(
        client,
        packed=packed,
        persistence=Persistence(settle_s=5.0),
        **({"packed_buffer_size_bytes": PIECE_BYTES} if packed and stage.options.real else {}),
    )
    stage.weights.take(SENT)
    session.send_weights(weight_version="before")
    stage.compare([survivor, victim], sums[SENT], "a booted server's (before the death)")
    clock.clear()
    stage.weights.take(BOOTED)
    died = _dies_in_the_middle(stage, session, victim, front, newcomer, packed=packed)
    _go_on(stage, session, front, servers, died, clock)
    ready = [s for s in servers if _state(front, s) == "ready"]
    evidence.check(bool(ready), f"ready after the recovery: {', '.join(s.name for s in ready)}")
    if ready:
        stage.compare(ready, sums[BOOTED], "a booted server's (after the death)")
    _all_come_back(stage, session, servers, front, sums)
    session.close()


def _go_on(
    stage: Stage,
    session: ElasticSession,
    front: Served,
    servers: list[Served],
    died: list[float],
    clock: Clock,
) -> None:
    """Send, see the victim die, and let the session do what it does; then look for a while."""
    evidence, watch, began = stage.evidence, Watch(front, servers), time.monotonic()
    with watch.watching():
        try:
            session.send_weights(weight_version="after")
        except Exception as error:  # a finding, and what follows may still work
            evidence.check(False, f"the session gave up: {type(error).__name__}: {error}")
        ended, at = time.monotonic(), died[0] if died else began
        evidence.check(bool(died), f"killed {at - began:.2f} s after the session began to send")
        _tell(evidence, clock, at, ended, session.world_size)
        time.sleep(0 if stage.options.kind == "sim" else LOOK_S)
    for line in watch.lines(at):
        evidence.line(line)


def _dies_in_the_middle(
    stage: Stage, session: Any, victim: Served, front: Served, newcomer: Served, *, packed: bool
) -> list[float]:
    """Arrange that the victim is killed before the middle broadcast; returns when it was."""
    group, died = group_of(session.engine), list[float]()
    broadcast, count = group.broadcast, iter(range(1_000_000))
    middle = 5 if packed and stage.options.real else len(stage.weights.tensors()) // 2

    def eventful(*args: Any, **kwargs: Any) -> None:
        if next(count) == middle:
            stage.synchronize()  # what was sent so far has arrived
            died.append(time.monotonic())
            victim.signal(signal.SIGKILL)
            announce = threading.Thread(target=_add, args=(front, newcomer), daemon=True)
            announce.start()
        broadcast(*args, **kwargs)

    group.broadcast = eventful
    return died


def group_of(engine: Any) -> Any:
    """What an engine broadcasts over: vLLM's name for it, or ours on CPUs."""
    return getattr(engine, "model_update_group", None) or engine._group


def _add(front: Served, newcomer: Served) -> None:
    front.post("/fleet/replicas", {"url": newcomer.url})


def _tell(evidence: Evidence, clock: Clock, at: float, ended: float, world: int | None) -> None:
    """Every call since, relative to the death."""
    answered = [e for what, _, e, _ in clock.spans if "update_weights" in what and e > at]
    for what, began, end, became in sorted(clock.spans, key=lambda span: span[1]):
        if "weight_info" not in what or became != "ok":
            text = f"{began - at:+8.2f} s to {end - at:+8.2f} s  {what}"
            evidence.line(f"{text}  {became[:260]}")
    if answered:
        evidence.line(f"the trainer's call was answered {answered[0] - at:.2f} s after the death")
    evidence.line(f"the session was done {ended - at:.2f} s after it, with world_size {world}")


def _all_come_back(
    stage: Stage,
    session: Any,
    servers: list[Served],
    front: Served,
    sums: dict[int, dict[str, str]],
) -> None:
    """Restart who is dead or stuck, as an operator would; they are in with the next round."""
    evidence, weights = stage.evidence, stage.directory(BOOTED)
    for number, server in enumerate(servers):
        state = _state(front, server)
        if state in STUCK or not server.alive:
            evidence.line(f"restarting {server.name}, which is {state}")
            server.kill()
            gpus = stage.options.gpu_of_replica(number)
            again = stage.launch(server.name, weights, gpus=gpus, port=server.port)
            servers[number] = again
    began = time.monotonic()
    stage.wait_for([server for server in servers if server.booted_s is None] or servers)
    _until(lambda: front.get("/fleet")["membership"]["workers"] == len(servers), 30.0)
    evidence.line(f"all there {time.monotonic() - began:.1f} s later")
    stage.weights.take(SENT)
    began = time.monotonic()
    session.send_weights(weight_version="together")
    took, world = time.monotonic() - began, session.world_size
    evidence.check(world == 1 + len(servers), f"next round: world_size {world}, {took:.2f} s")
    stage.compare(servers, sums[SENT], "a booted server's (all together)")


def _state(front: Served, server: Served) -> str:
    shown = front.get("/fleet/replicas")["replicas"]
    return next((r["state"] for r in shown if r["id"] == server.id), "unknown")


def _until(holds: Callable[[], bool], timeout_s: float) -> None:
    ends = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < ends:
        time.sleep(0.1)


def main() -> None:
    """The command line."""
    made = parser(str(__doc__).splitlines()[0])
    made.add_argument("--parts", default="heal,kill", help="heal, kill, or both")
    made.add_argument("--packed", action="store_true", help="kill in a packed update")
    run_script(made, run, backend="nccl", prepare=lambda options: options.but(replicas=(3,)))


if __name__ == "__main__":
    main()
