"""A trainer's session that goes on when the fleet changes: fewer replicas, more, or other ones.

vLLM's trainer engine meets its group once; when a member is lost, its next start is refused
(409, world_size=K), and from the second round on it sends no metadata, which newcomers would need.
The session makes a new engine for each group: it asks how many workers there are, meets them, and
sends with fresh metadata. It does so

- before a round, when the gateway says that the membership has changed: newcomers are in;
- in a round, when the fleet refused or failed it: those who are left get the whole update again.

Attempts are bounded and logged. What another trainer's open round, a wrong token or a wrong body
refuses is raised at once: no second attempt helps.

With several trainer ranks, all of them make a session and call it; rank 0 speaks to the gateway
and tells the others, one word at a time, what to do (`ranks.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fleet.client.engines import SteadySource, Wire, abort_collective
from fleet.client.errors import (
    AnswerLost,
    DeadlinePassed,
    FleetError,
    MemberFailed,
    MembershipChanged,
    PauseNotReached,
    RoundOpen,
    Told,
    WorldSizeMismatch,
    WrongPhase,
)
from fleet.client.ranks import Stop, TrainerRanks
from fleet.client.sync import FleetWeightSyncClient
from fleet.facts.outcome import Result

log = logging.getLogger(__name__)

Engine = Any  # vLLM's TrainerWeightTransferEngine
TrainerInit = Callable[..., Engine]

_TRAINER_RANKS = 1  # in the transfer group: vLLM's engines send from one rank
_POLL_S = 0.1
_WORTH_ANOTHER = (
    MembershipChanged,
    WorldSizeMismatch,
    WrongPhase,
    MemberFailed,
    DeadlinePassed,
    PauseNotReached,
    AnswerLost,
)


@dataclass(frozen=True, kw_only=True)
class Persistence:
    """How often a round is tried, and how long to wait between: doubling from first to longest.

    `settle_s` is how long to wait for replicas that sat in a failed collective and should answer
    again any moment; then the next attempt goes on without them. `last_word_s` is how long to wait
    for the fleet's own reason when the engine broke first.
    """

    attempts: int = 6
    first_wait_s: float = 0.5
    longest_wait_s: float = 15.0
    settle_s: float = 5.0
    last_word_s: float = 15.0

    def wait_s(self, attempt: int) -> float:
        """Return the pause after this attempt, counted from 1."""
        return min(self.longest_wait_s, self.first_wait_s * 2 ** (attempt - 1))


@dataclass(frozen=True)
class _Join:
    world_size: int


@dataclass(frozen=True)
class _Send:
    pass


@dataclass(frozen=True)
class _Done:
    pass


class ElasticSession:
    """Sends a trainer's weights to whatever replicas there are; not for several threads.

    `init_info(world_size)` returns the backend's TrainerInitInfo for this rank and a group of that
    size, with a port that is free now. `source` is vLLM's WeightSource, None for backends whose
    `send_weights` takes the payload. `trainer_init` is that of vLLM's factory unless given.
    """

    def __init__(
        self,
        client: FleetWeightSyncClient,
        init_info: Callable[[int], Any],
        source: Any = None,
        *,
        ranks: TrainerRanks | None = None,
        persistence: Persistence = Persistence(),
        trainer_init: TrainerInit | None = None,
    ) -> None:
        self.client = client
        self.ranks = ranks or TrainerRanks()
        self.persistence = persistence
        self.engine: Engine | None = None
        self.world_size: int | None = None
        self._init_info = init_info
        self._source = source
        self._steady: SteadySource | None = None
        self._trainer_init = trainer_init or _vllm_trainer_init
        self._wire: Wire | None = None
        self._lost: FleetError | None = None

    def send_weights(self, *payload: Any, weight_version: str | None = None) -> None:
        """Bring the fleet to these weights; call it on all trainer ranks.

        `payload` goes to the engine's `send_weights` (patches, for a sparse backend) and must be
        re-iterable. Raises the last attempt's error; other ranks than the sender, SenderFailed.
        """
        if not self.ranks.is_sender:
            self._follow(payload)
            return
        try:
            self._lead(payload, weight_version)
        except Exception as error:
            self.ranks.tell(Stop(f"{type(error).__name__}: {error}"))
            raise
        self.ranks.tell(_Done())

    def close(self) -> None:
        """Leave the group; the fleet keeps its weights and its version."""
        self._leave()

    # -- the sender --------------------------------------------------------------------------------

    def _lead(self, payload: tuple[Any, ...], weight_version: str | None) -> None:
        self._lost = None
        for attempt in range(1, self.persistence.attempts + 1):
            try:
                self._attempt(payload, weight_version)
                return
            except Exception as error:
                why = self._reason(error)
                self._leave()
                if why is None or attempt == self.persistence.attempts:
                    raise
                self._lost = why if isinstance(why, AnswerLost) else self._lost
                self._wait(attempt, why)

    def _attempt(self, payload: tuple[Any, ...], weight_version: str | None) -> None:
        self._be_in_step()
        self.client.next_weight_version = weight_version
        wire, engine = self._wire, self.engine
        assert wire is not None
        assert engine is not None
        try:
            engine.send_weights(*payload)
        finally:
            wire.over()
            self.client.next_weight_version = None
        if self._steady is not None:
            self._steady.walked()

    def _be_in_step(self) -> None:
        """Be in a group with exactly the replicas that the fleet would have in it."""
        if self.engine is not None:
            self.client.weight_info()  # any answer tells whether the membership has changed
            now = self.client.membership
            if not now.changed or now.world_size is None:
                return
            log.info("the fleet has changed", extra={"world_size": now.world_size})
            with suppress(FleetError):  # their old communicator costs memory, nothing else
                self.client.shutdown_weight_transfer_engine()
            self._leave()
        workers = self.client.get_world_size()
        if workers == 0:
            told = Told(call="GET /get_world_size", hint="start, repair or restart replicas")
            raise MembershipChanged("no replica can join a group now", told)
        self._join(_TRAINER_RANKS + workers)

    def _join(self, world_size: int) -> None:
        self.ranks.tell(_Join(world_size))
        self._wire = Wire(self.client, self._started, self._abort)
        self._make_engine(world_size, self._wire)
        log.info("joined", extra={"world_size": world_size, "backend": type(self.engine).__name__})

    def _started(self) -> None:
        self.ranks.tell(_Send())
        if self._steady is not None:
            self._steady.awaited()

    def _abort(self) -> None:
        log.warning("the sender is still in a collective that has failed; aborting it")
        abort_collective(self.engine)

    def _reason(self, error: Exception) -> FleetError | None:
        """Return why the fleet did not take the round, if another attempt may help; walk on."""
        if self._steady is not None:
            self._steady.complete()
        failed = self._wire.last_word(self.persistence.last_word_s) if self._wire else None
        known = [e for e in (error, failed) if isinstance(e, FleetError)]
        worth = [e for e in known if isinstance(e, _WORTH_ANOTHER)]
        if worth:
            return worth[0]
        # Our own call, whose answer was lost, may still be on its way at the gateway.
        return next((e for e in known if isinstance(e, RoundOpen) and self._lost), None)

    def _wait(self, attempt: int, why: FleetError) -> None:
        at_once = attempt == 1 and isinstance(why, (MembershipChanged, WorldSizeMismatch))
        wait_s = 0.0 if at_once else self.persistence.wait_s(attempt)
        log.warning(
            "the fleet did not take the round, once more",
            extra={"attempt": attempt, "wait_s": wait_s, "why": str(why)},
        )
        time.sleep(wait_s)
        waited = any(o.outcome is Result.WEDGED for o in why.outcomes.values())
        if waited and why.world_size is not None:
            self._settle(why.world_size)

    def _settle(self, world_size: int) -> None:
        """Wait a while for as many workers as the fleet expects to have."""
        gives_up = time.monotonic() + self.persistence.settle_s
        with suppress(FleetError):  # the next attempt meets it
            while time.monotonic() < gives_up:
                self.client.weight_info()
                if (self.client.membership.world_size or 0) >= world_size:
                    return
                time.sleep(_POLL_S)

    # -- the other ranks ---------------------------------------------------------------------------

    def _follow(self, payload: tuple[Any, ...]) -> None:
        while True:
            word = self.ranks.hear()
            if isinstance(word, _Done):
                return
            if isinstance(word, _Join):
                self._leave()
                self._make_engine(word.world_size, self.client)
            elif self.engine is not None:
                self.engine.send_weights(*payload)

    # -- all ranks ---------------------------------------------------------------------------------

    def _make_engine(self, world_size: int, client: Any) -> None:
        if self._steady is None and self._source is not None and not self.ranks.alone:
            self._steady = SteadySource(self._source)
        source = self._steady if self._steady is not None else self._source
        info = self._init_info(world_size)
        self.engine = self._trainer_init(info, client=client, source=source)
        self.world_size = world_size

    def _leave(self) -> None:
        engine, self.engine = self.engine, None
        self._wire = None
        self.world_size = None
        if engine is not None:
            engine.shutdown()


def _vllm_trainer_init(init_info: Any, *, client: Any, source: Any) -> Engine:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    return WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)
