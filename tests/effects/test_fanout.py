"""Fan-out: everyone at once, an answer at the first failure, and nobody forgotten."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from fleet.facts.outcome import Outcome, Result
from fleet.owner import task_owner
from fleet.replicas.fanout import TRICKLE, Attempt, FanOut
from tests.fleets import FAILED, OK, UNREACHABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

LONG = 30.0
SHORT = 0.02


@pytest.fixture(autouse=True)
def nothing_is_complained_about(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An exception that nobody retrieved would only show in the log of asyncio."""
    yield
    assert [r.message for r in caplog.records if r.name == "asyncio"] == []


@pytest.fixture
async def owner() -> AsyncIterator[asyncio.TaskGroup]:
    """The group that outlives requests."""
    async with task_owner() as group, asyncio.timeout(LONG):
        yield group


@pytest.fixture
async def fan_out(owner: asyncio.TaskGroup) -> FanOut:
    """A fan-out over that group."""
    return FanOut(owner)


class LateOnes:
    """Who was reported late, and a way to wait for it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Result]] = []
        self._more = asyncio.Condition()

    async def __call__(self, replica: str, outcome: Outcome) -> None:
        async with self._more:
            self.heard.append((replica, outcome.outcome))
            self._more.notify_all()

    async def count(self, expected: int) -> None:
        """Return when that many have been reported."""
        async with self._more:
            await self._more.wait_for(lambda: len(self.heard) >= expected)


def answers(outcome: Outcome = OK) -> Attempt:
    """Return an attempt that is answered at once."""

    async def attempt() -> Outcome:
        return outcome

    return attempt


def answers_after(event: asyncio.Event, outcome: Outcome = OK) -> Attempt:
    """Return an attempt that is answered when the event is set."""

    async def attempt() -> Outcome:
        await event.wait()
        return outcome

    return attempt


def breaks() -> Attempt:
    """Return an attempt with a bug."""

    async def attempt() -> Outcome:
        raise ZeroDivisionError

    return attempt


def words(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Return the word for each replica."""
    return {replica: outcome.outcome.value for replica, outcome in outcomes.items()}


@pytest.mark.parametrize("collective", [True, False])
async def test_three_hundred_calls_are_all_in_flight_at_once(
    fan_out: FanOut, collective: bool
) -> None:
    """A collective returns only when all have entered, so any cap would hang it."""
    barrier = asyncio.Barrier(300)

    async def attempt() -> Outcome:
        await barrier.wait()
        return OK

    attempts: dict[str, Attempt] = {f"r{n}": attempt for n in range(300)}
    if collective:
        outcomes = await fan_out.gather_collective(attempts, LONG, LateOnes())
    else:
        outcomes = await fan_out.ask(attempts, LONG)
    assert list(outcomes) == list(attempts)
    assert set(words(outcomes).values()) == {"ok"}


async def test_a_collective_answers_at_the_first_failure(fan_out: FanOut) -> None:
    """The siblings of a dead member would only answer when their own deadline passes."""
    stuck = asyncio.Event()
    attempts = {"a": answers(), "b": answers(FAILED), "c": answers_after(stuck)}
    outcomes = await fan_out.gather_collective(attempts, LONG, LateOnes())
    assert words(outcomes) == {"a": "ok", "b": "failed", "c": "wedged"}
    assert fan_out.in_flight() == {"c"}


async def test_who_was_silent_is_reported_late_exactly_once(fan_out: FanOut) -> None:
    """And is not in flight any more when that is said."""
    stuck, late_ones = asyncio.Event(), LateOnes()
    attempts = {
        "a": answers_after(stuck),
        "b": answers(FAILED),
        "c": answers_after(stuck, UNREACHABLE),
    }
    await fan_out.gather_collective(attempts, LONG, late_ones)
    assert late_ones.heard == []
    stuck.set()
    await late_ones.count(2)
    assert sorted(late_ones.heard) == [("a", Result.OK), ("c", Result.UNREACHABLE)]
    assert fan_out.in_flight() == frozenset()


async def test_who_answered_in_time_is_never_reported_late(fan_out: FanOut) -> None:
    """Not even those that answer in the same moment as the failure."""
    together, late_ones = asyncio.Event(), LateOnes()
    attempts = {f"r{n}": answers_after(together, FAILED if n == 3 else OK) for n in range(8)}
    gathering = asyncio.ensure_future(fan_out.gather_collective(attempts, LONG, late_ones))
    await asyncio.sleep(0)
    together.set()
    outcomes = await gathering
    wedged = {r for r, word in words(outcomes).items() if word == "wedged"}
    await late_ones.count(len(wedged))
    assert {replica for replica, _ in late_ones.heard} == wedged
    assert len(late_ones.heard) == len(wedged)


async def test_a_collective_ends_at_its_deadline(fan_out: FanOut) -> None:
    """Everyone who has not answered is wedged, and still watched."""
    stuck, late_ones = asyncio.Event(), LateOnes()
    attempts = {"a": answers(), "b": answers_after(stuck)}
    outcomes = await fan_out.gather_collective(attempts, SHORT, late_ones)
    assert words(outcomes) == {"a": "ok", "b": "wedged"}
    stuck.set()
    await late_ones.count(1)
    assert late_ones.heard == [("b", Result.OK)]


