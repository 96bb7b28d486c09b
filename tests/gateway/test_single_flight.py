"""A retry of a control call is not a second call; everything else is."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from fleet.errors import MemberFailed
from fleet.owner import task_owner
from gateway import single_flight
from gateway.asgi import ClientGone
from gateway.single_flight import STORED, ControlCall, SingleFlight

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Caller:
    """One connection: it stays until it leaves."""

    def __init__(self) -> None:
        self._left = asyncio.Event()

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def __call__(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}


class Work:
    """What a call means: counted, and finished when it is told to."""

    def __init__(self, result: Any = "done") -> None:
        self.times = 0
        self.finished = 0
        self.go = asyncio.Event()
        self._result = result

    async def __call__(self) -> Any:
        self.times += 1
        await self.go.wait()
        self.finished += 1
        if isinstance(self._result, Exception):
            raise self._result
        return self._result, self.times


class Desk:
    """Single flight over an owner of its own, and where the fleet stands."""

    def __init__(self, owner: asyncio.TaskGroup) -> None:
        self.position = 0
        self.flights = SingleFlight(owner, lambda: self.position)

    def call(
        self,
        work: Work,
        body: bytes | bytearray = b"{}",
        *,
        path: str = "/start",
        key: str | None = None,
        caller: Caller | None = None,
    ) -> asyncio.Task[Any]:
        """Start one call."""
        asked = ControlCall(path, b"", body, key)
        return asyncio.ensure_future(self.flights.run(asked, work, caller or Caller()))


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    """One gateway's desk."""
    async with task_owner() as owner, asyncio.timeout(20):
        yield Desk(owner)


