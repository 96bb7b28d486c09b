"""A gateway is killed at every boundary of a round: before and after each write of the state.

Gateway A reaches Redis through a proxy that kills it (SIGKILL) just before its n-th state write, or
once Redis has done the write and before A hears so. The trainer, whose call broke, repeats it at
gateway B and then does what the answers say. Whatever the boundary, in the end the fleet is whole:
see `check_end`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from fleet.facts.state import FleetState
from fleet.sim import SimFleet, SimReplica
from fleet.store import open_store
from tests.cases.conftest import FINISH, INIT, NAMES, START, UPDATE, Case, nccl, update_of
from tests.gateways.forked import ForkedGateway, Nursery, nursery
from tests.gateways.store_proxy import Moment, StoreProxy, store_proxy
from tests.redis_server import RedisServer
from tests.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LANES = 6
LEASE_S = 2.5
THOUGHT_S = 0.02
"""How long a client waits between two rollouts, so that the machine does something else, too."""
SETTINGS = {
    "FLEET_TIMEOUTS__LEASE_S": str(LEASE_S),
    "FLEET_TIMEOUTS__LEASE_RENEW_S": "0.4",
    "FLEET_TIMEOUTS__CONTROL_S": "5",
}
PAUSE, RESUME, RESET = "/pause?mode=keep", "/resume", "/fleet/reset"


@dataclass(frozen=True)
class Life:
    """Calls of one trainer, and the phase that each state write of them names, in order.

    `faults` go to the second replica before the first call; what fails is not repeated here.
    """

    calls: tuple[str, ...]
    writes: tuple[str, ...]
    faults: tuple[str, ...] = ()


ROUND = (START, UPDATE, FINISH)
TO_STARTED = ("pausing", "starting", "started")
TO_UPDATED = (*TO_STARTED, "updating", "started")
LIVES = {
    "init": Life((INIT,), ("initializing", "initialized")),
    "round": Life(ROUND, (*TO_UPDATED, "finishing", "committed", "initialized")),
    "pause": Life((PAUSE, RESUME), ("initialized",) * 4),
    "refused start": Life((START,), ("pausing", "starting", "undoing", "initialized"), (START,)),
    "refused pause": Life((START,), ("pausing", "undoing", "initialized"), ("/pause",)),
    "failed update": Life(
        (START, UPDATE), (*TO_STARTED, "updating", "failed", "failed"), (UPDATE,)
    ),
    "failed finish": Life(ROUND, (*TO_UPDATED, "finishing", "failed", "failed"), (FINISH,)),
    "reset": Life((START, RESET), (*TO_STARTED, "idle", "idle", "idle")),
    "late reset": Life((START, UPDATE, RESET), (*TO_UPDATED, "idle")),
}


@dataclass(frozen=True)
class Boundary:
    """The n-th state write of a life, and on which side of it the gateway dies."""

    life: str
    number: int
    moment: Moment

    def __str__(self) -> str:
        phase = LIVES[self.life].writes[self.number - 1]
        return f"{self.life}-{self.moment}-{self.number}-{phase}"


SMOOTH = {
    ("round", "before", 1),
    *((("round", moment, number)) for moment in ("before", "after") for number in (2, 3)),
    ("round", "after", 1),
    ("round", "before", 4),
    ("round", "before", 6),
    ("round", "after", 7),
    ("round", "before", 8),
    ("round", "after", 8),
}
"""Where the trainer need not know: its retry, and all that follows, is answered with 200."""

BOUNDARIES = [
    Boundary(name, number, moment)
    for name, life in LIVES.items()
    for number in range(1, len(life.writes) + 1)
    for moment in ("before", "after")
]
WHOLE = [Boundary(name, len(life.writes), "never") for name, life in LIVES.items()]


@dataclass
class Crowd:
    """Clients that never stop asking one gateway for rollouts, whole and streamed by turns."""

    case: Case
    answers: list[httpx.Response] = field(default_factory=list[httpx.Response])
    is_over: bool = False

    async def ask(self) -> None:
        """One client: the next rollout follows the last one's answer."""
        while not self.is_over:
            body = {"prompt": "hello", "max_tokens": 2, "stream": len(self.answers) % 3 == 0}
            self.answers.append(await self.case.post("/v1/completions", body))
            await asyncio.sleep(THOUGHT_S)

    async def go_on(self) -> None:
        """Return when more rollouts have been answered."""
        seen = len(self.answers)

        async def has_grown() -> bool:
            return len(self.answers) > seen + 3

        await wait_until(has_grown)


