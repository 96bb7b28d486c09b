"""Gateways among each other, with gates that behave as the test says, over both store engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from time import monotonic

import msgspec
import pytest

from fleet.errors import LeaseLost
from fleet.facts.calls import CallId, Holder
from fleet.gateways.gate import Load
from fleet.gateways.peers import Peers
from fleet.gateways.talk import CHANNEL, Message
from fleet.ledger import Ledger
from fleet.owner import task_owner
from fleet.rules.events import HolderLost, InitRequested
from fleet.rules.membership import marked
from fleet.store import Store, open_store
from tests.fleets import NOW, fleet_of, group_for, replica
from tests.waiting import wait_until

LEASE_S = 1.5
BEAT_S = 0.15


class LocalGate:
    """A gate whose rollouts are on their way until the test lets them go."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self.until = 0.0
        self.unsent: dict[str, int] = {}

    async def closed(self) -> None:
        """Return when nothing is being sent."""
        await self.idle.wait()

    async def drained(self) -> None:
        """Return when nothing runs."""
        await self.idle.wait()

    def renew(self, until: float) -> None:
        """Take over until when it may admit."""
        self.until = until

    @property
    def admits(self) -> bool:
        """Whether a rollout that came now would be let through."""
        return monotonic() < self.until

    def load(self) -> Load:
        """Two rollouts in hand, whoever asks."""
        return Load(held=2, inflight={"a": 1}, unsent=dict(self.unsent))


class Gateway:
    """One gateway: its ledger, its gate, and its heartbeat, which can be stopped."""

    def __init__(self, ledger: Ledger, owner: asyncio.TaskGroup) -> None:
        self.ledger = ledger
        self.gate = LocalGate()
        self.taken: list[Holder] = []
        self.peers = Peers(
            ledger,
            self.gate,
            lambda work, name: owner.create_task(work, name=name),
            where="here",
            lease_s=LEASE_S,
        )
        self.peers.take_over = self._take_over
        self._owner = owner
        self._running: asyncio.Task[None] | None = None

    async def _take_over(self, lost: Holder) -> None:
        self.taken.append(lost)
        holder = Holder(
            gateway=self.peers.me, token="new", what=lost.what, call=lost.call, since=NOW
        )
        await self.ledger.apply(HolderLost(now=NOW, why="gone", lost=lost.token, holder=holder))

    async def live(self) -> None:
        """Take a seat and begin to beat."""
        await self.peers.beat()
        self._running = self._owner.create_task(self.peers.run(BEAT_S))

    async def die(self) -> None:
        """Stop at once, giving nothing back."""
        assert self._running is not None
        self._running.cancel()
        await asyncio.wait({self._running})

    def seated(self) -> set[str]:
        """Who has a seat, as far as this gateway knows."""
        return set(self.ledger.state.gateways)


Opening = Callable[[], Awaitable[Gateway]]


@pytest.fixture
async def another(store_url: str) -> AsyncIterator[Opening]:
    """Open one more living gateway of the same fleet."""
    async with AsyncExitStack() as stack, task_owner() as owner:  # tasks end before their stores

        async def opened() -> Gateway:
            store: Store = await stack.enter_async_context(open_store(store_url, "tests"))
            ledger = await Ledger.open(store, "tests")
            if not ledger.state.replicas:
                fleet = fleet_of(replica("a"), replica("b"))
                await ledger.amend(lambda state: state.with_replicas(fleet.replicas.values()))
            gateway = Gateway(ledger, owner)
            await gateway.live()
            return gateway

        async with asyncio.timeout(30):
            yield opened


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""

    async def holds() -> bool:
        return condition()

    await wait_until(holds)


async def test_alone_a_gate_closes_at_once(another: Opening) -> None:
    """Nobody else is asked, and nobody is waited for."""
    one = await another()
    began = monotonic()
    await one.peers.closed()
    assert monotonic() - began < LEASE_S / 2


async def test_closed_waits_for_the_last_byte_of_this_gateway(another: Opening) -> None:
    """Its own rollouts count as well, whether or not others are there."""
    one = await another()
    one.gate.idle.clear()
    closing = asyncio.ensure_future(one.peers.closed())
    done, _ = await asyncio.wait({closing}, timeout=LEASE_S / 3)
    assert not done
    one.gate.idle.set()
    await closing


async def test_who_has_not_seen_the_state_does_not_acknowledge(another: Opening) -> None:
    """Its gate may still stand open, whatever it says of the rollouts that it has in hand."""
    one, two = await another(), await another()
    await until(lambda: len(one.seated()) == 2)
    ahead = Message(sender="x", what="closed", revision=two.ledger.revision + 1000, ask="ahead")
    seen = msgspec.structs.replace(ahead, revision=two.ledger.revision, ask="seen")
    async with two.ledger.store.subscribe(CHANNEL) as messages:
        for question in (ahead, seen):
            await two.ledger.store.publish(CHANNEL, msgspec.json.encode(question))
        answered: list[str] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(LEASE_S):
                async for body in messages:
                    message = msgspec.json.decode(body, type=Message)
                    answered += [message.ask] if message.answer else []
    assert set(answered) == {"seen"}


