"""Dense NCCL updates through the gateway and directly, by turns, packed and unpacked.

    python -m bench.gpu.nccl --replicas 1,2,3                     # all ranks on GPU 0
    python -m bench.gpu.nccl --replicas 1,2,3 --placement separate  # trainer on 0, replicas on 1

One group holds the trainer and all replicas of a size, each replica at its own rank offset. Both
ways use that same group and the same engine; only the client differs. The last weights of each way
are held against a server that booted from them, and the time against a bare broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.gpu import bare
from bench.gpu.evidence import Evidence, ratio, spread
from bench.gpu.fleets import BOOTED, SENT, Fleet, boot_fleet, check_fleet
from bench.gpu.models import nbytes
from bench.gpu.options import Options, close, gigabytes, parser
from bench.gpu.processes import Served
from bench.gpu.script import run_script
from bench.gpu.stage import Stage, staged
from bench.gpu.timed import Clock, Direct, Timed

AIM_RATIO, AIM_MORE_S, AIM_OF_BARE = 1.02, 0.010, 0.8
WAYS = ("gateway", "direct")


@dataclass
class Times:
    """The seconds of each round of one way."""

    start: list[float] = field(default_factory=list[float])
    transfer: list[float] = field(default_factory=list[float])
    finish: list[float] = field(default_factory=list[float])
    whole: list[float] = field(default_factory=list[float])

    def add(self, clock: Clock) -> None:
        """Take the round that the clock has just seen; `whole` is from pause to resume."""
        spans = {what: (began, ended) for what, began, ended, _ in clock.spans}
        self.start.append(clock.took("start"))
        self.transfer.append(clock.took("update"))
        self.finish.append(clock.took("finish"))
        self.whole.append(spans["finish"][1] - spans["start"][0])


def run(options: Options, evidence: Evidence) -> None:
    """Boot once, then measure every group size, packed and unpacked."""
    with staged(options, evidence) as stage:
        total = nbytes(stage.weights)
        wires = {
            size: bare.receivers(stage, _gpus(options, size), total) for size in options.replicas
        }
        fleet = boot_fleet(stage, options.most_replicas)
        bares: dict[int, list[float]] = {}
        for size in options.replicas:
            with evidence.part(f"bare broadcast, {size} receivers"):
                bares[size] = wires[size].measure()
                speed = bare.rate(total, bares[size]) / 1e9
                evidence.line(f"{gigabytes(total)}: {spread(bares[size])}, {speed:.2f} GB/s")
        for size in options.replicas:
            for packed in options.packings:
                words = f"{'packed' if packed else 'unpacked'}, {size} replicas"
                with evidence.part(f"{words}, {options.placement} placement"):
                    ours = measure(stage, fleet, size, packed=packed)
                    if size in bares:
                        against_bare(stage, ours, total, bares[size], packed=packed)


def _gpus(options: Options, size: int) -> list[tuple[int, ...]]:
    return [options.gpu_of_replica(number) for number in range(size)]


def measure(stage: Stage, fleet: Fleet, size: int, *, packed: bool) -> Times:
    """One group: rounds by turns, checksums, ratios; returns the gateway's times."""
    servers = fleet.servers[:size]
    front = stage.before(servers)
    clients = {
        "gateway": stage.client(front.url),
        "direct": Direct([server.url for server in servers], stage.client),
    }
    clock = Clock()
    engine = stage.join(Timed(clients["gateway"], clock), 1 + size, packed=packed)
    stage.evidence.line(f"init through the gateway: {clock.took('init'):.2f} s")
    times = {way: Times() for way in WAYS}
    for number in range(stage.options.rounds + 1):
        last = number == stage.options.rounds
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            stage.weights.take(100 + number)
            send(stage, engine, Timed(clients[way], clock), f"round-{number}")
            if number:  # the first one also announces every tensor, and warms up
                times[way].add(clock)
            if last:
                check_weights(stage, fleet, servers, engine, Timed(clients[way], clock), way)
    check_fleet(stage, front)
    phases = phases_of(front)
    engine.shutdown()
    clients["gateway"].shutdown_weight_transfer_engine()
    clients["direct"].close()
    stage.stop(front)
    report(stage, times, nbytes(stage.weights))
    own_share(stage, times["gateway"], phases)
    return times["gateway"]


