"""Lives of several gateways over one store, each step a real call to simulated replicas.

Where test_takeover_machine.py (tests/core) plays everything but the rules, nothing is played here
but the trainer and bad luck: coordinators, ledgers, leases, take-overs and the store are the real
ones, over both engines, and the replicas are real sockets. After each step the store's word is
held against the engines; at the end of each life the fleet must come to rest, whole.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from fleet.errors import FleetError
from fleet.facts.calls import CallId
from fleet.facts.layout import count_workers
from fleet.facts.state import FleetState, Phase
from fleet.rules.bodies import FinishBody, InitBody, UpdateBody
from fleet.rules.membership import candidates_for
from fleet.sim import SimFleet, SimReplica
from fleet.store import open_store
from tests.cases.conftest import NAMES, nccl, posts, update_of
from tests.chaos.actors import checksum_of
from tests.gateways.nodes import Moment, Node, Trap, start_node
from tests.waiting import wait_until

T = TypeVar("T")
CALLS = st.sampled_from(["init", "start", "update", "finish", "reset", "pause", "resume"])
STEPS = ("init", "start", "update", "finish")
NUMBERS = st.integers(0, 5)
MOMENTS = st.sampled_from(["before", "after"])
FAULTS = st.sampled_from([("status", "before"), ("status", "after"), ("drop", "after")])
PATHS = {
    "init": "/init_weight_transfer_engine",
    "pause": "/pause",
    "start": "/start_weight_update",
    "update": "/update_weights",
    "finish": "/finish_weight_update",
    "resume": "/resume",
}
REST_S = 20.0


class Loop:
    """An event loop in a thread of its own: heartbeats go on while Hypothesis thinks."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something there and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Fleet:
    """What the machine drives, on the loop: nodes, replicas, and what must be true of them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = uuid.uuid4().hex[:8]
        self.sim = SimFleet(nccl(2, hidden_size=4, pause_latency_s=0.001))
        self.stack = AsyncExitStack()
        self.nodes: list[Node] = []
        self.version = 0
        self.sent: int | None = None
        self.commits: tuple[str, ...] = ()
        self.generation = 0
        self.attempts = 0

    async def open(self) -> None:
        """Start two gateways."""
        await self.sim.start()
        # memory:// lives for as long as somebody has it open, and here all gateways may die
        self.store = await self.stack.enter_async_context(open_store(self.url, self.name))
        for _ in range(2):
            await self.join()

    async def join(self) -> None:
        """Start one gateway more."""
        self.nodes.append(await start_node(self.url, self.name, self.sim.urls))

    async def close(self) -> None:
        """End everything."""
        for node in self.nodes:
            await node.gone()
        await self.stack.aclose()
        await self.sim.close()

    async def die(self, node: Node) -> None:
        """Kill a gateway, and start another one if it was the last."""
        self.nodes.remove(node)
        await node.gone()
        if not self.nodes:
            await self.join()

    async def call(self, node: Node, what: str, again: CallId | None = None) -> FleetError | None:
        """Make one call and return the error that it was answered with; bugs are raised.

        `sent` is the version whose weights every member has taken in since the last start, as far
        as the trainer was told.
        """
        if what == "update" and again is None:
            self.version += 1
        if what in ("start", "update"):
            self.sent = None
        try:
            async with asyncio.timeout(30):
                await self._work(node, what, again or self.id_of(what))
        except FleetError as error:
            return error
        self.sent = self.version if what == "update" else self.sent
        return None

    def id_of(self, what: str) -> CallId:
        """Return what tells a new call of the trainer from others; starts all look alike."""
        self.attempts += 1
        differs = {"start": "", "update": self.version, "finish": self.sent}
        return CallId(by="trainer", name=f"{what} {differs.get(what, self.attempts)}")

    def _work(self, node: Node, what: str, call: CallId) -> Awaitable[object]:
        coordinator, controls = node.coordinator, node.controls
        works: dict[str, Callable[[], Awaitable[object]]] = {
            "init": lambda: coordinator.init(self._init_body(node), call),
            "start": lambda: coordinator.start(call),
            "update": lambda: coordinator.update(self._update_body(), call),
            "finish": lambda: coordinator.finish(FinishBody(str(self.sent)), call),
            "reset": lambda: coordinator.reset("operator"),
            "pause": lambda: controls.pause("keep", clear_cache=True, by="trainer"),
            "resume": controls.resume,
        }
        return works[what]()

    def _init_body(self, node: Node) -> InitBody:
        candidates, _ = candidates_for(node.ledger.state, None)
        info = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1}
        return InitBody(info | {"world_size": 1 + count_workers(candidates)})

    def _update_body(self) -> UpdateBody:
        body = update_of(NAMES)
        body["update_info"]["sim_seed"] = self.version
        return UpdateBody(msgspec.json.encode(body))

    def makes_sense(self, what: str) -> bool:
        """Whether the trainer would call this: it finishes only what it has sent."""
        return what != "finish" or self.sent is not None

    async def call_and_die(self, node: Node, what: str, number: int, moment: Moment) -> None:
        """Kill the gateway around a state write of its call; the trainer repeats it elsewhere."""
        self.version += what == "update"
        call = self.id_of(what)
        work = asyncio.ensure_future(self.call(node, what, call))
        dead = asyncio.Event()

        def kill() -> None:
            node.kill()
            dead.set()

        node.store.trap = Trap(number, moment, kill)
        dying = asyncio.ensure_future(dead.wait())
        await asyncio.wait((work, dying), return_when=asyncio.FIRST_COMPLETED)
        node.store.trap = None
        survived = not dead.is_set()
        dying.cancel()
        if survived:
            await work
            return
        work.cancel()
        await asyncio.wait((work,))
        await self.die(node)
        await self.call(self.nodes[0], what, call)

    async def call_and_fail(self, node: Node, what: str, number: int, moment: Moment) -> None:
        """Let one state write of a call fail."""
        node.store.trap = Trap(number, moment, lambda: None)
        await self.call(node, what)
        node.store.trap = None

    async def restart(self, replica: SimReplica) -> None:
        """Restart a replica; every gateway has seen it before anything else happens."""
        await replica.restart()

        async def seen() -> bool:
            for node in self.nodes:
                await node.registry.suspect(replica.id)
            known = (await self.state()).replicas[replica.id]
            return known.instance == replica.engine.instance_id

        await wait_until(seen, timeout_s=15)

    async def state(self) -> FleetState:
        """What the store says."""
        entry = await self.store.load("state")
        assert entry is not None
        return msgspec.json.decode(entry.body, type=FleetState)

    # -- what must hold ----------------------------------------------------------------------------

    async def check(self) -> None:
        """Hold the store's word against what went before, and against the engines."""
        state = await self.state()
        assert state.generation >= self.generation
        assert state.commits[: len(self.commits)] == self.commits, "a commit was forgotten"
        assert len(set(state.commits)) == len(state.commits), "a version was committed twice"
        self.generation, self.commits = state.generation, state.commits
        for replica in self.sim.replicas:
            check_chunks(replica)
        engines = {replica.id: replica for replica in self.sim.replicas}
        if state.fleet_paused:
            return
        for ready in state.ready():
            check_engine(engines[ready.id], ready.instance, state.weight_version)

    async def come_to_rest(self) -> None:
        """One trainer that obeys brings the whole fleet to a new version, whatever was before."""
        for replica in self.sim.replicas:
            replica.faults.clear()

        async def whole() -> bool:
            node = self.nodes[0]
            if (await self.state()).phase is not Phase.INITIALIZED:
                await self.call(node, "reset")
            for what in ("resume", "init", "start", "update", "finish"):
                if await self.call(node, what) is not None and what != "resume":
                    return False
            state = await self.state()
            return len(state.ready()) == 2 and state.weight_version == str(self.version)

        await wait_until(whole, timeout_s=REST_S)
        await self.check()
        state = await self.state()
        assert state.holder is None
        for replica in self.sim.replicas:
            check_engine(replica, replica.engine.instance_id, str(self.version))


