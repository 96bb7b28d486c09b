"""Every routing policy over real sockets: which replica the bytes reach, on both ways in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import httpx
import pytest

from fleet.facts.state import TrainerPause
from gateway.routing import Asked
from gateway.settings_model import Routing, RoutingPolicy, Settings
from tests.cases.raw_http import Message, RawReplica, answer_of, raw_replica
from tests.fleets import NOW, change
from tests.gateway.serving import Served, serve
from tests.waiting import wait_until

PATH = "/v1/completions"
COUNT = 4


@dataclass
class Row:
    """A gateway in front of a few replicas that answer while `open` is set, or first break."""

    served: Served
    replicas: list[RawReplica]
    open: asyncio.Event
    breaks: list[str]

    async def ask(self, body: dict[str, Any], session: str | None = None) -> httpx.Response:
        """Send one rollout."""
        headers = {"X-Session-Id": session} if session else {}
        return await self.served.http.post(PATH, json=body, headers=headers)

    async def chosen(self, body: dict[str, Any], session: str | None = None) -> str:
        """Send one rollout and return who answered it."""
        answer = await self.ask(body, session)
        assert answer.status_code == 200
        return answer.headers["x-fleet-replica"]

    async def homes(self, sessions: Iterable[str]) -> dict[str, str]:
        """Return who answers each session, one after the other, so that nobody is busy."""
        return {session: await self.chosen({}, session) for session in sessions}

    async def hold(
        self, count: int, session: str | None = None
    ) -> tuple[list[int], list[asyncio.Task[httpx.Response]]]:
        """Send that many at once, unanswered; return how many reached each replica."""
        self.open.clear()
        tasks = [asyncio.ensure_future(self.ask({"n": n}, session)) for n in range(count)]

        async def all_arrived() -> bool:
            return sum(len(replica.requests) for replica in self.replicas) == count

        await wait_until(all_arrived)
        return sorted(len(replica.requests) for replica in self.replicas), tasks


@asynccontextmanager
async def row(policy: RoutingPolicy, *, asgi_only: bool = False) -> AsyncGenerator[Row]:
    """Serve replicas and a gateway that routes by this policy."""
    may_answer = asyncio.Event()
    may_answer.set()
    breaks: list[str] = []

    async def script(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del request, reader
        await may_answer.wait()
        if breaks:
            breaks.pop()
            writer.close()
            return
        writer.write(answer_of(b"{}"))

    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(raw_replica(script)) for _ in range(COUNT)]
        settings = Settings(
            replicas=tuple(replica.url for replica in replicas), routing=Routing(policy=policy)
        )
        served = await stack.enter_async_context(serve(settings, asgi_only=asgi_only))
        yield Row(served, replicas, may_answer, breaks)
        may_answer.set()


PAUSE = TrainerPause(mode="keep", clear_cache=True, by="trainer", since=NOW)
SESSIONS = [f"session {n}" for n in range(64)]
both_ways = pytest.mark.parametrize("asgi_only", [False, True], ids=["front", "asgi"])


@pytest.mark.parametrize("policy", [RoutingPolicy.LEAST_INFLIGHT, RoutingPolicy.ROUND_ROBIN])
async def test_rollouts_at_once_are_shared_out_evenly(policy: RoutingPolicy) -> None:
    """Nobody gets a second one before everybody has one."""
    async with row(policy) as fleet:
        shares, tasks = await fleet.hold(5 * COUNT)
        assert shares == [5] * COUNT
        fleet.open.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}


async def test_round_robin_takes_turns_where_least_inflight_would_not() -> None:
    """One after the other, whoever is busy."""
    async with row(RoutingPolicy.ROUND_ROBIN) as fleet:
        chosen = [await fleet.chosen({}) for _ in range(3 * COUNT)]
    assert len(set(chosen)) == COUNT
    assert chosen == chosen[:COUNT] * 3


async def test_power_of_two_leaves_nobody_idle_and_nobody_flooded() -> None:
    """With 80 at once over 4, two draws keep everybody within a few of the average of 20."""
    async with row(RoutingPolicy.POWER_OF_TWO) as fleet:
        shares, tasks = await fleet.hold(20 * COUNT)
        assert shares[0] >= 15
        assert shares[-1] <= 25
        fleet.open.set()
        await asyncio.gather(*tasks)


@both_ways
async def test_a_session_stays_on_its_replica_and_only_those_of_a_lost_one_move(
    asgi_only: bool,
) -> None:
    """Through another replica's leaving, too; the header reaches the replica as it was sent."""
    async with row(RoutingPolicy.CONSISTENT_HASH, asgi_only=asgi_only) as fleet:
        homes = await fleet.homes(SESSIONS)
        assert len(set(homes.values())) == COUNT
        assert await fleet.homes(reversed(SESSIONS)) == homes
        lost = homes[SESSIONS[0]]
        assert (await fleet.served.http.delete(f"/fleet/replicas/{lost}")).is_success
        after = await fleet.homes(SESSIONS)
        assert all((after[name] != home) is (home == lost) for name, home in homes.items())
        sent = {value for r in fleet.replicas[0].requests for value in r.values("x-session-id")}
        assert sent <= set(SESSIONS)
        assert sent


