"""The driver: its steps, its limits, and what is left when a step is ended."""

from __future__ import annotations

import argparse
import contextlib
import tarfile
from pathlib import Path

import pytest

from bench.gpu.all import STEPS, Step, chosen_steps, keep_logs, run_all, run_step
from bench.gpu.evidence import Evidence


def given(tmp_path: Path) -> argparse.Namespace:
    """What the command line of a dry run would give."""
    return argparse.Namespace(
        out=tmp_path / "out",
        scratch=tmp_path / "scratch",
        dry_run=True,
        backend="gpu",
        rounds=1,
        ctas=0,
    )


def test_a_step_that_is_too_late_is_ended_with_all_it_started_its_stacks_in_the_log(
    tmp_path: Path,
) -> None:
    """Where it hung is in its log, and the log is in the archive that comes back."""
    asked = given(tmp_path)
    step = Step("death", "failures", (), 100.0)
    with Evidence(asked.out / "all.txt", "all steps", []) as evidence:
        became = run_step(step, 1.5, asked, evidence)
    assert became == "ended after 2 s, its limit"
    keep_logs(asked.scratch, asked.out)
    with tarfile.open(asked.out / "logs.tgz") as archive:
        log = archive.extractfile("death.stderr.log")
        assert log is not None
        assert b"Fatal Python error: Aborted" in log.read()
    assert processes_with(str(asked.scratch)) == []


def processes_with(argument: str) -> list[str]:
    """The command lines of all processes that were given this."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument in (line := entry.read_text().replace("\0", " ")):
                found.append(line)
    return found


def test_nothing_more_is_tried_where_the_first_step_could_not_even_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time on a lent machine is short, and what fails for one step fails for all."""
    asked = given(tmp_path)
    asked.budget_s, asked.stretch, asked.keep_going = 100.0, 1.0, False
    asked.steps = "sparse,ipc"
    monkeypatch.setenv("PYTHONPATH", str(broken_simulator(tmp_path)))
    with Evidence(asked.out / "all.txt", "all steps", []) as evidence:
        run_all(asked, evidence)
    told = (asked.out / "all.txt").read_text()
    assert "sparse: failed: it broke off" in told
    assert "ipc: not run: the first step broke off" in told


def broken_simulator(tmp_path: Path) -> Path:
    """A folder that makes every process on its path fail to import the simulated servers."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['fleet.sim'] = None\n")
    return folder


def test_a_step_that_ends_by_itself_says_whether_its_checks_held(tmp_path: Path) -> None:
    """The driver reads exit statuses only."""
    asked = given(tmp_path)
    with Evidence(asked.out / "all.txt", "all steps", []) as evidence:
        became = run_step(Step("n", "nccl", ("--replicas", "1"), 100.0), 90.0, asked, evidence)
        wrong = run_step(Step("w", "nccl", ("--replicas", "0"), 100.0), 60.0, asked, evidence)
    assert became == "every check held"
    assert wrong == "failed: exit status 2"


def test_steps_are_chosen_by_name_or_by_the_gpus_that_there_are() -> None:
    """The order is by worth, and a name that there is not is refused."""
    assert [step.name for step in chosen_steps("sparse,nccl-2", 1)] == ["sparse", "nccl-2"]
    assert chosen_steps(None, 1)[0].name == "nccl-2"
    assert {step.gpus for step in chosen_steps(None, 1)} == {1}
    assert {step.gpus for step in chosen_steps(None, 2)} == {2}
    assert "four" in [step.name for step in chosen_steps(None, 4)]
    assert len({step.name for step in STEPS}) == len(STEPS)
    with pytest.raises(SystemExit, match="no step nonsense"):
        chosen_steps("nonsense", 1)
