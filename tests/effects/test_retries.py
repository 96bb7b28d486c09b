"""A retry at a gateway that has not carried the call: told what became of it, or that it is new."""

from __future__ import annotations

from time import time

import pytest

from fleet.errors import Refused
from fleet.facts.calls import CallId, Ended, Holder, Past, Seat
from fleet.facts.outcome import Outcome, Result
from fleet.gateways.retries import Calls
from fleet.ledger import Ledger
from fleet.store import open_store
from tests.fleets import NOW, change

CALL = CallId(by="trainer", name="/finish#1")
OK = {"a": Outcome(outcome=Result.OK)}


async def met(
    what: str, event: str, *, answers: bool
) -> tuple[dict[str, Outcome] | None, list[str]]:
    """Meet, at `here`, a call that `there` has carried; who has a seat may have died just now."""
    holder = Holder(gateway="there", token="t", what=what, call=CALL, since=NOW)
    over = Ended(holder=change(holder, story=(Past(event=event, asked=("a",)),)), at=time())
    asked: list[str] = []

    async def hears(gateway: str) -> bool:
        asked.append(gateway)
        return answers

    async with open_store("memory://", "tests") as store:
        ledger = await Ledger.open(store, "tests")
        seats = {name: Seat(where=name, since=NOW) for name in ("here", "there")}
        await ledger.amend(lambda state: change(state, gateways=seats, ended=over))
        calls = Calls(ledger, "here")
        calls.hears = hears
        return await calls.met(CALL), asked


async def test_a_call_that_a_gateway_has_carried_which_died_just_now_is_told_to_its_retry() -> None:
    """Its seat does not tell that yet; taken for a new one, the retry would be out of phase."""
    assert await met("finish", "FinishArrived", answers=False) == (OK, ["there"])


async def test_an_update_of_a_gateway_that_died_just_now_is_in_doubt() -> None:
    """Two chunks may look alike, and sent twice one of them would hang everyone."""
    with pytest.raises(Refused, match="nobody knows whether its answer was delivered"):
        await met("update", "UpdateArrived", answers=False)


async def test_after_a_call_of_a_gateway_that_lives_an_equal_one_is_new() -> None:
    """That would have said so if its answer had reached nobody."""
    assert await met("finish", "FinishArrived", answers=True) == (None, ["there"])
