"""Two servers of one deployment (`--data-parallel-rank`), which need the same rank offset.

    python -m bench.gpu.data_parallel

Each server of a dense deployment adds its own data-parallel index to the offset that it is given,
so cumulative offsets would leave a rank empty, and everybody waiting for it.
"""

from __future__ import annotations

from bench.gpu.evidence import Evidence
from bench.gpu.fleets import BOOTED, SENT, boot_fleet, check_fleet
from bench.gpu.options import Options, parser
from bench.gpu.processes import free_port
from bench.gpu.script import run_script
from bench.gpu.stage import Stage, staged

SERVERS = 2


def run(options: Options, evidence: Evidence) -> None:
    """Boot both, send both sets of weights."""
    with staged(options, evidence) as stage:
        port = free_port()
        fleet = boot_fleet(stage, SERVERS, flags=lambda number: _flags(stage, number, port))
        front = stage.before(fleet.servers)
        with evidence.part("layout and updates"), stage.client(front.url) as client:
            workers = client.get_world_size()
            evidence.check(workers == SERVERS, f"the gateway counts {workers} workers")
            engine = stage.join(client, 1 + workers)
            slots = front.get("/fleet/layout")["replicas"]
            offsets = [slot["rank_offset"] for slot in slots]
            wanted = [1] * SERVERS if options.real else [1, 2]
            evidence.check(offsets == wanted, f"rank offsets {offsets}")
            for seed in (SENT, BOOTED):
                stage.weights.take(seed)
                engine.send_weights()
                wanted_sums = fleet.of_seed[seed]
                stage.compare(fleet.servers, wanted_sums, f"a booted server's (seed {seed})")
            check_fleet(stage, front)
            engine.shutdown()


def _flags(stage: Stage, number: int, port: int) -> list[str]:
    if not stage.options.real:
        return []
    return [
        *("--data-parallel-size", str(SERVERS), "--data-parallel-rank", str(number)),
        *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port)),
    ]


def main() -> None:
    """The command line."""
    made = parser(str(__doc__).splitlines()[0])
    run_script(made, run, backend="nccl", prepare=lambda o: o.but(replicas=(SERVERS,)))


if __name__ == "__main__":
    main()
