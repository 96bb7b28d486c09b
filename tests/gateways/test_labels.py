"""What an answer says about its version when the update was another gateway's."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fleet.sim import SimFleet
from tests.cases.conftest import nccl
from tests.gateways.processes import gateways


async def test_an_answer_names_the_version_it_ends_under_wherever_that_was_committed(
    redis_url: str, tmp_path: Path
) -> None:
    """Frozen by the update and resumed by it: its gateway has heard of the commit before."""
    options = nccl(2, token_delay_ms=10)
    async with SimFleet(options) as sim, gateways(sim, redis_url, tmp_path) as several:
        here, there = several.case(0), several.case(1)
        await here.first_sync("1")
        for version in map(str, range(2, 12)):
            # Lengths of all kinds, so that some end in the very moment of the resume.
            asked = [
                asyncio.ensure_future(there.complete(max_tokens=length)) for length in range(1, 40)
            ]
            await asyncio.wait(asked, timeout=0.05)
            await here.sync(version)
            for answer in await asyncio.gather(*asked):
                ended = answer.headers.get(
                    "X-Weight-Version-End", answer.headers["X-Weight-Version"]
                )
                assert answer.json()["sim"]["version"] == ended
