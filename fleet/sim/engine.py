"""A simulated vLLM engine: weights, sessions, pauses, sleep and versions, without any HTTP.

Calls that reach vLLM's engine core queue behind one another, and behind a collective while one
runs; so they do here, on one lock. Semantics are those of vLLM 0.32 (``v1/engine/core.py``,
``v1/engine/async_llm.py``, ``v1/executor/abstract.py``); where 0.33 differs an option says so.

It does not generate: `scheduler.py` does, and asks this state machine before every step.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from fleet.sim.errors import CallFailed, EngineDead, WorkerFailed
from fleet.sim.generation import PrefixCache
from fleet.sim.tasks import in_daemon_thread
from fleet.sim.weights import build_state_dict, combine_workers
from fleet.sim.workers import SimWorker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from fleet.sim.options import SimOptions
    from fleet.sim.scheduler import SimRequest

PauseMode = Literal["abort", "wait", "keep"]
SLEEP_TAGS = frozenset({"weights", "kv_cache"})
MODEL_VERSION_AT_BOOT = "default"


class SimEngine:
    """One boot of one replica's engine; a restart makes a new one."""

    def __init__(self, options: "SimOptions", index: int) -> None:
        self.options = options
        self.index = index
        self.instance_id = str(time.time_ns() + index)
        self.version = MODEL_VERSION_AT_BOOT
        self.paused: PauseMode | None = None
        self.sleeping: set[str] = set()
        self.dead = False
        self.cache = PrefixCache(options.block_size)
        self.cache_epoch = 0
        self.requests: dict[int, SimRequest] = {}  # by identity: ids need not be unique
        self.loras: dict[str, str] = {}
        self.workers = [self._worker(rank) for rank in range(options.workers_of(index))]
        self.checksum = combine_workers([worker.checksum for worker in self.workers])
        self.in_collective = False
        self.wedged = False
        self.on_death: Callable[[], object] = lambda: None
        self._core = asyncio.Lock()
        self._changed = asyncio.Event()

    def _worker(self, rank: int) -> SimWorker:
        options = self.options
        base = options.data_parallel_index(self.index) * options.workers_of(self.index)
        return SimWorker(
            build_state_dict(options.seed, options.hidden_size),
            base + rank,
            moves_data=options.backend == "gloo",
            timeout_s=options.init_timeout_s,
        )

    @property
    def session(self) -> str | None:
        """The kind of the open update session, if any worker has one."""
        return next((w.session for w in self.workers if w.session is not None), None)

    @property
    def in_pieces(self) -> bool:
        """Whether any worker's weights are taken apart: a step with them kills the engine."""
        return any(worker.in_pieces for worker in self.workers)

    # --- weight transfer ---------------------------------------------------------------------

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Join the group; the server answers nothing at all until this ends."""
        async with self.core():
            self.wedged = True
            try:
                await self._collective(lambda worker: worker.init(info))
            finally:
                self.wedged = False
                self.notify()

    async def shutdown_transfer(self) -> None:
        """Leave the group; refused during a session."""
        async with self.core():
            if self.session is not None:
                raise WorkerFailed("Cannot release a trainer connection during a weight update")
            for worker in self.workers:
                worker.shutdown()

    async def start_update(self, kind: str) -> None:
        """Open a session on every worker."""
        if kind == "draft" and not self.options.draft_model:
            raise WorkerFailed(
                "Draft model weight update requested, but no draft model is configured."
            )
        async with self.core():
            self._on_workers(lambda worker: worker.start(kind))

    async def update(self, info: Any) -> None:
        """Receive one chunk on every worker; blocks for the transfer."""
        async with self.core():
            await self._collective(lambda worker: worker.update(info))

    async def finish_update(self, version: str | None) -> None:
        """Close the session and take the version, if one is given."""
        async with self.core():
            self._on_workers(lambda worker: worker.finish())
            self._refresh()
            if version is not None:
                self.version = version

    async def set_version(self, version: str) -> None:
        """Relabel the weights."""
        async with self.core():
            self.version = version

    async def get_version(self) -> str:
        """The label of the weights."""
        async with self.core():
            return self.version

    async def checksums(self) -> dict[str, str]:
        """Digest of each tensor of each worker, keyed as vLLM keys them."""
        dp = self.options.data_parallel_index(self.index)
        async with self.core():
            if self.in_pieces:
                cause = "Cannot copy out of meta tensor; no data!"
                raise WorkerFailed(cause, "compute_weight_checksums")
            return {
                f"dp{dp}:pp0:pcp0:tp{tp}:{name}": digest
                for tp, worker in enumerate(self.workers)
                for name, digest in worker.digests.items()
            }

    async def reset_weights(self) -> None:
        """Zero all weights."""
        async with self.core():
            self._zero()

    # --- pause, sleep, caches ----------------------------------------------------------------

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause; `wait` returns once nothing runs, the others at once."""
        async with self.core():
            if mode == "abort":
                self.abort_all()
            self.paused = mode
            self.notify()
        if mode == "wait":
            await self.until(lambda: not self.running() or self.paused != "wait")
        if clear_cache:
            self.clear_caches()
        await asyncio.sleep(self.options.pause_latency_s)  # vLLM sleeps here too

    async def resume(self) -> None:
        """Let everything go on."""
        async with self.core():
            self._unpause()

    async def is_paused(self) -> bool:
        """Whether the scheduler is paused in any mode."""
        async with self.core():
            return self.paused is not None

    async def is_sleeping(self) -> bool:
        """Whether it sleeps at any level; a paused engine counts, as in vLLM."""
        async with self.core():
            return self.paused is not None or bool(self.sleeping)

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause, and from level 1 give up memory; level 2 loses the weights."""
        await self.pause(mode, clear_cache=level >= 1)
        async with self.core():
            if level >= 1:
                self.sleeping |= SLEEP_TAGS
            if level >= 2:
                self._zero()
            self.notify()

    async def wake_up(self, tags: list[str] | None) -> bool:
        """Wake these parts, or all; returns whether the engine is fully awake, and so resumed."""
        async with self.core():
            wanted = set(SLEEP_TAGS if tags is None else tags) - {"scheduling"}
            if tags is None or wanted <= self.sleeping:  # an unknown tag wakes nothing
                self.sleeping -= wanted
            if not self.sleeping:
                self._unpause()
            return not self.sleeping

    async def release_kv_cache(self) -> None:
        """Give up the KV cache; needs a completed pause and nothing asleep."""
        async with self.core():
            if self.paused is None or self.requests:
                raise CallFailed(
                    "release_kv_cache_memory() requires a completed pause first",
                    "release_kv_cache_memory",
                )
            if self.sleeping:
                raise CallFailed(
                    "release_kv_cache_memory() requires all executor memory to be resident",
                    "release_kv_cache_memory",
                )
            self.clear_caches()
            self.sleeping.add("kv_cache")

    async def reset_prefix_cache(self, *, preempt: bool) -> bool:
        """Drop cached prefixes; false while running requests hold blocks, unless preempted."""
        async with self.core():
            if self.running() and not preempt:
                return False
            self.clear_caches()
            return True

    async def abort(self, ids: list[str] | None) -> int:
        """Abort these internal ids, or everything; returns how many were named, or there."""
        async with self.core():
            if not ids:
                return self.abort_all()
            for request in self.requests.values():
                request.aborted |= request.request_id in ids
            self.notify()
            return len(ids)

    # --- state that generation asks for --------------------------------------------------------

    def running(self) -> bool:
        """Whether a request has been computed on and is not done."""
        return any(request.admitted for request in self.requests.values())

    def abort_all(self) -> int:
        """Abort every request; returns how many there were."""
        for request in self.requests.values():
            request.aborted = True
        self.notify()
        return len(self.requests)

    def clear_caches(self) -> None:
        """Drop all KV: running requests compute theirs anew with the weights of the moment."""
        self.cache.clear()
        self.cache_epoch += 1

    def die(self) -> None:
        """The engine process is gone; every later call is an `EngineDead`."""
        if not self.dead:
            self.dead = True
            for worker in self.workers:
                worker.kill()
            self.notify()
            self.on_death()

    def notify(self) -> None:
        """Wake everyone who waits for a change of this engine."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds.

        Raises `EngineDead` when the engine dies first.
        """
        while not condition():
            self.check_alive()
            await self._changed.wait()
        self.check_alive()

    def check_alive(self) -> None:
        """Raise `EngineDead` if the engine process is gone."""
        if self.dead:
            raise EngineDead

    def core(self) -> AbstractAsyncContextManager[None]:
        """The engine core, one call at a time; waits behind a collective."""
        return self._enter_core()

    @asynccontextmanager
    async def _enter_core(self) -> "AsyncGenerator[None]":
        self.check_alive()
        async with self._core:
            self.check_alive()
            yield

    async def _collective(self, call: Callable[[SimWorker], None]) -> None:
        """Run a blocking call on every worker at once and wait for all of them."""
        self.in_collective = True
        try:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(_outcome(call, worker)) for worker in self.workers]
        finally:
            self.in_collective = False
            self.notify()
        failed = [call.result() for call in calls if call.result() is not None]
        if failed:
            raise WorkerFailed(failed[0])

    def _on_workers(self, call: Callable[[SimWorker], None]) -> None:
        """Run a call that cannot block on every worker; the first failure is the answer."""
        failed: list[Exception] = []
        for worker in self.workers:
            try:
                call(worker)
            except RuntimeError as error:
                failed.append(error)
        if failed:
            raise WorkerFailed(failed[0])

    def _refresh(self) -> None:
        self.checksum = combine_workers([worker.checksum for worker in self.workers])

    def _zero(self) -> None:
        for worker in self.workers:
            worker.zero()
        self._refresh()

    def _unpause(self) -> None:
        self.paused = None
        self.notify()


async def _outcome(call: Callable[[SimWorker], None], worker: SimWorker) -> Exception | None:
    """What a worker's blocking call raised, or None: one failure must not hide the others."""
    try:
        await in_daemon_thread(call, worker)
    except Exception as error:  # whatever a worker raises is an answer, as in vLLM
        return error
    return None