async def test_closed_waits_for_the_last_byte_of_another_gateway(another: Opening) -> None:
    """Its acknowledgement comes when nothing is between choice and last byte any more."""
    one, two = await another(), await another()
    await until(lambda: len(one.seated()) == 2)
    two.gate.idle.clear()
    closing = asyncio.ensure_future(one.peers.closed())
    done, _ = await asyncio.wait({closing}, timeout=LEASE_S * 2 / 3)
    assert not done
    two.gate.idle.set()
    await closing
    assert len(one.seated()) == 2


async def test_settled_waits_for_what_another_gateway_does_and_knows_what_came_of_it(
    another: Opening,
) -> None:
    """A resume there has set engines going that this gateway still takes for paused."""
    one, two = await another(), await another()
    await until(lambda: len(one.seated()) == 2)
    two.ledger._savers.clear()  # news may be lost
    with two.peers.acting():
        settling = asyncio.ensure_future(one.peers.settled())
        done, _ = await asyncio.wait({settling}, timeout=LEASE_S / 3)
        assert not done
        await two.ledger.amend(lambda state: marked(state, ["a"], draining=True))
    await settling
    assert one.ledger.state.replicas["a"].draining


async def test_a_dead_gateway_is_waited_for_until_its_lease_has_ended(another: Opening) -> None:
    """Not shorter, or it might still admit; not much longer, since the trainer's GPUs wait."""
    one, two = await another(), await another()
    await until(lambda: len(one.seated()) == 2)
    await two.die()
    could_admit_until = two.gate.until
    await one.peers.closed()
    assert monotonic() >= could_admit_until
    assert monotonic() < could_admit_until + 0.9 * LEASE_S


async def test_a_gateway_that_lives_but_does_not_acknowledge_is_expelled(another: Opening) -> None:
    """Its gate is shut by its own lease before the closing one goes on; then it sits down anew."""
    one, two = await another(), await another()
    await until(lambda: len(one.seated()) == 2)
    two.gate.idle.clear()
    await one.peers.closed()
    assert not two.gate.admits
    with pytest.raises(LeaseLost):
        two.peers.check()
    assert two.peers.me not in one.seated()
    two.gate.idle.set()  # its last byte has left: only now it may come back
    await until(lambda: two.gate.admits and two.peers.me in one.seated())
    two.peers.check()


async def test_a_gateway_that_was_away_for_a_lease_does_not_admit_before_it_has_looked(
    another: Opening,
) -> None:
    """Its gate follows its own clock, not a message that may be lost."""
    one, two = await another(), await another()
    await two.die()
    await until(lambda: not two.gate.admits)
    await until(lambda: two.peers.me not in one.seated())
    revision = one.ledger.revision
    await two.peers.beat()
    assert two.gate.admits
    assert two.ledger.revision > revision


async def test_news_reach_every_gateway_without_a_heartbeat(another: Opening) -> None:
    """What one writes, the others follow at once; the heartbeat is only the net below."""
    gateways = [await another() for _ in range(3)]
    await until(lambda: all(len(g.seated()) == 3 for g in gateways))
    await gateways[0].ledger.apply(
        InitRequested(now=NOW, group=group_for(gateways[0].ledger.state))
    )
    await until(lambda: all(g.ledger.state.phase == "initializing" for g in gateways))


async def test_the_call_of_a_dead_gateway_is_taken_over_once(another: Opening) -> None:
    """Of two that notice it, one succeeds, and the state says that it holds the fleet now."""
    one, two, three = await another(), await another(), await another()
    await until(lambda: all(len(g.seated()) == 3 for g in (one, two, three)))
    call = CallId(by="trainer", name="/init")
    holder = Holder(gateway=three.peers.me, token="old", what="init", call=call, since=NOW)
    group = group_for(three.ledger.state)
    await three.ledger.apply(InitRequested(now=NOW, group=group, holder=holder))
    await three.die()
    await until(lambda: one.ledger.state.phase == two.ledger.state.phase == "failed")
    ended = one.ledger.state.ended
    assert ended is not None
    assert ended.was_lost
    assert ended.holder.gateway in {one.peers.me, two.peers.me}


async def test_a_gateway_that_leaves_is_gone_at_once(another: Opening) -> None:
    """Seat and lease are given back; the next closing waits for nobody."""
    one, two = await another(), await another()
    await until(lambda: len(one.seated()) == 2)
    await two.die()
    await two.peers.leave()
    assert not two.gate.admits
    began = monotonic()
    await one.ledger.refresh()
    await one.peers.closed()
    assert monotonic() - began < LEASE_S / 2


async def test_what_all_gateways_have_in_hand_is_added_up(another: Opening) -> None:
    """Each tells with its heartbeat; one that is gone does not count."""
    one, two = await another(), await another()
    await until(lambda: one.peers.load() == Load(held=4, inflight={"a": 2}))
    await two.die()
    await until(lambda: one.peers.load() == Load(held=2, inflight={"a": 1}))


async def test_who_keeps_the_gate_open_is_known_of_all_gateways(another: Opening) -> None:
    """By the heartbeat of those that cannot acknowledge yet."""
    one, two = await another(), await another()
    one.gate.unsent, two.gate.unsent = {"a": 1}, {"a": 1, "b": 1}
    expected = {
        "a": "2 rollouts are still being sent to it",
        "b": "1 rollout is still being sent to it",
    }
    await until(lambda: one.peers.holding() == expected)
    assert one.peers.answering() == {"a": "2 rollouts are still being answered by it"}
