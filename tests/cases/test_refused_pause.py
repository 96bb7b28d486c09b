"""A pause that a replica refuses although it has paused all the same."""

from __future__ import annotations

import pytest

from tests.cases.conftest import case_of, check_error


@pytest.mark.parametrize("action", ["status", "lie"])
async def test_whoever_may_have_paused_is_resumed_when_the_pause_fails(action: str) -> None:
    """Its answer says no; frozen, it would let rollouts hang until somebody resumes."""
    async with case_of() as case:
        await case.first_sync("1")
        case.replicas[1].faults.add("/pause", action, when="after")  # type: ignore[arg-type]
        check_error(await case.post("/pause?mode=keep"), 503, case.replicas[1].id)
        assert [replica.engine.paused for replica in case.replicas] == [None, None, None]
        assert await case.states() == ["ready", "ready", "ready"]


async def test_a_pause_that_fails_resumes_nobody_who_was_paused_before() -> None:
    """A replica that is fenced and paused since a failed update holds mixed weights."""
    async with case_of() as case:
        await case.first_sync("1")
        await case.start()
        await case.update()
        await case.ok("/fleet/reset")
        assert [replica.engine.paused for replica in case.replicas] == ["keep"] * 3
        case.replicas[1].faults.add("/pause", "status")
        check_error(await case.post("/pause?mode=keep"), 503, case.replicas[1].id)
        assert [replica.engine.paused for replica in case.replicas] == ["keep"] * 3
