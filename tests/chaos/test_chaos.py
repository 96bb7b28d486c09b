"""A short chaos run, always the same faults; `make chaos` runs long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import run
from tests.chaos.schedule import KINDS, plan

SEED, ROUNDS = 10, 40


@pytest.mark.timeout(180)
async def test_a_short_run_with_faults_breaks_no_rule(tmp_path: Path) -> None:
    """Gateways, replicas, trainer and store are hit while rounds and rollouts go on."""
    report = await run(SEED, ROUNDS, tmp_path)
    assert report.is_good, str(report)
    assert report.committed >= ROUNDS // 2, str(report)
    assert sum(report.faults.values()) >= ROUNDS // 5, str(report)


def test_a_seed_is_a_plan() -> None:
    """The same seed, the same faults; another one, others; all kinds come up in a long run."""
    assert plan(1, 1000) == plan(1, 1000)
    assert plan(1, 1000) != plan(2, 1000)
    assert {fault.kind for fault in plan(1, 1000)} == set(KINDS)