async def test_a_session_too_large_for_one_replica_spills_over() -> None:
    """Bounded load: 1.25 times the average and one, however much one session asks for."""
    async with row(RoutingPolicy.CONSISTENT_HASH) as fleet:
        shares, tasks = await fleet.hold(10 * COUNT, session="everybody")
        assert shares[-1] <= ceil(1.25 * 10 + 1)
        assert shares[-1] > 10
        fleet.open.set()
        await asyncio.gather(*tasks)


async def test_rollouts_that_waited_at_the_gate_still_go_to_their_sessions_replicas() -> None:
    """Their keys wait with them."""
    async with row(RoutingPolicy.CONSISTENT_HASH) as fleet:
        homes = await fleet.homes(SESSIONS)
        two_each = [
            session
            for home in set(homes.values())
            for session in [name for name in SESSIONS if homes[name] == home][:2]
        ]
        gate, state = fleet.served.gateway.gate, fleet.served.gateway.ledger.state
        gate.follow(change(state, pause=PAUSE))
        waiting = {name: asyncio.ensure_future(fleet.chosen({}, name)) for name in two_each}

        async def all_held() -> bool:
            return gate.held == len(two_each)

        await wait_until(all_held)
        gate.follow(state)
        assert {name: await task for name, task in waiting.items()} == {
            name: homes[name] for name in two_each
        }


async def test_without_a_session_the_least_busy_replica_is_taken() -> None:
    """Affinity is for those who ask for it."""
    async with row(RoutingPolicy.CONSISTENT_HASH) as fleet:
        shares, tasks = await fleet.hold(3 * COUNT)
        assert shares == [3] * COUNT
        fleet.open.set()
        await asyncio.gather(*tasks)


@both_ways
async def test_prompts_that_start_alike_meet_on_one_replica(asgi_only: bool) -> None:
    """Texts, token ids and conversations; different ones spread over the fleet."""
    async with row(RoutingPolicy.PREFIX, asgi_only=asgi_only) as fleet:
        used: set[str] = set()
        for n in range(12):
            text, ids = f"{n} " * 1000, [n] * 300
            question = {"role": "user", "content": text}
            for one, other in (
                ({"prompt": text + "a"}, {"prompt": text + "b", "stream": False}),
                ({"prompt": [*ids, 1]}, {"prompt": [*ids, 2]}),
                ({"messages": [question]}, {"messages": [question, {"role": "assistant"}]}),
            ):
                home = await fleet.chosen(one)
                assert await fleet.chosen(other) == home
                used.add(home)
        assert len(used) > 1


async def test_a_body_is_read_once_even_if_its_rollout_is_tried_again() -> None:
    """Bodies are megabytes; the key stays with the rollout."""
    async with row(RoutingPolicy.PREFIX) as fleet:
        gate, read = fleet.served.gateway.gate, 0
        key_of = gate.key_of
        assert key_of is not None

        def counted(asked: Asked) -> bytes | None:
            nonlocal read
            read += 1
            return key_of(asked)

        gate.key_of = counted
        fleet.breaks.append("once")
        answer = await fleet.ask({"prompt": "again"})
        assert answer.status_code == 200
        assert sum(len(replica.requests) for replica in fleet.replicas) == 2
        assert read == 1


async def test_a_body_that_nobody_can_read_is_still_passed_on_whole() -> None:
    """What is wrong with it is for the replica to say."""
    async with row(RoutingPolicy.PREFIX) as fleet:
        bodies = [b"\x1f\x8b\x00", b'{"prompt": ', b"[" * 50_000, b""]
        for body in bodies:
            assert (await fleet.served.http.post(PATH, content=body)).status_code == 200
        arrived = [request.body for replica in fleet.replicas for request in replica.requests]
        assert sorted(arrived) == sorted(bodies)
