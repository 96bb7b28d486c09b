"""A fleet on four GPUs: unequal replicas in one NCCL group, and a trainer of two ranks.

    python -m bench.gpu.four

The trainer on GPU 0, a replica of one worker on GPU 1, one of two workers (TP2) on GPUs 2 and 3:
one group, offsets 1 and 2, world size 4. Ten rounds with rollouts in flight; then the small replica
dies between rounds, the session goes on without it, and it comes back. After that, FSDP2 over GPUs
0 and 1 sends to two replicas on GPUs 2 and 3.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import httpx

from bench.gpu import environment
from bench.gpu.evidence import Evidence, spread
from bench.gpu.fleets import BOOTED, SENT
from bench.gpu.models import SHAPES
from bench.gpu.options import Options, parser
from bench.gpu.processes import Served
from bench.gpu.rollouts import PROMPTS, crowd
from bench.gpu.script import run_script
from bench.gpu.stage import NAME, Stage, staged
from fleet.client.elastic import ElasticSession

GPUS = 4
ROUNDS = 10
IN_FLIGHT = 16
SMALL, LARGE = (1,), (2, 3)
TIE = 0.5
"""Two servers in bf16 prefer another one of two tokens whose log-probabilities are this close."""


def run(options: Options, evidence: Evidence) -> None:
    """Both topologies, one after the other."""
    if options.kind == "gloo":
        evidence.line("not run: tensor parallel servers are not booted on CPUs here")
        return
    with staged(options, evidence) as stage:
        with evidence.part("TP1 and TP2 in one group"):
            unequal(stage)
        stage.stop(*stage.children)
        with evidence.part("FSDP2 over two trainer GPUs, two replicas"):
            fsdp2(stage)


# -- TP1 and TP2 -----------------------------------------------------------------------------------


def unequal(stage: Stage) -> None:
    """Ten rounds under load, a death, a return."""
    first, second = stage.directory(BOOTED), stage.directory(SENT)
    small = stage.launch("tp1", first, gpus=SMALL)
    large = stage.launch("tp2", first, gpus=LARGE, flags=_flags(stage, LARGE))
    known = [
        stage.launch("tp1-reference", second, gpus=SMALL),
        stage.launch("tp2-reference", second, gpus=LARGE, flags=_flags(stage, LARGE)),
    ]
    stage.wait_for([small, large, *known])
    booted, sent = stage.checksums([small, large]), stage.checksums(known)
    stage.stop(*known)
    front = stage.before([small, large])
    client = stage.client(front.url)
    session = stage.session(client)
    _rounds(stage, session, front, client)
    slots = front.get("/fleet/layout")
    offsets = [slot["rank_offset"] for slot in slots["replicas"]]
    text = f"offsets {offsets}, world size {slots['world_size']}"
    stage.evidence.check(offsets == [1, 2] and slots["world_size"] == 4, text)
    _send(stage, session, SENT, "after ten")
    _same(stage, [small, large], sent)
    _consistent(stage, small, large)
    with stage.evidence.part("the TP1 replica dies between rounds, and comes back"):
        _death_and_return(stage, session, front, [small, large], booted, sent)
    session.close()


def _death_and_return(
    stage: Stage,
    session: ElasticSession,
    front: Served,
    servers: list[Served],
    booted: list[dict[str, str]],
    sent: list[dict[str, str]],
) -> None:
    small, large = servers
    small.kill()
    _send(stage, session, BOOTED, "without tp1")
    world = session.world_size
    stage.evidence.check(world == 3, f"world size {world} without the dead one")
    _same(stage, [large], booted[1:])
    again = stage.launch("tp1", stage.directory(BOOTED), gpus=SMALL, port=small.port)
    stage.wait_for([again])
    _until_workers(front, 3)
    _send(stage, session, SENT, "with tp1 again")
    stage.evidence.check(session.world_size == 4, f"world size {session.world_size} again")
    _same(stage, [again, large], sent)


def _flags(stage: Stage, gpus: tuple[int, ...]) -> list[str]:
    if not stage.options.real:
        return []
    return ["--tensor-parallel-size", str(len(gpus)), "--disable-custom-all-reduce"]


def _rounds(stage: Stage, session: Any, front: Served, client: Any) -> None:
    evidence, taken = stage.evidence, list[float]()
    with crowd(front.url, in_flight=IN_FLIGHT, tokens=100) as asking:
        for number in range(ROUNDS):
            stage.weights.take(100 + number)
            began = time.monotonic()
            session.send_weights(weight_version=f"round-{number}")
            taken.append(time.monotonic() - began)
            asking.versions.append(client.weight_info())
            _until_served(asking, number)
    served = [answer for answer in asking.answers if answer.error is None]
    each = sorted({a.replica: 0 for a in served})
    counts = {r: sum(a.replica == r for a in served) for r in each}
    spanning = sum(a.version != a.ended for a in served)
    evidence.line(f"pause → resume, the first with its init: {spread(taken)}")
    evidence.line(f"rollouts served: {counts}, {spanning} of them across an update")
    evidence.check(len(counts) == 2, "both replicas served")
    evidence.check(not asking.lost, f"{len(asking.lost)} lost {asking.lost[:3]}")
    wrong = asking.mislabelled()
    evidence.check(not wrong, f"{len(wrong)} with a label that cannot be {wrong[:2]}")


def _until_served(asking: Any, number: int, timeout_s: float = 30.0) -> None:
    """Let some rollouts be answered by this version before the next one comes."""
    wanted, ends = len(asking.answers) + IN_FLIGHT // 2, time.monotonic() + timeout_s
    while len(asking.answers) < wanted and time.monotonic() < ends:
        time.sleep(0.01)


def _until_workers(front: Served, wanted: int, timeout_s: float = 30.0) -> None:
    ends = time.monotonic() + timeout_s
    while front.get("/fleet")["membership"]["workers"] != wanted and time.monotonic() < ends:
        time.sleep(0.1)


def _send(stage: Stage, session: Any, seed: int, what: str) -> None:
    stage.weights.take(seed)
    began = time.monotonic()
    session.send_weights(weight_version=what.replace(" ", "-"))
    stage.evidence.line(f"{what}: {time.monotonic() - began:.2f} s")


def _same(stage: Stage, servers: list[Served], wanted: list[dict[str, str]]) -> None:
    """Each topology shards its own way, so each has a reference of its own."""
    for server, sums in zip(servers, wanted, strict=True):
        stage.compare([server], sums, "a booted server's of the same topology")


def _consistent(stage: Stage, one: Served, other: Served) -> None:
    """Greedy tokens of both, up to the first tie that the two break differently."""
    if not stage.options.real:
        stage.evidence.line("tokens: simulated servers have none to compare")
        return
    for prompt in PROMPTS:
        mine, theirs = (_greedy(server, prompt) for server in (one, other))
        pairs = zip(mine, theirs, strict=True)
        split = next((n for n, (a, b) in enumerate(pairs) if a[0] != b[0]), None)
        if split is None:
            stage.evidence.check(True, f"{len(mine)} of {len(mine)} tokens equal on both")
            continue
        gap = abs(mine[split][1] - theirs[split][1])
        text = f"{split} of {len(mine)} tokens equal, then log-probabilities {gap:.3f} apart"
        stage.evidence.check(gap < TIE, text)


def _greedy(server: Served, prompt: list[int], count: int = 16) -> list[tuple[str, float]]:
    body = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    found = server.post("/v1/completions", body)["choices"][0]["logprobs"]
    return list(zip(found["tokens"], found["token_logprobs"], strict=True))


# -- FSDP2 -----------------------------------------------------------------------------------------


def fsdp2(stage: Stage) -> None:
    """The example for trainers of several ranks, as its reader would run it."""
    if not stage.options.real:
        stage.evidence.line("not run: there is no model to train in a dry run")
        return
    weights = stage.directory(BOOTED)
    servers = [stage.launch(f"fsdp-{n}", weights, gpus=(2 + n,)) for n in range(2)]
    stage.wait_for(servers)
    before = stage.checksums(servers)
    front = stage.before(servers)
    script = environment.root() / "examples" / "fsdp2.py"
    command = [
        sys.executable,
        str(script),
        "--model",
        str(stage.scratch / weights),
        "--url",
        front.url,
    ]
    stage.evidence.line(f"examples/fsdp2.py, {SHAPES[stage.options.model]}")
    began = time.monotonic()
    done = subprocess.run(
        command,
        env={**dict(_environ()), "CUDA_VISIBLE_DEVICES": "0,1", "RANKS": "2"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = (done.stdout + done.stderr[-1500:] if done.returncode else done.stdout).strip()
    stage.evidence.line(said)
    took = f"{time.monotonic() - began:.0f} s"
    stage.evidence.check(done.returncode == 0, f"exit status {done.returncode} after {took}")
    after = stage.checksums(servers)
    stage.evidence.check(
        after[0] == after[1] != before[0], "both replicas hold the same, new weights"
    )
    world = httpx.get(f"{front.url}/fleet/layout", trust_env=False).json()["world_size"]
    stage.evidence.check(
        world == 3, f"world size {world}: of the trainer's ranks only rank 0 counts"
    )


def _environ() -> Any:
    import os

    search = [str(environment.root()), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in search if path)}


def main() -> None:
    """The command line."""
    run_script(
        parser(str(__doc__).splitlines()[0]),
        run,
        backend="nccl",
        needs=lambda options: GPUS if options.kind == "gpu" else 0,
        prepare=lambda options: options.but(placement="spread"),
    )


if __name__ == "__main__":
    main()