@dataclass
class Rig:
    """What stays alive from one boundary to the next: Redis, some replicas and gateway B."""

    redis: RedisServer
    name: str
    sim: SimFleet
    born: Nursery
    version: int = 1

    async def start(self, store: str, probe_s: str) -> Case:
        """Start a gateway of this fleet."""
        settings = SETTINGS | {
            "FLEET_NAME": self.name,
            "FLEET_REPLICAS": ",".join(replica.url for replica in self.sim.replicas),
            "FLEET_TIMEOUTS__PROBE_S": probe_s,
            "FLEET_STORE": store,
        }
        return Case(self.sim, await self.born.start(**settings))

    async def state(self) -> FleetState:
        """What the store says."""
        async with open_store(self.redis.url, self.name) as store:
            entry = await store.load("state")
        assert entry is not None
        return msgspec.json.decode(entry.body, type=FleetState)


class Trainer:
    """A trainer that repeats a call whose connection broke at the other gateway, and obeys."""

    def __init__(self, here: Case, there: Case, version: str) -> None:
        self.at = here
        self._there = there
        self._version = version
        self.told: list[str] = []

    async def call(self, path: str) -> httpx.Response:
        """One call, repeated once elsewhere if its connection broke."""
        body = await self._body(path)
        try:
            answer = await self.at.post(path, body)
        except httpx.HTTPError:
            assert self.at is not self._there
            self.at = self._there
            answer = await self.at.post(path, body)
        if answer.status_code != 200:
            self.told.append(f"{path}: {answer.status_code} {answer.text}")
        return answer

    async def live(self, calls: tuple[str, ...]) -> None:
        """Make these calls until one is refused, unless told to go on."""
        for path in calls:
            answer = await self.call(path)
            if answer.status_code != 200 and "go on with the next call" not in answer.text:
                return

    async def bring_home(self) -> None:
        """Have the fleet at this trainer's version, resumed and with its gate open."""
        self.at = self._there
        for _ in range(4):
            await wait_until(self._nothing_is_on_its_way)
            fleet = await self.at.fleet()
            if fleet["weight_version"] == self._version and fleet["phase"] == "initialized":
                break
            if fleet["phase"] == "started":
                await self.call(RESET)
            await self.live((INIT, *ROUND))
        answer = await self.call(RESUME)
        assert answer.status_code == 200, (answer.text, self.told)

    async def _nothing_is_on_its_way(self) -> bool:
        return (await self.at.fleet())["call"] is None

    async def _body(self, path: str) -> Any:
        if path == INIT:
            size = 1 + (await self._there.http.get("/get_world_size")).json()["world_size"]
            info = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1}
            return {"init_info": info | {"world_size": size}}
        bodies = {UPDATE: update_of(NAMES), FINISH: {"weight_version": self._version}}
        return bodies.get(path)


class Lane:
    """One fleet, on which one boundary after the other is tried."""

    def __init__(self, rig: Rig, there: Case) -> None:
        self._rig = rig
        self._there = there

    async def try_one(self, boundary: Boundary) -> None:
        """Kill a new gateway A at this boundary, in the middle of rollouts at B."""
        life = LIVES[boundary.life]
        rig, there = self._rig, self._there
        rig.version += 1
        version, crowd = str(rig.version), Crowd(there)
        there.forget_logs()
        async with store_proxy(rig.redis.port) as proxy, asyncio.TaskGroup() as group:
            here = await rig.start(proxy.url, probe_s="600")
            gateway = here.served
            assert isinstance(gateway, ForkedGateway)
            for _ in range(3):
                group.create_task(crowd.ask())
            for path in life.faults:
                rig.sim.replicas[1].faults.add(path, "status", status=500)
            try:
                proxy.arm(boundary.number, boundary.moment, gateway.kill)
                trainer = Trainer(here, there, version)
                await trainer.live(life.calls)
                await proxy.reached(len(life.writes) if boundary.moment == "never" else None)
                check_death(boundary, proxy, trainer)
                if boundary.moment == "never":
                    gateway.kill()
                for replica in rig.sim.replicas:
                    replica.faults.clear()
                await trainer.bring_home()
                await check_end(rig, there, version)
                await crowd.go_on()
            finally:
                crowd.is_over = True
        check_answers(crowd, version)


def check_death(boundary: Boundary, proxy: StoreProxy, trainer: Trainer) -> None:
    """The gateway died where it should, and the trainer was told no more than necessary."""
    life = LIVES[boundary.life]
    phases = tuple(state.phase.value for state in proxy.writes)
    if boundary.moment == "never":
        assert phases[: len(life.writes)] == life.writes
        assert set(phases[len(life.writes) :]) <= {"failed"}  # late answers, late finishes
        return
    assert proxy.sprung.is_set(), trainer.told
    assert phases == life.writes[: boundary.number]
    if (boundary.life, boundary.moment, boundary.number) in SMOOTH:
        assert trainer.told == []