async def test_a_caller_that_leaves_does_not_stop_a_collective(fan_out: FanOut) -> None:
    """Dropping the connections would free nobody; who answers later is heard."""
    entered, stuck, late_ones = asyncio.Barrier(3), asyncio.Event(), LateOnes()

    async def attempt() -> Outcome:
        await entered.wait()
        await stuck.wait()
        return OK

    attempts: dict[str, Attempt] = {"a": attempt, "b": attempt}
    caller = asyncio.ensure_future(fan_out.gather_collective(attempts, LONG, late_ones))
    await entered.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert fan_out.in_flight() == {"a", "b"}
    stuck.set()
    await late_ones.count(2)
    assert fan_out.in_flight() == frozenset()


@pytest.mark.parametrize("collective", [True, False])
async def test_a_bug_in_one_attempt_reaches_the_caller_and_not_the_owner(
    fan_out: FanOut, collective: bool
) -> None:
    """The gateway goes on; the next fan-out works."""
    stuck, late_ones = asyncio.Event(), LateOnes()
    attempts = {"a": answers_after(stuck), "b": breaks()}
    calling = (
        fan_out.gather_collective(attempts, LONG, late_ones)
        if collective
        else fan_out.ask(attempts, LONG)
    )
    with pytest.raises(ZeroDivisionError):
        await calling
    stuck.set()
    assert words(await fan_out.ask({"a": answers()}, LONG)) == {"a": "ok"}
    if collective:
        await late_ones.count(1)


async def test_asking_cancels_who_is_late(fan_out: FanOut) -> None:
    """Independent calls can be taken back."""
    cancelled = asyncio.Event()

    async def attempt() -> Outcome:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return OK

    outcomes = await fan_out.ask({"a": answers(), "b": attempt}, SHORT)
    assert words(outcomes) == {"a": "ok", "b": "timeout"}
    assert outcomes["b"].detail == "no answer within 0.02 s"
    await cancelled.wait()


async def test_asking_waits_for_everyone_although_one_has_failed(fan_out: FanOut) -> None:
    """Each replica's own outcome counts."""
    later = asyncio.Event()

    async def releases() -> Outcome:
        later.set()
        return FAILED

    outcomes = await fan_out.ask({"a": releases, "b": answers_after(later)}, LONG)
    assert words(outcomes) == {"a": "failed", "b": "ok"}


async def test_a_caller_that_leaves_takes_independent_calls_with_it(fan_out: FanOut) -> None:
    """Nobody needs them any more."""
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def attempt() -> Outcome:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return OK

    caller = asyncio.ensure_future(fan_out.ask({"a": attempt}, LONG))
    await entered.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await cancelled.wait()


async def test_nobody_to_call_is_answered_at_once(fan_out: FanOut) -> None:
    """An empty fan-out has no first failure to wait for."""
    assert await fan_out.ask({}, LONG) == {}
    assert await fan_out.gather_collective({}, LONG, LateOnes()) == {}


async def test_a_replica_in_two_collectives_is_in_flight_until_both_have_ended(
    fan_out: FanOut,
) -> None:
    """A probe must not disturb the second because the first has ended."""
    first, second, late_ones = asyncio.Event(), asyncio.Event(), LateOnes()
    for stuck in (first, second):
        await fan_out.gather_collective({"a": answers_after(stuck)}, SHORT, late_ones)
    first.set()
    await late_ones.count(1)
    assert fan_out.in_flight() == {"a"}
    second.set()
    await late_ones.count(2)
    assert fan_out.in_flight() == frozenset()


async def everyone_comes(fan_out: FanOut, grace_s: float, at_work: tuple[str, ...] = ()) -> None:
    """Wait as who believes that every replica may still come."""
    await fan_out.settled(grace_s, lambda _: True, at_work)


async def test_who_only_waited_for_the_culprit_is_awaited(fan_out: FanOut) -> None:
    """It answers a moment after the collective was given up."""
    stuck, late_ones = asyncio.Event(), LateOnes()
    attempts = {"a": answers(FAILED), "b": answers_after(stuck)}
    await fan_out.gather_collective(attempts, LONG, late_ones)
    waiting = asyncio.ensure_future(everyone_comes(fan_out, LONG))
    await asyncio.sleep(0)
    assert not waiting.done()
    stuck.set()
    await waiting
    assert late_ones.heard == [("b", Result.OK)]


async def test_nobody_is_awaited_longer_than_once(fan_out: FanOut) -> None:
    """Its moment begins when the collective is given up, not with each that asks for it."""
    await fan_out.gather_collective({"a": answers_after(asyncio.Event())}, SHORT, LateOnes())
    async with asyncio.timeout(5):
        for _ in range(100):
            await everyone_comes(fan_out, 0.1)
    assert fan_out.in_flight() == {"a"}


