"""Leaving the fleet heals nobody: a fence comes back with the boot that it was about."""

from __future__ import annotations

from fleet.sim import SimFleet
from gateway.settings_model import Settings
from tests.cases.conftest import FINISH, UPDATE, Case, case_of, check_error, fast, nccl
from tests.gateway.serving import serve


async def fail_an_update(case: Case) -> None:
    """The very first update fails on the second replica, and the round is abandoned."""
    assert (await case.init()).status_code == 200
    assert (await case.start()).status_code == 200
    case.replicas[1].faults.add(UPDATE, "status")
    check_error(await case.update(), 424, case.replicas[1].id)
    await case.ok("/fleet/reset")
    await case.await_states("fenced", "fenced")


async def test_who_is_removed_and_added_again_before_the_first_commit_stays_fenced() -> None:
    """Not one rollout reaches it before a full update or a restart."""
    async with case_of(nccl(2), gate={"timeout_s": 0.3}) as case:
        await fail_an_update(case)
        mixed = case.replicas[1]
        why = (await case.http.get("/fleet/replicas")).json()["replicas"][1]["reason"]
        assert (await case.http.delete(f"/fleet/replicas/{mixed.id}")).status_code == 200
        again = await case.ok("/fleet/replicas", {"url": mixed.url})
        assert (again["state"], again["reason"]) == ("fenced", why)
        assert (await case.complete()).status_code == 503
        await case.first_sync("1")
        assert await case.states() == ["ready", "ready"]
        assert (await case.complete()).status_code == 200


async def test_a_restart_makes_a_true_newcomer_of_it() -> None:
    """Another boot brings the weights that it was started with, as any newcomer does."""
    async with case_of(nccl(2)) as case:
        await fail_an_update(case)
        mixed = case.replicas[1]
        assert (await case.http.delete(f"/fleet/replicas/{mixed.id}")).status_code == 200
        await mixed.restart()
        assert (await case.ok("/fleet/replicas", {"url": mixed.url}))["state"] == "ready"


async def test_another_gateway_remembers_it_as_well(redis_url: str) -> None:
    """The store does: a gateway that starts later adds by its own list whom another removed."""
    async with SimFleet(nccl(2)) as sim:
        settings = Settings(replicas=tuple(sim.urls), store=redis_url, timeouts=fast())
        async with serve(settings) as served:
            case = Case(sim, served)
            await fail_an_update(case)
            assert (await case.http.delete(f"/fleet/replicas/{sim.replicas[1].id}")).is_success
            assert await case.states() == ["fenced"]
        async with serve(settings) as served:
            assert await Case(sim, served).states() == ["fenced", "fenced"]


async def test_a_session_that_was_open_is_closed_before_the_next_start() -> None:
    """The bare finish that was owed when it left is owed when it is back."""
    async with case_of(nccl(2)) as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        case.replicas[0].faults.add(UPDATE, "status")
        case.replicas[1].faults.add(FINISH, "status", times=1)
        check_error(await case.update(), 424, case.replicas[0].id)
        await case.ok("/fleet/reset")
        left = case.replicas[1]
        assert left.engine.session is not None
        assert (await case.http.delete(f"/fleet/replicas/{left.id}")).is_success
        assert (await case.ok("/fleet/replicas", {"url": left.url}))["state"] == "fenced"
        await case.first_sync("1")
        assert await case.states() == ["ready", "ready"]
