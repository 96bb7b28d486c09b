"""The scripts of bench/gpu, whole, on simulated servers: each as the command that its reader types.

What they measure here means nothing; that they boot, send, kill, compare and write it down does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, script: str, *arguments: str, limit_s: float = 100.0) -> tuple[int, str]:
    """Run a script to its end; return its exit status and its evidence."""
    out, scratch = tmp_path / "evidence", tmp_path / "scratch"
    command = [sys.executable, "-m", f"bench.gpu.{script}", "--out", str(out)]
    environ = {**os.environ, "FLEET_NONSENSE": "settings of another gateway, not passed on"}
    done = subprocess.run(
        [*command, "--scratch", str(scratch), *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=limit_s,
        start_new_session=True,
    )
    written = out / f"{script}.txt"
    assert written.exists(), done.stderr
    return done.returncode, written.read_text()


def test_both_ways_are_measured_and_every_replica_held_against_a_booted_server(
    tmp_path: Path,
) -> None:
    """Rounds by turns in one group, weights checked after each way, ratios, a bare broadcast."""
    status, told = run(tmp_path, "nccl", "--dry-run", "--replicas", "1,2", "--rounds", "2")
    assert status == 0, told
    assert told.count("checksums equal a booted server's") == 2 * (1 + 2)
    assert told.count("gateway/direct") == 2 * 2
    assert told.count("of the bare broadcast's rate") == 2
    assert "ready at rank 2" in told
    assert "result: every check held" in told


def test_a_death_in_mid_broadcast_is_told_call_by_call_and_all_come_back(tmp_path: Path) -> None:
    """The session goes on with the newcomer, and the dead one is in again after its restart."""
    status, told = run(tmp_path, "failures", "--dry-run")
    assert status == 0, told
    assert "424 MemberFailed" in told
    assert "nobody.weight" in told
    assert "the trainer's call was answered" in told
    assert "replica-1: dead" in told
    assert "next round: world_size 4" in told


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("sleep", "asleep, the trainer has the memory"),
        ("sparse", "pause → resume"),
        ("data_parallel", "rank offsets [1, 2]"),
        ("ipc", "gateway/direct"),
    ],
)
def test_every_other_script_runs_to_its_end(tmp_path: Path, script: str, says: str) -> None:
    """Orchestration, checks and evidence; what needs real vLLM is left out and said."""
    status, told = run(tmp_path, script, "--dry-run", "--rounds", "2")
    assert status == 0, told
    assert says in told


def test_unequal_replicas_share_a_group_under_load(tmp_path: Path) -> None:
    """Ten rounds, no rollout lost or mislabelled, and a replica that dies and returns."""
    status, told = run(tmp_path, "four", "--dry-run")
    assert status == 0, told
    assert "offsets [1, 2], world size 4" in told
    assert "check ok      0 lost" in told
    assert "check ok      0 with a label that cannot be" in told


def test_a_script_without_its_gpus_says_how_many_it_needs_and_succeeds(tmp_path: Path) -> None:
    """«not run» is an answer; a machine without nvidia-smi has none."""
    bare = {"PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.four", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**{k: v for k, v in os.environ.items() if k not in bare}, **bare},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "not run: needs 4 GPUs, 0 are here" in (tmp_path / "four.txt").read_text()