def phases_of(front: Served) -> dict[str, float]:
    """Return how long the replicas of a gateway took in each phase: medians over rounds, seconds.

    The first round is left out, as everywhere.
    """
    rounds = front.get("/fleet/rounds?limit=200")["rounds"][:-1]
    taken: dict[str, list[float]] = {}
    for phase in (phase for found in rounds for phase in found["phases"]):
        taken.setdefault(phase["phase"], []).append(phase["elapsed_s"])
    return {phase: median(times) for phase, times in taken.items()}


def own_share(stage: Stage, ours: Times, phases: dict[str, float]) -> None:
    """Say how much of a round its replicas took, as the gateway saw them, and what is left."""
    told = ", ".join(f"{phase} {took * 1000:.1f} ms" for phase, took in phases.items())
    rest = median(ours.whole) - sum(phases.values())
    stage.evidence.line(f"of a round through the gateway: {told}; the rest {rest * 1000:.1f} ms")


def send(stage: Stage, engine: Any, client: Timed, version: str) -> None:
    """One update by this client, and no other call in its clock.

    Both ways label a round alike, so that the gateway's probes see nothing that is not its own.
    """
    engine.client = client
    client.clock.clear()
    client.client.next_weight_version = version
    stage.synchronize()
    engine.send_weights()


def check_weights(
    stage: Stage, fleet: Fleet, servers: list[Served], engine: Any, client: Timed, way: str
) -> None:
    """Send one set of weights more, and look at what the replicas hold; before, it was another."""
    seed = SENT if way == WAYS[0] else BOOTED
    stage.weights.take(seed)
    send(stage, engine, client, f"round-{stage.options.rounds}")
    stage.compare(servers, fleet.of_seed[seed], f"a booted server's ({way}, seed {seed})")


def report(stage: Stage, times: dict[str, Times], total: int) -> None:
    """The figures of one group."""
    evidence, rows = stage.evidence, list[list[str]]()
    for way, taken in times.items():
        speed = f"{bare.rate(total, taken.transfer) / 1e9:.2f}"
        parts = [spread(t) for t in (taken.start, taken.transfer, taken.finish, taken.whole)]
        rows.append([way, *parts, speed])
    rounds = stage.options.rounds
    evidence.line(f"{gigabytes(total)} a round; {rounds} rounds each, by turns; median (range)")
    head = ["", "pause + start", "update", "finish + resume", "pause → resume", "GB/s"]
    evidence.table(head, rows)
    ours, direct = times["gateway"], times["direct"]
    for name, mine, theirs in (
        ("update", ours.transfer, direct.transfer),
        ("pause → resume", ours.whole, direct.whole),
    ):
        found, more = ratio(mine, theirs), (median(mine) - median(theirs)) * 1000
        evidence.aim(close(found, AIM_RATIO), f"{name}: gateway/direct {found:.3f} (≤ {AIM_RATIO})")
        evidence.aim(more <= AIM_MORE_S * 1000, f"{name}: gateway {more:+.1f} ms (≤ 10 ms more)")


def against_bare(stage: Stage, ours: Times, total: int, wire: list[float], *, packed: bool) -> None:
    """What part of the wire's own rate an update reaches."""
    of_bare = bare.rate(total, ours.transfer) / bare.rate(total, wire)
    text = f"update through the gateway at {of_bare:.2f} of the bare broadcast's rate"
    if packed:
        stage.evidence.aim(of_bare >= AIM_OF_BARE, f"{text} (≥ {AIM_OF_BARE})")
    else:
        stage.evidence.line(text)


def main() -> None:
    """The command line."""
    run_script(parser(str(__doc__).splitlines()[0]), run, backend="nccl")


if __name__ == "__main__":
    main()