def check_chunks(replica: SimReplica) -> None:
    """No chunk is sent twice, however often its call is repeated."""
    bodies = (call.body for call in posts(replica, PATHS["update"]))
    chunks = Counter(body["update_info"]["sim_seed"] for body in bodies)
    assert set(chunks.values()) <= {1}, f"sent twice: {chunks}"


def check_engine(replica: SimReplica, instance: str | None, version: str | None) -> None:
    """A replica that counts as ready holds the committed weights and can compute with them."""
    if not replica.alive or replica.engine.instance_id != instance:
        return  # it has been restarted, and the next probe will see it
    engine = replica.engine
    assert engine.session is None, "a session is open"
    assert not engine.in_pieces
    assert engine.paused is None, "it is frozen"
    assert engine.checksum == checksum_of(int(version or 0)), "it holds other weights"


class NodesMachine(RuleBasedStateMachine):
    """A trainer, an operator and bad luck, at any of the gateways."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()
        self.fleet = Fleet(self.url)

    @initialize()
    def open(self) -> None:
        """Two gateways, two replicas, nothing committed."""
        self.loop.run(self.fleet.open())

    def teardown(self) -> None:
        """Every life ends well."""
        try:
            if self.fleet.nodes:
                self.loop.run(self.fleet.come_to_rest())
        finally:
            self.loop.run(self.fleet.close())
            self.loop.close()

    def node(self, number: int) -> Node:
        """Any of the gateways; how many there are depends on luck, so none is drawn."""
        return self.fleet.nodes[number % len(self.fleet.nodes)]

    async def _then_check(self, work: Awaitable[object]) -> None:
        await work
        await self.fleet.check()

    def do(self, work: Coroutine[Any, Any, object]) -> None:
        """Do something and look whether everything still holds."""
        self.loop.run(self._then_check(work))

    @rule(what=CALLS, at=NUMBERS)
    def call(self, what: str, at: int) -> None:
        """Any call at any gateway, in phase or not."""
        if self.fleet.makes_sense(what):
            self.do(self.fleet.call(self.node(at), what))

    @rule(steps=st.integers(1, 4), at=NUMBERS)
    def round(self, steps: int, at: int) -> None:
        """A trainer that knows what it does makes some steps of a round, each elsewhere."""
        self.go_on(steps, at)

    @rule(at=NUMBERS)
    def reset(self, at: int) -> None:
        """An operator abandons whatever is open or has failed."""
        self.do(self.fleet.call(self.node(at), "reset"))

    def go_on(self, steps: int, at: int) -> None:
        """Make the first steps of a round, each elsewhere."""
        for number, what in enumerate(STEPS[:steps]):
            if self.fleet.makes_sense(what):
                self.do(self.fleet.call(self.node(at + number), what))

    @rule(what=CALLS, at=NUMBERS, number=st.integers(1, 4), moment=MOMENTS)
    def gateway_dies(self, what: str, at: int, number: int, moment: Moment) -> None:
        """A gateway dies around a state write of a call, which is repeated at another one."""
        self.go_on(STEPS.index(what) if what in STEPS else at % 4, at)
        if self.fleet.makes_sense(what):
            self.do(self.fleet.call_and_die(self.node(at), what, number, moment))

    @rule(what=CALLS, at=NUMBERS, number=st.integers(1, 3), moment=MOMENTS)
    def store_fails(self, what: str, at: int, number: int, moment: Moment) -> None:
        """A state write of a call fails, done or not."""
        self.go_on(STEPS.index(what) if what in STEPS else at % 4, at)
        if self.fleet.makes_sense(what):
            self.do(self.fleet.call_and_fail(self.node(at), what, number, moment))

    @rule(what=st.sampled_from(sorted(PATHS)), which=st.integers(0, 1), fault=FAULTS)
    def replica_will_fail(self, what: str, which: int, fault: tuple[Any, Any]) -> None:
        """The next call of this kind fails on one replica, or its answer is lost."""
        action, when = fault
        self.fleet.sim.replicas[which].faults.add(PATHS[what], action, when=when)

    @rule(which=st.integers(0, 1))
    def replica_restarts(self, which: int) -> None:
        """A replica comes back with the weights that it was started with."""
        self.do(self.fleet.restart(self.fleet.sim.replicas[which]))

    @rule()
    def gateway_joins(self) -> None:
        """One gateway more, up to three."""
        if len(self.fleet.nodes) < 3:
            self.do(self.fleet.join())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["memory", "redis"])
def test_several_gateways_keep_every_promise(engine: str, redis_url: str) -> None:
    """Over the embedded engine and over a real Redis."""

    class Machine(NodesMachine):
        url = redis_url if engine == "redis" else "memory://machine"

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=8,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
