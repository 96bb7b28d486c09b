"""Every script that fits on the GPUs that are there, the most telling first, within a time.

    python -m bench.gpu.all --out DIR                          # all steps
    python -m bench.gpu.all --out DIR --steps nccl-2,failures   # some of them
    python -m bench.gpu.all --list

Each step has a limit and writes its evidence as it goes, so whatever ends this run leaves the steps
before it. A step that is too late is ended with all its servers, its stacks in the log.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from bench.gpu import environment
from bench.gpu.evidence import Evidence
from bench.gpu.processes import end_session
from bench.gpu.script import BROKE_OFF

BROKEN = "failed: it broke off"
LEAST_S = 45.0  # below that a step is not begun
STACKS_S = 3.0


@dataclass(frozen=True)
class Step:
    """One script with its arguments; `limit_s` is about twice what it should take."""

    name: str
    script: str
    arguments: tuple[str, ...]
    limit_s: float
    gpus: int = 1


_TWO = ("--placement", "separate")
_LARGE = ("--model", "8b", "--rounds", "5")
# A single replica on a GPU of its own is measured apart: no bound on NCCL's thread blocks there.
STEPS = (
    Step("nccl-2", "nccl", ("--replicas", "2"), 300),
    Step("failures", "failures", (), 270),
    Step("ipc", "ipc", ("--replicas", "2"), 150),
    Step("sleep", "sleep", ("--replicas", "2"), 180),
    Step("sparse", "sparse", ("--replicas", "2"), 150),
    Step("nccl-3", "nccl", ("--replicas", "3"), 240),
    Step("data-parallel", "data_parallel", (), 150),
    Step("nccl-1", "nccl", ("--replicas", "1"), 180),
    Step("failures-packed", "failures", ("--parts", "kill", "--packed"), 210),
    Step("two-1", "nccl", (*_TWO, "--replicas", "1"), 210, gpus=2),
    Step("two", "nccl", (*_TWO, "--replicas", "2,3"), 300, gpus=2),
    Step("two-8b-1", "nccl", (*_TWO, *_LARGE, "--replicas", "1"), 330, gpus=2),
    Step("two-8b-2", "nccl", (*_TWO, *_LARGE, "--replicas", "2"), 540, gpus=2),
    Step("two-8b-3", "nccl", (*_TWO, *_LARGE, "--replicas", "3"), 540, gpus=2),
    Step("four", "four", (), 480, gpus=4),
)


def main() -> None:
    """The command line."""
    given = _arguments(sys.argv[1:])
    if given.list:
        for step in STEPS:
            print(
                f"{step.name:16} {step.gpus} GPU  {step.limit_s:4.0f} s  {' '.join(_command(step))}"
            )
        return
    signal.signal(signal.SIGTERM, _end_on_sigterm)
    with Evidence(given.out / "all.txt", "all steps", environment.facts()) as evidence:
        run_all(given, evidence)
    sys.exit(evidence.status)


def chosen_steps(wanted: str | None, gpus: int) -> list[Step]:
    """The steps by these names, in the order asked for; by default all for this many GPUs.

    Raises SystemExit for a name that there is not.
    """
    if wanted is None:
        return [step for step in STEPS if step.gpus == min(gpus, 2) or step.gpus == gpus]
    known = {step.name: step for step in STEPS}
    unknown = [name for name in wanted.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"no step {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in wanted.split(",")]


def run_all(given: argparse.Namespace, evidence: Evidence) -> None:
    """Run the chosen steps one after the other, while there is time."""
    simulated = given.dry_run or given.backend == "gloo"
    gpus = 1 if simulated else environment.gpu_count()
    ends = time.monotonic() + given.budget_s
    rows: list[list[str]] = []
    hopeless = False
    for number, step in enumerate(chosen_steps(given.steps, gpus)):
        limit = min(step.limit_s * given.stretch, ends - time.monotonic())
        began = time.monotonic()
        if hopeless:
            became = "not run: the first step broke off, as this one would"
        elif limit < min(LEAST_S, step.limit_s):
            became = "not run: no time left"
        else:
            became = run_step(step, limit, given, evidence)
        rows.append([step.name, f"{time.monotonic() - began:.0f} s", became])
        evidence.check(not became.startswith(("failed", "ended")), f"{step.name}: {became}")
        hopeless = hopeless or (number == 0 and became == BROKEN and not given.keep_going)
        keep_logs(given.scratch, given.out)
    evidence.step("steps")
    evidence.table(["step", "took", "became"], rows)


def run_step(step: Step, limit_s: float, given: argparse.Namespace, evidence: Evidence) -> str:
    """Run one step in a session of its own; return what became of it, in words."""
    evidence.step(f"{step.name}, at most {limit_s:.0f} s")
    command = [sys.executable, "-m", *_command(step), *_passed_on(given)]
    errors = given.scratch / f"{step.name}.stderr.log"
    errors.parent.mkdir(parents=True, exist_ok=True)
    with errors.open("wb") as output:
        environ = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        process = subprocess.Popen(command, env=environ, stderr=output, start_new_session=True)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler writes where every thread is
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STACKS_S)
            return f"ended after {limit_s:.0f} s, its limit"
        finally:
            end_session(process.pid)
            process.wait()
    if status == BROKE_OFF:
        return BROKEN
    return "every check held" if status == 0 else f"failed: exit status {status}"


def keep_logs(scratch: Path, out: Path) -> None:
    """Pack all logs that there are by now into one file."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / "logs.tgz", "w:gz") as archive:
        for log in sorted(scratch.rglob("*.log")):
            archive.add(log, str(log.relative_to(scratch)))


def _command(step: Step) -> list[str]:
    return [f"bench.gpu.{step.script}", *step.arguments]


def _passed_on(given: argparse.Namespace) -> list[str]:
    passed = ["--out", str(given.out), "--scratch", str(given.scratch)]
    passed += ["--dry-run"] if given.dry_run else ["--backend", given.backend]
    passed += ["--ctas", str(given.ctas)] if given.ctas else []
    return passed + (["--rounds", str(given.rounds)] if given.rounds else [])


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    made.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "evidence")))
    made.add_argument("--scratch", type=Path, default=Path("/tmp/fleet-bench"))
    made.add_argument("--steps", help="names by commas; default: all for these GPUs")
    made.add_argument("--budget-s", type=float, default=540.0, help="for all steps together")
    made.add_argument("--stretch", type=float, default=1.0, help="times the limit of each step")
    made.add_argument(
        "--rounds", type=int, default=0, help="measured rounds instead of a step's own"
    )
    made.add_argument("--ctas", type=int, default=0, help="thread blocks of ranks on a shared GPU")
    made.add_argument("--backend", choices=("gpu", "gloo"), default="gpu")
    made.add_argument("--dry-run", action="store_true")
    made.add_argument("--keep-going", action="store_true", help="even if the first step breaks off")
    made.add_argument("--list", action="store_true", help="say what steps there are")
    return made.parse_args(argv)


def _end_on_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    """Leave through the `finally`s, so that no step stays behind."""
    del frame
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