async def test_who_cannot_come_is_not_awaited(fan_out: FanOut) -> None:
    """It is lost, or has left the fleet; the others still have their moment."""
    stuck = asyncio.Event()
    attempts = {"a": answers_after(asyncio.Event()), "b": answers_after(stuck)}
    await fan_out.gather_collective(attempts, SHORT, LateOnes())
    waiting = asyncio.ensure_future(fan_out.settled(LONG, lambda replica: replica == "b"))
    await asyncio.sleep(0)
    assert not waiting.done()
    stuck.set()
    async with asyncio.timeout(5):
        await waiting


async def test_a_collective_that_goes_on_is_not_awaited_until_it_was_abandoned(
    fan_out: FanOut,
) -> None:
    """Its members are at work; once a reset has let them go, they have their moment, and once."""
    attempts = {"a": answers_after(asyncio.Event())}
    going_on = asyncio.ensure_future(fan_out.gather_collective(attempts, LONG, LateOnes()))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await everyone_comes(fan_out, LONG, at_work=("a",))
        began = time.monotonic()
        for _ in range(100):
            await everyone_comes(fan_out, 0.1)
        assert time.monotonic() - began >= 0.1
    going_on.cancel()


async def test_who_has_left_the_fleet_is_hung_up_on(fan_out: FanOut) -> None:
    """What it would answer late is not taken for an answer of the next one of that name."""
    stuck, late_ones = asyncio.Event(), LateOnes()
    attempts = {"a": answers_after(stuck), "b": answers_after(stuck)}
    going_on = asyncio.ensure_future(fan_out.gather_collective(attempts, LONG, late_ones))
    await asyncio.sleep(0)
    fan_out.forget(lambda replica: replica == "a")
    await asyncio.sleep(0)
    assert fan_out.in_flight() == {"a", "b"}, "its collective goes on"
    going_on.cancel()
    await asyncio.wait([going_on])
    fan_out.forget(lambda replica: replica == "a")
    await asyncio.sleep(0)
    assert fan_out.in_flight() == {"b"}
    stuck.set()
    await late_ones.count(1)
    assert late_ones.heard == [("b", Result.OK)]


async def test_a_late_answer_is_dealt_with_although_its_replica_has_left(fan_out: FanOut) -> None:
    """It has come before, and what is being written must not be cut off."""
    stuck, hears, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    heard: list[str] = []

    async def late(replica: str, outcome: Outcome) -> None:
        del outcome
        hears.set()
        await over.wait()
        heard.append(replica)

    await fan_out.gather_collective({"a": answers_after(stuck)}, SHORT, late)
    stuck.set()
    await hears.wait()
    fan_out.forget(lambda _: True)
    over.set()
    await everyone_comes(fan_out, LONG)
    assert heard == ["a"]


async def test_a_bug_in_one_look_cancels_the_others(fan_out: FanOut) -> None:
    """Looks bound themselves, so a bug is the only way that one fails."""

    async def broken() -> str:
        raise ZeroDivisionError

    async def endless() -> str:
        await asyncio.Event().wait()
        return "never"

    async def seen() -> str:
        return "fine"

    assert await fan_out.look({"a": seen}) == {"a": "fine"}
    with pytest.raises(ExceptionGroup):
        await fan_out.look({"a": endless, "b": broken})


async def test_what_saves_time_is_done_a_few_at_a_time_and_to_its_end(fan_out: FanOut) -> None:
    """A burst of hundreds would keep the loop from those who are waited for."""
    at_once, most, done = 0, 0, list[int]()

    async def attempt(number: int) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        done.append(number)

    wanted = {str(n): partial(attempt, n) for n in range(50)}
    await fan_out.trickle(wanted, asyncio.Event())
    assert sorted(done) == list(range(50))
    assert most == TRICKLE


async def test_what_saves_time_stops_when_its_time_is_over(fan_out: FanOut) -> None:
    """What is left would take time from those for whom it was to save some."""
    over, done = asyncio.Event(), list[int]()

    async def attempt(number: int) -> None:
        done.append(number)
        over.set()

    await fan_out.trickle({str(n): partial(attempt, n) for n in range(50)}, over)
    assert len(done) == TRICKLE


async def test_what_saves_time_waits_while_the_loop_is_busy(fan_out: FanOut) -> None:
    """Nothing is saved by what others must wait for."""
    over, done = asyncio.Event(), list[int]()

    async def attempt() -> None:
        done.append(1)

    async def others() -> None:
        for _ in range(20):
            time.sleep(0.01)  # noqa: ASYNC251 - that is what keeps a loop busy
            await asyncio.sleep(0)
        assert not done

    async with asyncio.TaskGroup() as group:
        group.create_task(fan_out.trickle({"a": attempt}, over))
        group.create_task(others())
    assert done


async def test_a_bug_in_what_saves_time_ends_nothing_else(
    fan_out: FanOut, caplog: pytest.LogCaptureFixture
) -> None:
    """Its task belongs to the group that carries the gateway."""

    async def attempt() -> None:
        raise RuntimeError("a bug")

    await fan_out.trickle({"a": attempt}, asyncio.Event())
    assert "what was to save time" in caplog.text
