"""One server that accepts and never answers slows nobody down who can do without it."""

from __future__ import annotations

import asyncio

import pytest

from fleet.replicas import registry
from tests.cases.conftest import INIT, Case, case_of, fast, nccl, outcomes_of
from tests.waiting import wait_until

LOOK_S = 2.0
"""How long a look at a silent replica takes here, and the wait for one in a dead collective."""
MANY = 20
WITHIN_S = 10.0
"""For MANY calls: far more than they take, and far less than so many looks."""


@pytest.fixture(autouse=True)
def short_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silence counts as long before the test is."""
    monkeypatch.setattr(registry, "SETTLE_S", LOOK_S)
    monkeypatch.setattr(registry, "RELOOK_S", LOOK_S)


async def test_a_replica_that_stays_silent_delays_neither_the_count_nor_an_init() -> None:
    """It is left out as it has been before; the probes see it come back."""
    async with case_of(nccl(3), timeouts=fast(probe_timeout_s=LOOK_S)) as case:
        silent = case.replicas[1]
        silent.faults.add("/*", "hang", times=0)
        await case.await_states("ready", "gone", "ready", timeout_s=30)
        await _do_without(case)
        await silent.restart()
        silent.faults.clear()
        await case.await_states("ready", "ready", "ready")
        assert (await case.init(4)).status_code == 200


async def test_an_engine_that_stays_silent_delays_neither_the_count_nor_an_init() -> None:
    """Its server answers /health, so it is wedged, and left out as long as that lasts."""
    async with case_of(nccl(3), timeouts=fast(probe_timeout_s=LOOK_S)) as case:
        case.replicas[1].faults.add("/weight_info", "hang", times=0)
        await case.await_states("ready", "wedged", "ready", timeout_s=30)
        await _do_without(case)
        case.replicas[1].faults.clear()


async def test_a_member_that_stays_in_a_dead_collective_is_awaited_once() -> None:
    """Who only waited for the culprit is back in a moment; who is not, is waited for no more."""
    async with case_of(nccl(3), timeouts=fast(init_s=0.5)) as case:
        case.replicas[1].faults.add(INIT, "hang")
        assert outcomes_of(await case.init())[case.replicas[1].id] == "wedged"
        await _do_without(case)


async def test_who_only_waited_for_the_culprit_is_in_the_next_group() -> None:
    """A trainer that inits again at once gets whole who answers a moment later."""
    async with case_of(nccl(3)) as case:
        case.replicas[0].faults.add(INIT, "status")
        case.replicas[1].faults.add(INIT, "delay", seconds=LOOK_S / 4)
        failed = outcomes_of(await case.init())
        assert [failed[r.id] for r in case.replicas[:2]] == ["failed", "wedged"]
        assert (await case.init(4)).status_code == 200


async def test_a_replica_that_was_removed_inside_a_dead_collective_is_no_more_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its old call ends, and who is added under its name is looked at as any other."""
    monkeypatch.setattr(registry, "SETTLE_S", 60.0)
    async with case_of(nccl(3), timeouts=fast(init_s=0.5)) as case:
        case.replicas[1].faults.add(INIT, "hang")
        assert outcomes_of(await case.init())[case.replicas[1].id] == "wedged"
        counting = asyncio.ensure_future(case.http.get("/get_world_size"))
        removed = await case.http.delete(f"/fleet/replicas/{case.replicas[1].id}")
        assert removed.status_code == 200
        async with asyncio.timeout(WITHIN_S):
            assert (await counting).json() == {"world_size": 2}
            await _do_without(case)
            await case.ok("/fleet/replicas", {"url": case.replicas[1].url})

            async def is_back() -> bool:
                return sorted(await case.states()) == ["ready", "ready", "ready"]

            await wait_until(is_back)


async def _do_without(case: Case) -> None:
    """Ask for the size many times, and init without the silent one, all within a short time."""
    async with asyncio.timeout(WITHIN_S):
        for _ in range(MANY):
            assert (await case.http.get("/get_world_size")).json() == {"world_size": 2}
        for _ in range(MANY // 2):
            assert (await case.init(3)).status_code == 200