async def settle() -> None:
    """Let everyone who can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def lost_answer(desk: Desk, work: Work, **asked: Any) -> None:
    """Make a call whose caller is gone before the answer is there."""
    caller = Caller()
    task = desk.call(work, caller=caller, **asked)
    await settle()
    caller.leave()
    with pytest.raises(ClientGone):
        await task
    work.go.set()
    await settle()
    assert work.finished == work.times


async def test_a_retry_joins_the_call_in_flight(desk: Desk) -> None:
    """Both callers get the one result."""
    work = Work()
    tasks = [desk.call(work), desk.call(work), desk.call(work, key="k")]
    await settle()
    work.go.set()
    assert await asyncio.gather(*tasks) == [("done", 1)] * 3
    assert work.times == 1


@pytest.mark.parametrize("other", [{"body": b'{"a":1}'}, {"path": "/finish"}])
async def test_another_path_or_body_is_another_call(desk: Desk, other: dict[str, Any]) -> None:
    """Only the same call can be a retry."""
    work = Work()
    work.go.set()
    await asyncio.gather(desk.call(work), desk.call(work, **other))
    assert work.times == 2


def test_path_query_and_body_make_the_name_of_a_call() -> None:
    """And the Idempotency-Key does not."""
    calls = [
        ControlCall("/a", b"", b""),
        ControlCall("/b", b"", b""),
        ControlCall("/a", b"x=1", b""),
        ControlCall("/a", b"", b"x"),
    ]
    assert len({call.name for call in calls}) == 4
    assert ControlCall("/a", b"", b"", "k").name == calls[0].name
    assert ControlCall("/a", b"", bytearray(b"x")).name == calls[3].name


async def test_an_identical_body_after_a_delivered_answer_is_a_new_call(desk: Desk) -> None:
    """Two chunks may look alike."""
    work = Work()
    work.go.set()
    assert await desk.call(work) == ("done", 1)
    assert await desk.call(work) == ("done", 2)


async def test_a_lost_answer_is_replayed_once(desk: Desk) -> None:
    """Case 15: the retry gets the real result, and the next identical body is a new call."""
    work = Work()
    await lost_answer(desk, work)
    assert await desk.call(work) == ("done", 1)
    assert await desk.call(work) == ("done", 2)


async def test_a_lost_answer_is_not_replayed_once_the_fleet_has_moved_on(desk: Desk) -> None:
    """Then an equal call belongs to another round."""
    work = Work()
    await lost_answer(desk, work)
    desk.position += 1
    assert await desk.call(work) == ("done", 2)


async def test_the_same_idempotency_key_gets_the_stored_answer(desk: Desk) -> None:
    """Also after it was delivered; another key or none is a new call."""
    work = Work()
    work.go.set()
    assert await desk.call(work, key="k1") == ("done", 1)
    assert await desk.call(work, key="k1") == ("done", 1)
    assert await desk.call(work, key="k2") == ("done", 2)
    assert await desk.call(work) == ("done", 3)


async def test_no_key_does_not_match_no_key(desk: Desk) -> None:
    """Silence is not a promise."""
    work = Work()
    work.go.set()
    assert await desk.call(work) == ("done", 1)
    assert await desk.call(work, key="k") == ("done", 2)


async def test_a_caller_that_leaves_does_not_stop_the_work(desk: Desk) -> None:
    """Half a collective would hang everyone."""
    work = Work()
    caller = Caller()
    task = desk.call(work, caller=caller)
    await settle()
    caller.leave()
    with pytest.raises(ClientGone):
        await task
    assert (work.times, work.finished) == (1, 0)
    work.go.set()
    await settle()
    assert work.finished == 1


async def test_a_cancelled_caller_does_not_stop_the_work_either(desk: Desk) -> None:
    """The server cancels what it serves when it shuts a connection down."""
    work = Work()
    task = desk.call(work)
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    work.go.set()
    assert await desk.call(work) == ("done", 1)


async def test_one_caller_of_two_may_leave(desk: Desk) -> None:
    """The other still gets the answer, which then counts as delivered."""
    work, caller = Work(), Caller()
    leaving, staying = desk.call(work, caller=caller), desk.call(work)
    await settle()
    caller.leave()
    with pytest.raises(ClientGone):
        await leaving
    work.go.set()
    assert await staying == ("done", 1)
    assert await desk.call(work) == ("done", 2)


async def test_an_error_reaches_every_caller_and_is_replayed_too(desk: Desk) -> None:
    """A failed update must not be carried out again because its 424 got lost."""
    work = Work(MemberFailed("update failed"))
    await lost_answer(desk, work)
    with pytest.raises(MemberFailed):
        await desk.call(work)
    assert work.times == 1
    with pytest.raises(MemberFailed):
        await desk.call(work)
    assert work.times == 2


async def test_a_bug_in_the_work_does_not_bring_down_the_gateway(desk: Desk) -> None:
    """Its caller sees it; the next call works."""
    broken, work = Work(ZeroDivisionError()), Work()
    broken.go.set()
    work.go.set()
    with pytest.raises(ZeroDivisionError):
        await desk.call(broken, path="/broken")
    assert await desk.call(work) == ("done", 1)


async def test_after_a_reset_nothing_from_before_is_met(desk: Desk) -> None:
    """Neither what is stored nor what is on its way."""
    old, new = Work("old"), Work("new")
    first = desk.call(old)
    await settle()
    desk.flights.forget()
    new.go.set()
    assert await desk.call(new) == ("new", 1)
    old.go.set()
    assert await first == ("old", 1)


async def test_a_lost_answer_outlives_many_calls_that_came_before_it(desk: Desk) -> None:
    """A call that is made in every round is not old because its first time was long ago."""
    first, finish, chunk = Work(), Work(), Work()
    first.go.set()
    chunk.go.set()
    await desk.call(first, path="/finish")
    for number in range(STORED - 1):
        await desk.call(chunk, str(number).encode(), path="/update")
    await lost_answer(desk, finish, path="/finish")
    await desk.call(chunk, b"one more", path="/update")
    await desk.call(chunk, b"and another", path="/update")
    assert await desk.call(finish, path="/finish") == ("done", 1)


async def test_only_so_many_answers_are_kept(desk: Desk) -> None:
    """The oldest go first."""
    works = [Work() for _ in range(STORED + 2)]
    for number, work in enumerate(works):
        await lost_answer(desk, work, body=str(number).encode())
    assert await desk.call(works[0], b"0") == ("done", 2)
    assert await desk.call(works[-1], str(len(works) - 1).encode()) == ("done", 1)


async def test_a_lost_answer_waits_for_its_retry_only_so_long(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that an equal call is meant anew, whoever makes it."""
    work = Work()
    await lost_answer(desk, work)
    monkeypatch.setattr(single_flight, "STORED_S", -1.0)
    assert await desk.call(work) == ("done", 2)


async def test_a_call_from_before_a_reset_that_ends_late_takes_no_other_along(desk: Desk) -> None:
    """A retry of the call that was made after the reset must still meet that one."""
    old, new = Work("old"), Work("new")
    before = desk.call(old)
    await settle()
    desk.flights.forget()
    after = desk.call(new)
    await settle()
    old.go.set()
    assert await before == ("old", 1)
    retry = desk.call(new)
    await settle()
    new.go.set()
    assert (await after, await retry) == (("new", 1), ("new", 1))


class Body(bytearray):
    """A body that tells when it is gone."""


@pytest.mark.parametrize(
    ("result", "lost"),
    [("done", False), ("done", True), (MemberFailed("no"), True)],
    ids=["delivered", "lost", "failure lost"],
)
async def test_an_answer_is_stored_without_its_call(desk: Desk, result: Any, *, lost: bool) -> None:
    """Bodies may be large, and up to 64 answers wait for minutes for a retry."""
    work, caller = Work(result), Caller()
    body = Body(b"weights")
    gone = weakref.ref(body)
    task = desk.call(work, body, caller=caller)
    await settle()
    if lost:
        caller.leave()
        await settle()
    work.go.set()
    await asyncio.wait([task])
    await settle()
    assert isinstance(task.exception(), ClientGone) == lost
    del task, body
    gc.collect()
    assert gone() is None
