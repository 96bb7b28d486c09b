"""What an elastic session puts between vLLM's trainer engine and what that engine uses.

The engine calls a client and walks a source of weights, and neither knows of the other ranks or
of a second attempt. `Wire` stands before the client, `SteadySource` before the source (vLLM 0.32
and 0.33, ``vllm/distributed/weight_transfer/``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from fleet.client.errors import FleetError
from fleet.client.sync import FleetWeightSyncClient

ABORT_AFTER_S = 10.0
"""How long a sender may stay in a collective that the other side has already reported as failed."""


class Wire:
    """The client that the engine is given: says when a round has begun, and keeps what failed.

    An engine calls `update_weights` from a thread, and what it raises may be what became of its
    own broadcast; why the fleet refused is here.
    """

    def __init__(
        self,
        client: FleetWeightSyncClient,
        on_started: Callable[[], None],
        on_failed: Callable[[], None],
    ) -> None:
        self._client = client
        self._on_started = on_started
        self._on_failed = on_failed
        self._answered = threading.Event()
        self._answered.set()
        self._timer: threading.Timer | None = None
        self.failed: FleetError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Pass on; keep a failure."""
        self._keep(lambda: self._client.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        """Pass on; then the other ranks begin to walk the source as well."""
        self._keep(self._client.start_weight_update)
        self._on_started()

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Pass on; a failure gets the sender out of the collective, if it does not come by itself.

        NCCL does not notice a peer that died: its broadcast would wait for ever.
        """
        self._answered.clear()
        try:
            self._keep(lambda: self._client.update_weights(update_info))
        except FleetError:
            self._timer = threading.Timer(ABORT_AFTER_S, self._on_failed)
            self._timer.daemon = True
            self._timer.start()
            raise
        finally:
            self._answered.set()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Pass on; keep a failure."""
        self._keep(lambda: self._client.finish_weight_update(weight_version))

    def last_word(self, timeout_s: float) -> FleetError | None:
        """Return why the fleet failed the round, waiting a while for an answer under way."""
        self._answered.wait(timeout_s)
        return self.failed

    def over(self) -> None:
        """The engine has left the round: there is nothing to abort any more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _keep(self, call: Callable[[], None]) -> None:
        try:
            call()
        except FleetError as error:
            self.failed = error
            raise


def abort_collective(engine: Any) -> None:
    """End a broadcast that NCCL would never end: abort its communicator, if it has one.

    ``PyNcclCommunicator.destroy`` is ncclCommAbort in a thread of its own (0.32). gloo's group
    closes itself, ipc has none.
    """
    group = getattr(engine, "model_update_group", None)
    destroy = getattr(group, "destroy", None)
    if callable(destroy):
        destroy()


class SteadySource:
    """A source of weights whose walk is always completed, for a trainer of several ranks.

    Each step of a walk is a collective of the trainer's ranks (FSDP's full_tensor()). A sender
    whose transfer broke off in the middle walks on to the end, or its siblings hang. What the
    source declares may be a collective too, so all ranks ask for it at the same time, once.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._walk: Iterator[Any] | None = None
        self._awaited = False
        metadata = source.metadata
        self._is_method = callable(metadata)  # in 0.32; a cached property since 0.33
        self._declared: Any = metadata() if callable(metadata) else metadata

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._source, name)
        if not name.startswith("iter_"):
            return found
        return lambda *args, **kwargs: self._walked(found(*args, **kwargs))

    def __iter__(self) -> Iterator[Any]:
        return self._walked(iter(self._source))

    @property
    def metadata(self) -> Any:
        """What the source declares, without asking it again."""
        return (lambda: self._declared) if self._is_method else self._declared

    def awaited(self) -> None:
        """The other ranks have begun their walk, and this one has to walk with them."""
        self._awaited = True

    def walked(self) -> None:
        """The walk is over, as it should."""
        self._awaited, self._walk = False, None

    def complete(self) -> None:
        """Take the steps of an awaited walk that are left, all of them if it has not begun."""
        if not self._awaited:
            return
        walk = self._walk
        if walk is None:
            full: Callable[[], Iterator[Any]] | None = getattr(self._source, "iter_full", None)
            walk = iter(self._source) if full is None else full()
        for _ in walk:
            pass
        self.walked()

    def _walked(self, walk: Iterator[Any]) -> Iterator[Any]:
        self._walk = walk
        return walk