async def check_end(rig: Rig, there: Case, version: str) -> None:
    """Hold the fleet against everything that a death may have left behind."""

    async def only_one_seat_is_taken() -> bool:
        return len((await there.fleet())["gateways"]) == 1

    await wait_until(only_one_seat_is_taken)
    await there.await_states("ready", "ready")
    state = await rig.state()
    assert state.weight_version == version
    assert Counter(state.commits).most_common(1)[0][1] == 1, "something was committed twice"
    assert list(state.commits) == sorted(state.commits, key=int), "the version went back"
    assert (state.holder, state.pause, state.round) == (None, None, None)
    assert [r.fence for r in state.replicas.values()] == [None, None]
    assert (await there.fleet())["gate"]["state"] == "open"
    for replica in rig.sim.replicas:
        check_replica(replica, version)


def check_replica(replica: SimReplica, version: str) -> None:
    """It was not hurt, nothing on it was left open, and no chunk was sent to it twice."""
    assert replica.engine.version == version
    assert replica.engine.session is None, "a session was left open"
    assert replica.engine.paused is None, "a replica was left paused"
    assert replica.log.outcomes["killed"] == 0
    paths = [path for path in replica.log.paths() if path in ROUND]
    for before, after in pairwise(paths):
        assert (before, after) != (UPDATE, UPDATE), "a chunk was sent twice"


def check_answers(crowd: Crowd, version: str) -> None:
    """Every rollout was answered, and by the version that its label names."""
    assert crowd.answers
    for answer in crowd.answers:
        assert answer.status_code == 200, answer.text
        made_by = versions_of(answer)
        first = answer.headers["X-Weight-Version"]
        last = answer.headers.get("X-Weight-Version-End", first)
        assert made_by == sorted(made_by, key=int)
        assert int(first) <= int(made_by[0])
        if "json" in answer.headers["content-type"]:
            assert made_by[-1] == last, (made_by, dict(answer.headers))
    labels = [int(answer.headers["X-Weight-Version"]) for answer in crowd.answers]
    assert max(labels) == int(version)


def versions_of(answer: httpx.Response) -> list[str]:
    """Return the versions that made an answer's tokens, as the replica itself says."""
    if "json" in answer.headers["content-type"]:
        body = answer.json()
    else:
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        body = next(event for event in map(json.loads, events) if "sim" in event)
    return [span["version"] for span in body["sim"]["choices"][0]["spans"]]


class Results:
    """Tries boundaries on several lanes at once, and hands each result to the test that asks."""

    def __init__(self, boundaries: Iterable[Boundary]) -> None:
        loop = asyncio.get_running_loop()
        self.of: dict[Boundary, asyncio.Future[None]] = {
            b: loop.create_future() for b in boundaries
        }
        self._left = list(self.of)
        self._fleets = count()

    def stop(self) -> None:
        """Try no more; those that are being tried are brought to their end."""
        self._left.clear()

    async def try_all(self, redis: RedisServer, folder: Path) -> None:
        """Open the lanes and work them until all boundaries are tried."""
        try:
            async with nursery(folder) as born, asyncio.TaskGroup() as group:
                for _ in range(LANES):
                    group.create_task(self._keep_trying(redis, born))
        except* Exception as error:  # nobody will try those that are left
            for result in self.of.values():
                if not result.done():
                    result.set_exception(error)

    async def _keep_trying(self, redis: RedisServer, born: Nursery) -> None:
        while self._left:
            async with SimFleet(nccl(2)) as sim:
                rig = Rig(redis, f"boundaries-{next(self._fleets)}", sim, born)
                there = await rig.start(redis.url, probe_s="0.2")
                await there.await_states("ready", "ready")
                await there.first_sync("1")
                await self._work(Lane(rig, there))

    async def _work(self, lane: Lane) -> None:
        while self._left:
            boundary = self._left.pop(0)
            try:
                await lane.try_one(boundary)
            except Exception as error:  # it belongs to the boundary's own test
                self.of[boundary].set_exception(error)
                return  # this fleet may be anything now
            self.of[boundary].set_result(None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def results(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[Results]:
    """Begin to try those boundaries that this run asks for."""
    redis_server.empty()
    asked = (getattr(item, "callspec", None) for item in request.session.items)
    found = [spec.params.get("boundary") for spec in asked if spec is not None]
    made = Results(boundary for boundary in found if isinstance(boundary, Boundary))
    trying = asyncio.create_task(made.try_all(redis_server, tmp_path_factory.mktemp("boundaries")))
    yield made
    made.stop()
    await trying
    redis_server.empty()


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)
async def test_a_gateway_killed_here_costs_no_rollout_no_version_and_no_fence(
    boundary: Boundary, results: Results
) -> None:
    """The trainer repeats its call at the other gateway and goes on as it is told."""
    await results.of[boundary]


@pytest.mark.parametrize("boundary", WHOLE, ids=str)
async def test_the_lives_have_these_writes_and_no_others(
    boundary: Boundary, results: Results
) -> None:
    """So that no state write of a call is missing among the boundaries."""
    await results.of[boundary]
