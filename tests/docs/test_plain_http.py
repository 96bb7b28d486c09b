"""examples/plain_http.py, run as its reader would run it: simulated servers, no vLLM."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time

import pytest

from fleet.sim import SimOptions
from fleet.sim.faults import Action
from fleet.sim.weights import build_state_dict, replica_checksum
from tests.cases.conftest import UPDATE, case_of, posts
from tests.docs.pages import ROOT

EXAMPLE = ROOT / "examples" / "plain_http.py"
LONGEST_S = 60.0
GLOO = SimOptions(replicas=2, backend="gloo")


def _run(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), "--url", url, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )


async def test_it_moves_the_weights_it_names_to_every_replica() -> None:
    """Three rounds in one group, and rollouts that say which version answered them."""
    async with case_of(GLOO) as case:
        done = await asyncio.to_thread(_run, str(case.http.base_url))
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.split()[0] for line in done.stdout.splitlines()] == [
            "step-0",
            "step-1",
            "step-2",
        ]
        sent = replica_checksum(build_state_dict(seed=2))
        assert [replica.checksum for replica in case.replicas] == [sent, sent]
        assert await case.version() == "step-2"


async def test_a_refused_init_is_told_in_the_gateways_words_and_at_once() -> None:
    """The join beside it would wait five minutes for workers that were told no."""
    async with case_of(GLOO) as case:
        began = time.monotonic()
        done = await asyncio.to_thread(_run, str(case.http.base_url), "--world-size", "9")
        assert time.monotonic() - began < LONGEST_S / 2
        assert done.returncode == 1
        told, hint = done.stderr.splitlines()
        assert told.startswith("/init_weight_transfer_engine: 409 world_size is 9")
        assert re.match("next: .*world_size=3", hint)


@pytest.mark.parametrize("action", ["die", "status"])
async def test_a_failed_update_is_told_in_the_gateways_words_and_not_in_gloos(
    action: Action,
) -> None:
    """Gloo knows that the group broke, at a death, and not even that at a refusal."""
    async with case_of(GLOO) as case:
        case.replicas[1].faults.add(UPDATE, action)
        done = await asyncio.to_thread(_run, str(case.http.base_url))
        assert done.returncode == 1
        assert f"/update_weights: 424 update failed on {case.replicas[1].id}" in done.stderr
        assert re.search("^next: .*world_size=", done.stderr, re.MULTILINE)
        assert "Traceback" not in done.stderr
        assert len(posts(case.replicas[0], UPDATE)) == 1
