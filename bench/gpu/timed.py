"""The two ways that are compared, each with the time of every call: the gateway, and no gateway.

Both speak through `FleetWeightSyncClient`, so that what differs is the gateway alone. *Directly* is
the best that a trainer can do by itself: one client for each replica, all called at the same time,
every replica with its own rank offset, a pause before the start and a resume after the finish.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fleet.client import FleetWeightSyncClient


@dataclass
class Clock:
    """When each call began and ended, in seconds of the monotonic clock."""

    spans: list[tuple[str, float, float, str]] = field(
        default_factory=list[tuple[str, float, float, str]]
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, what: str, call: Callable[[], Any]) -> Any:
        """Make a call and keep its span and what became of it."""
        began, end = time.monotonic(), "ok"
        try:
            return call()
        except BaseException as error:
            end = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._lock:
                self.spans.append((what, began, time.monotonic(), end))

    def took(self, what: str) -> float:
        """The seconds of the last call of this name."""
        return next(b - a for name, a, b, _ in reversed(self.spans) if name == what)

    def clear(self) -> None:
        """Forget all spans."""
        self.spans.clear()


class Timed:
    """A client whose calls are timed; for engines, which need only these four."""

    def __init__(self, client: Any, clock: Clock) -> None:
        self.client = client
        self.clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Time the client's own."""
        self.clock.run("init", lambda: self.client.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        """Time the client's own."""
        self.clock.run("start", self.client.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        """Time the client's own."""
        self.clock.run("update", lambda: self.client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Time the client's own."""
        self.clock.run("finish", lambda: self.client.finish_weight_update(weight_version))


class Direct:
    """All replicas at once, without a gateway."""

    def __init__(self, urls: Sequence[str], make: Callable[[str], FleetWeightSyncClient]) -> None:
        self.clients = [make(url) for url in urls]
        self.next_weight_version: str | None = None
        self._pool = ThreadPoolExecutor(len(self.clients))

    def _all(self, call: Callable[[int, FleetWeightSyncClient], object]) -> None:
        calls = [self._pool.submit(call, n, client) for n, client in enumerate(self.clients)]
        for answer in calls:
            answer.result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Replicas of one worker each: every one a rank further."""

        def init(number: int, client: FleetWeightSyncClient) -> None:
            offset = init_info.get("rank_offset")
            moved = {} if offset is None else {"rank_offset": offset + number}
            client.init_weight_transfer_engine({**init_info, **moved})

        self._all(init)

    def shutdown_weight_transfer_engine(self) -> None:
        """Let all leave the group."""
        self._all(lambda _, client: client.shutdown_weight_transfer_engine())

    def start_weight_update(self) -> None:
        """Pause everywhere, then start everywhere, as the gateway does in its start."""
        self._all(lambda _, client: client.pause("keep"))
        self._all(lambda _, client: client.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        """The same body to all."""
        self._all(lambda _, client: client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish everywhere, then resume everywhere, as the gateway does in its finish."""
        version = weight_version or self.next_weight_version
        self._all(lambda _, client: client.finish_weight_update(version))
        self._all(lambda _, client: client.resume())

    def close(self) -> None:
        """Drop the connections."""
        self._pool.shutdown(wait=False)
        for client in self.clients:
            client.close()
