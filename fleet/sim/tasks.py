"""Who owns the simulator's tasks and threads.

A control call on a vLLM server goes on when its caller hangs up, and a thread inside a dead
collective can be neither cancelled nor joined. So calls run in tasks of an owner, not of the
connection, and blocking torch calls run in daemon threads that never keep the process alive.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TaskOwner:
    """A task group that can be opened and closed from different tasks; owns what it spawns."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._closing = asyncio.Event()
        self._ready = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._runner: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the group; `close` must follow."""
        self._runner = asyncio.create_task(self._run(), name=self._name)
        await self._ready.wait()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` in the group; an exception it raises closes the whole group."""
        if self._group is None or self._closing.is_set():
            work.close()
            raise asyncio.CancelledError(f"{self._name} is closed")
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel and await everything; raises what a spawned task raised."""
        self._closing.set()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            self._ready.set()
            await self._closing.wait()
            for task in tuple(self._tasks):
                task.cancel()


async def in_daemon_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread of its own; cancelling the wait leaves the thread running."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work(*args, **kwargs)
        except BaseException as error:  # carried to the loop, whatever it is
            _hand_over(loop, done, None, error)
        else:
            _hand_over(loop, done, result, None)

    threading.Thread(target=run, daemon=True, name="sim-worker").start()
    return await done


def _hand_over(
    loop: asyncio.AbstractEventLoop,
    done: "asyncio.Future[Any]",
    result: object,
    error: BaseException | None,
) -> None:
    def settle() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the thread may outlive the loop that started it
        loop.call_soon_threadsafe(settle)
