"""Rollouts taken back before they are sent whole: their replica may get nothing any more."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import pytest

from fleet.facts.state import FleetState, TrainerPause
from fleet.rules.membership import marked
from gateway.exchange import Exchange, Request
from gateway.gate import RolloutGate
from gateway.metrics import Metrics
from gateway.rollouts import Rollouts
from gateway.settings_model import Settings
from tests.cases.raw_http import answer_of, answering, raw_replica
from tests.fleets import NOW, change, fleet_of, replica
from tests.slow_port import LARGE

if TYPE_CHECKING:
    from collections.abc import Generator

    from fleet.errors import FleetError
    from gateway.heads import Headers

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PATH = b"/v1/completions"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Asker:
    """The client of one exchange, and what it was told."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.began = asyncio.Event()
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.answer = b""

    def start(self, status: int, headers: Headers) -> None:
        """Note that an answer has begun."""
        del status, headers
        self.began.set()

    def body(self, data: bytes) -> None:
        """Note a piece."""
        self.answer += data

    def end(self) -> None:
        """Note the end."""
        self.over.set_result("complete")

    def refuse(self, error: FleetError) -> None:
        """Note why."""
        self.over.set_result(str(error))

    def break_off(self, last: bytes) -> None:
        """Note that it is not whole."""
        self.answer += last
        self.over.set_result("broken off")


def ask(gate: RolloutGate, size: int = 2) -> Asker:
    """Ask through the gate, with a body of that size."""
    asker = Asker(Rollouts(gate, Metrics(), Settings(), lambda _: None))
    Exchange(asker.rollouts, Request(b"POST", PATH, [], b"x" * size), asker).begin()
    return asker


@asynccontextmanager
async def server(serve: Serve) -> AsyncGenerator[str]:
    """Serve connections on a free port, none of which ends before the test does."""
    over = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        await over.wait()
        writer.transport.abort()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1024)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        over.set()
        listening.close()


@contextmanager
def nobody_accepts() -> Generator[str]:
    """A port whose connections are never made: its queue is full."""
    with ExitStack() as open_ones:
        listening = open_ones.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            waiting = open_ones.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def fleet_at(*urls: str) -> FleetState:
    """A fleet of replicas a, b, … at these URLs."""
    return fleet_of(*(replica(n, url=url) for n, url in zip("abc", urls, strict=False)))


def gate_of(state: FleetState) -> RolloutGate:
    """A gate that follows this fleet and sends to `a` first."""
    gate = RolloutGate(Settings().gate, "round_robin")
    gate.follow(state)
    return gate


def without_a(state: FleetState, how: str) -> FleetState:
    """The fleet after this has happened to a."""
    if how == "removed":
        return change(state, replicas={r: f for r, f in state.replicas.items() if r != "a"})
    return marked(state, ["a"], **{how: "it is so"})


@asynccontextmanager
async def asked_of_one_that_is_stuck(
    b: str,
) -> AsyncGenerator[tuple[FleetState, RolloutGate, Asker]]:
    """Ask a, which takes the first bytes of a large body and then none; the other one is at `b`."""
    has_begun = asyncio.Event()

    async def take_a_byte(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del writer
        await reader.readexactly(1)
        has_begun.set()

    async with server(take_a_byte) as stuck:
        state = fleet_at(stuck, b)
        gate = gate_of(state)
        asker = ask(gate, LARGE)
        await asyncio.wait_for(has_begun.wait(), 5)
        assert gate.load().unsent == {"a": 1}
        yield state, gate, asker


@pytest.mark.parametrize("how", ["lost", "wedged", "removed", "fence", "refusal"])
async def test_what_is_not_sent_whole_goes_to_another_replica(how: str) -> None:
    """A body that its replica does not take is taken back when that may get nothing any more."""
    async with (
        raw_replica(answering(answer_of(b"other"))) as b,
        asked_of_one_that_is_stuck(b.url) as (state, gate, asker),
    ):
        gate.follow(without_a(state, how))
        assert await asyncio.wait_for(asker.over, 5) == "complete"
        assert asker.answer == b"other"
        assert len(b.requests[0].body) == LARGE
        assert gate.inflight == {}


async def test_what_is_not_sent_whole_waits_at_a_closed_gate() -> None:
    """The gate is closed at once, and the rollout is held for whoever is there after the update."""
    pause = TrainerPause(mode="keep", clear_cache=True, by="t", since=NOW)
    async with (
        raw_replica(answering(answer_of(b"other"))) as b,
        asked_of_one_that_is_stuck(b.url) as (state, gate, asker),
    ):
        gate.follow(change(state, pause=pause))
        closing = asyncio.ensure_future(gate.closed())
        await asyncio.sleep(0)
        assert not closing.done()
        gate.follow(change(without_a(state, "lost"), pause=pause))
        await asyncio.wait_for(closing, 1)
        assert (gate.held, gate.held_bytes) == (1, LARGE)
        gate.follow(without_a(state, "lost"))
        assert await asyncio.wait_for(asker.over, 5) == "complete"


async def test_a_connection_that_is_not_made_yet_is_not_waited_for() -> None:
    """A host that is gone answers nothing for as long as a connection may take."""
    with nobody_accepts() as silent:
        async with raw_replica(answering(answer_of(b"other"))) as b:
            state = fleet_at(silent, b.url)
            gate = gate_of(state)
            asker = ask(gate)
            assert gate.load().unsent == {"a": 1}
            gate.follow(without_a(state, "lost"))
            assert await asyncio.wait_for(asker.over, 2) == "complete"
            assert asker.answer == b"other"
            await asyncio.wait_for(gate.closed(), 1)
            assert asker.rollouts.upstreams.pool(silent).is_idle  # it will not come late, either


async def test_what_a_client_left_before_there_was_a_connection_is_never_sent() -> None:
    """The connection is made all the same, but a replica must not work for nobody."""
    async with raw_replica(answering(answer_of(b"other"))) as a:
        gate = gate_of(fleet_at(a.url))
        left = Asker(Rollouts(gate, Metrics(), Settings(), lambda _: None))
        exchange = Exchange(left.rollouts, Request(b"POST", PATH, [], b"left"), left)
        exchange.begin()
        exchange.gone()
        assert gate.inflight == {}
        assert await asyncio.wait_for(ask(gate).over, 5) == "complete"
        assert [request.body for request in a.requests] == [b"xx"]


async def test_an_answer_that_began_too_early_is_broken_off_with_its_replica() -> None:
    """It has begun, so it is never asked for again; its client is told, and nobody waits."""

    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        writer.write(EVENTS)

    async with server(begin) as early, raw_replica(answering(answer_of(b"other"))) as b:
        state = fleet_at(early, b.url)
        gate = gate_of(state)
        asker = ask(gate, LARGE)
        await asyncio.wait_for(asker.began.wait(), 5)
        gate.follow(without_a(state, "lost"))
        await asyncio.wait_for(gate.closed(), 1)
        assert await asyncio.wait_for(asker.over, 1) == "broken off"
        assert b"a broke off" in asker.answer
        assert b.requests == []
