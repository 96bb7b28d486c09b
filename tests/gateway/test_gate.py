"""The gate: who goes where and when, and that nobody is lost in the line or left in the counts."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest

from fleet.errors import DeadlinePassed, GateOverflow, NoEligibleReplica
from fleet.facts.state import Phase, TrainerPause
from fleet.rules.membership import marked
from gateway.gate import RolloutGate, Ticket
from gateway.settings_model import Gate as GateSettings
from gateway.settings_model import GateMode
from tests.fleets import NOW, change, fleet_in, fleet_of, replica

if TYPE_CHECKING:
    from fleet.facts.state import FleetState

OPEN = fleet_of(replica("a"), replica("b"), replica("c"))
CLOSED = change(OPEN, pause=TrainerPause(mode="keep", clear_cache=True, by="t", since=NOW))
NOBODY = marked(OPEN, "abc", fence="mixed")
SHORT = 0.02


def gate_at(state: FleetState, policy: str = "least_inflight", **settings: Any) -> RolloutGate:
    """Return a gate that follows this state."""
    gate = RolloutGate(GateSettings(**settings), policy)
    gate.follow(state)
    return gate


async def settle() -> None:
    """Let everyone who can go on do so, in this loop, without any clock."""
    for _ in range(10):
        await asyncio.sleep(0)


async def held(gate: RolloutGate, *sizes: int, **asked: Any) -> list[asyncio.Task[Ticket]]:
    """Return rollouts that wait in the line, in this order."""
    tasks = [asyncio.ensure_future(gate.admit(size, **asked)) for size in sizes]
    await settle()
    assert not any(task.done() for task in tasks)
    return tasks


def nothing_is_left(gate: RolloutGate) -> bool:
    """Whether the gate is as if nobody had ever come."""
    return (gate.held, gate.held_bytes, gate.inflight) == (0, 0, {})


async def is_over(waiting: asyncio.Task[None]) -> bool:
    """Whether this wait has ended, once everyone has gone on."""
    await settle()
    return waiting.done()


async def test_an_open_gate_admits_at_once_with_replica_and_version() -> None:
    """Both are fixed in that moment."""
    gate = gate_at(change(OPEN, weight_version="7"))
    ticket = await gate.admit(10)
    assert (ticket.replica.id, ticket.version, ticket.held_s) == ("a", "7", 0.0)
    gate.follow(change(OPEN, weight_version="8"))
    assert ticket.version == "7"
    assert (await gate.admit(10)).version == "8"


async def test_before_any_version_the_label_is_the_servers_own_word() -> None:
    """«default» is what vLLM says."""
    assert (await gate_at(OPEN).admit(1)).version == "default"


@pytest.mark.parametrize("phase", list(Phase))
async def test_a_gate_stands_open_exactly_when_the_fleet_is_not_paused(phase: Phase) -> None:
    """It has no switch of its own."""
    state = fleet_in(phase)
    gate = gate_at(state)
    assert (gate.closed_since is None) is not state.fleet_paused


async def test_a_closed_gate_remembers_since_when() -> None:
    """Following more closed states does not start the time anew."""
    gate = gate_at(CLOSED)
    since = gate.closed_since
    gate.follow(change(CLOSED, kv="mixed"))
    assert gate.closed_since == since is not None
    gate.follow(OPEN)
    assert gate.closed_since is None


async def test_the_line_is_first_come_first_served() -> None:
    """In the order of arrival, whatever their size."""
    gate = gate_at(CLOSED)
    order: list[int] = []

    async def rollout(number: int) -> None:
        await gate.admit(number)
        order.append(number)

    async with asyncio.TaskGroup() as group:
        for number in (5, 3, 9, 1):
            group.create_task(rollout(number))
        await settle()
        assert (gate.held, gate.held_bytes) == (4, 18)
        gate.follow(OPEN)
    assert order == [5, 3, 9, 1]
    assert (gate.held, gate.held_bytes) == (0, 0)


async def test_the_release_spreads_over_the_replicas() -> None:
    """Opening must not send the whole line to one server."""
    gate = gate_at(CLOSED)
    tasks = await held(gate, *[1] * 30)
    gate.follow(OPEN)
    await asyncio.gather(*tasks)
    assert gate.inflight == {"a": 10, "b": 10, "c": 10}


@pytest.mark.parametrize("state", [CLOSED, NOBODY])
async def test_a_full_line_overflows_by_count(state: FleetState) -> None:
    """503 with Retry-After for the one too many; those in the line stay."""
    gate = gate_at(state, max_held=2)
    tasks = await held(gate, 1, 1)
    with pytest.raises(GateOverflow, match=r"holds 2 rollouts \(2 bytes\)"):
        await gate.admit(1)
    gate.follow(OPEN)
    await asyncio.gather(*tasks)


async def test_a_full_line_overflows_by_bytes() -> None:
    """Exactly as many as it may is not too many."""
    gate = gate_at(CLOSED, max_held_bytes=100)
    tasks = await held(gate, 60, 40)
    with pytest.raises(GateOverflow):
        await gate.admit(1)
    tasks[0].cancel()
    await settle()
    assert gate.held_bytes == 40
    tasks += await held(gate, 60)
    gate.follow(OPEN)
    await asyncio.gather(*tasks[1:])


async def test_a_gate_that_rejects_holds_nobody() -> None:
    """And admits as ever while it is open."""
    gate = gate_at(CLOSED, mode=GateMode.REJECT)
    with pytest.raises(GateOverflow):
        await gate.admit(1)
    assert nothing_is_left(gate)
    gate.follow(OPEN)
    assert (await gate.admit(1)).replica.id == "a"


@pytest.mark.parametrize(
    ("state", "min_version", "kind", "told"),
    [
        (CLOSED, None, DeadlinePassed, "the gate stayed closed for 0.02 s"),
        (NOBODY, None, NoEligibleReplica, "no replica could serve this within 0.02 s"),
        (fleet_of(), None, NoEligibleReplica, "no replica could serve this"),
        (OPEN, "9", DeadlinePassed, "version '9' was not committed within 0.02 s"),
        (CLOSED, "9", DeadlinePassed, "version '9' was not committed within 0.02 s"),
    ],
)
async def test_the_end_of_the_gates_time_says_what_was_missing(
    state: FleetState, min_version: str | None, kind: type[Exception], told: str
) -> None:
    """504 for a gate or a version that did not come, 503 for replicas that may come back."""
    gate = gate_at(state, timeout_s=SHORT)
    with pytest.raises(kind, match=told):
        await gate.admit(1, min_version)
    assert nothing_is_left(gate)


async def test_avoiding_every_replica_waits_for_another() -> None:
    """A rollout that failed on a replica is not sent there again."""
    gate = gate_at(OPEN, timeout_s=SHORT)
    assert (await gate.admit(1, avoid=["a", "b"])).replica.id == "c"
    with pytest.raises(NoEligibleReplica):
        await gate.admit(1, avoid="abc")
    gate = gate_at(OPEN)
    (task,) = await held(gate, 1, avoid="abc")
    gate.follow(OPEN.with_replicas([replica("d")]))
    assert (await task).replica.id == "d"


async def test_a_minimum_version_goes_by_the_order_of_commits() -> None:
    """The string says nothing: here 9 was committed before 10, and 8 after both."""
    state = OPEN
    for version in ("9", "10", "8"):
        state = state.with_commit(version)
    state = marked(state, "abc", holds=3)
    gate = gate_at(state)
    for known in ("9", "10", "8", "default", None):
        assert (await gate.admit(1, known)).version == "8"


async def test_a_version_that_is_to_come_is_waited_for_without_holding_others_up() -> None:
    """Who waits for version 11 does not block who does not."""
    gate = gate_at(OPEN)
    (task,) = await held(gate, 1, min_version="11")
    await gate.admit(1)
    gate.follow(OPEN)
    await settle()
    assert not task.done()
    gate.follow(marked(OPEN.with_commit("11"), "abc", holds=1))
    assert (await task).version == "11"


async def test_a_waiter_that_leaves_leaves_nothing_behind() -> None:
    """Neither a place in the line nor its bytes."""
    gate = gate_at(CLOSED)
    tasks = await held(gate, 10, 20, 30)
    tasks[1].cancel()
    await settle()
    assert (gate.held, gate.held_bytes) == (2, 40)
    gate.follow(OPEN)
    for ticket in await asyncio.gather(tasks[0], tasks[2]):
        ticket.done()
    assert nothing_is_left(gate)
    await asyncio.wait_for(gate.drained(), 1)


async def test_a_ticket_granted_in_the_moment_of_leaving_is_given_back() -> None:
    """Case 22: in-flight counts return to zero, and the gate can close."""
    gate = gate_at(CLOSED)
    (task,) = await held(gate, 10)
    gate.follow(OPEN)
    assert gate.inflight == {"a": 1}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert nothing_is_left(gate)
    await asyncio.wait_for(gate.closed(), 1)
    await asyncio.wait_for(gate.drained(), 1)


async def test_the_gate_is_closed_only_when_the_last_byte_is_sent() -> None:
    """A pause that goes out then overtakes nobody."""
    gate = gate_at(OPEN)
    first, second = await gate.admit(1), await gate.admit(1)
    gate.follow(CLOSED)
    closing = asyncio.ensure_future(gate.closed())
    first.sent()
    first.sent()
    assert not await is_over(closing)
    second.sent()
    assert await is_over(closing)


async def test_a_rollout_that_ends_unsent_counts_as_sent() -> None:
    """Its replica may have refused the connection."""
    gate = gate_at(OPEN)
    ticket = await gate.admit(1)
    closing = asyncio.ensure_future(gate.closed())
    assert not await is_over(closing)
    ticket.done()
    assert await is_over(closing)


async def test_the_gate_is_drained_when_every_answer_has_ended() -> None:
    """Sent is not answered."""
    gate = gate_at(OPEN)
    tickets = [await gate.admit(1) for _ in range(4)]
    for ticket in tickets:
        ticket.sent()
    draining = asyncio.ensure_future(gate.drained())
    for ticket in tickets[:-1]:
        ticket.done()
    assert not await is_over(draining)
    tickets[-1].done()
    assert await is_over(draining)
    assert gate.inflight == {}


async def test_a_ticket_whose_replica_is_lost_before_it_is_taken_is_exchanged() -> None:
    """Granted in one moment and void in the next, it would be sent to a corpse."""
    gate = gate_at(CLOSED)
    (task,) = await held(gate, 10)
    gate.follow(OPEN)
    gate.follow(marked(OPEN, "a", lost="no answer"))
    other = (await task).replica.id
    assert other != "a"
    assert gate.inflight == {other: 1}


async def test_a_ticket_granted_in_the_moment_before_the_lease_ends_is_not_used() -> None:
    """Whoever closes the gates waits no longer than that."""
    gate = gate_at(CLOSED)
    (task,) = await held(gate, 10)
    gate.follow(OPEN)
    gate.renew(monotonic())
    await settle()
    assert not task.done()
    assert (gate.held, gate.inflight) == (1, {})
    gate.renew(monotonic() + 60)
    assert (await task).replica.id in OPEN.replicas


async def test_a_drained_gate_waits_for_nobody_who_cannot_answer() -> None:
    """What a silent replica has in hand may never end; one that comes back counts again."""
    gate = gate_at(OPEN)
    tickets = [await gate.admit(1) for _ in range(3)]
    for ticket in tickets:
        ticket.sent()
    gate.follow(marked(OPEN, "a", lost="no answer"))
    draining = asyncio.ensure_future(gate.drained())
    tickets[1].done()
    assert not await is_over(draining)
    tickets[2].done()
    assert await is_over(draining)
    gate.follow(OPEN)
    draining = asyncio.ensure_future(gate.drained())
    assert not await is_over(draining)
    gate.follow(change(OPEN, replicas={r: f for r, f in OPEN.replicas.items() if r != "a"}))
    assert await is_over(draining)
    tickets[0].done()
    assert gate.inflight == {}


async def test_a_gate_tells_who_keeps_it_from_closing() -> None:
    """By replica, and only those rollouts that are not sent yet."""
    gate = gate_at(OPEN)
    tickets = [await gate.admit(1) for _ in range(4)]
    tickets[1].sent()
    assert gate.load().unsent == {"a": 2, "c": 1}
    assert gate.load().holding() == {
        "a": "2 rollouts are still being sent to it",
        "c": "1 rollout is still being sent to it",
    }
    assert gate.load().answering()["b"] == "1 rollout is still being answered by it"
    for ticket in tickets:
        ticket.done()
    assert gate.load().holding() == gate.load().answering() == {}


async def test_a_replica_that_is_not_ready_gets_nothing() -> None:
    """From the very state on that says so."""
    gate = gate_at(OPEN)
    gate.follow(marked(OPEN, ["a", "b"], fence="mixed"))
    assert {(await gate.admit(1)).replica.id for _ in range(6)} == {"c"}
