"""What the fleet must not forget, as one frozen value: the document that the store keeps.

Everything here is data. `rounds.py` says how a weight update changes it, `membership.py` how
joining, leaving and probing do, `replica.py` which state follows for each replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from fleet.facts.calls import Ended, Holder, Seat
from fleet.facts.layout import Layout
from fleet.facts.outcome import Outcome, Result
from fleet.facts.replica import Replica, ReplicaState, state_of

COMMITS_KEPT = 1000
"""How many committed versions stay known, for X-Min-Weight-Version by commit order."""


UNSET_VERSION = "default"
"""What /weight_info says before any version is set (vllm/v1/engine, 0.32)."""


class Phase(StrEnum):
    """Where the fleet stands between one weight version and the next."""

    IDLE = "idle"
    INITIALIZING = "initializing"
    INITIALIZED = "initialized"
    PAUSING = "pausing"
    STARTING = "starting"
    STARTED = "started"
    UPDATING = "updating"
    FINISHING = "finishing"
    COMMITTED = "committed"
    UNDOING = "undoing"
    FAILED = "failed"


IN_SESSION = frozenset(
    {Phase.STARTING, Phase.STARTED, Phase.UPDATING, Phase.FINISHING, Phase.UNDOING}
)
"""Phases in which a member may be between start and finish: a rollout would kill its engine."""

ROUND_OPEN = IN_SESSION | {Phase.PAUSING, Phase.COMMITTED}
"""Phases that belong to one weight update, from closing the gate to opening it."""


ON_THE_WAY = frozenset(
    {
        Phase.INITIALIZING,
        Phase.PAUSING,
        Phase.STARTING,
        Phase.UPDATING,
        Phase.FINISHING,
        Phase.COMMITTED,
        Phase.UNDOING,
    }
)
"""Phases in which a call is on its way: one gateway holds the fleet until it is over."""

IN_COLLECTIVE = frozenset({Phase.INITIALIZING, Phase.UPDATING})
"""Phases in which members sit in a collective and answer nothing else."""


class RoundResult(StrEnum):
    """How a round ended."""

    OPEN = "open"
    COMMITTED = "committed"
    FAILED = "failed"
    UNDONE = "undone"
    ABANDONED = "abandoned"


class Arrival(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica's part of one phase; `elapsed_s` adds up over the calls of the phase."""

    outcome: Result
    elapsed_s: float
    status: int | None = None
    detail: str | None = None


class PhaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How one phase went: wall time in seconds, how many calls it took, and every replica."""

    phase: str
    started_at: float
    elapsed_s: float
    calls: int
    replicas: dict[str, Arrival]


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One weight update: who asked, what it did in each phase, how it ended.

    `touched` says that an update or a finish was sent: then weights and labels may be mixed.
    """

    id: int
    generation: int
    opened_by: str
    opened_at: float
    draft: bool = False
    updates: int = 0
    touched: bool = False
    full: bool = False
    version: str | None = None
    result: RoundResult = RoundResult.OPEN
    reason: str | None = None
    closed_at: float | None = None
    kv: str = "current"
    names_key: str | None = None
    records: tuple[PhaseRecord, ...] = ()


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The membership frozen at init: who has which ranks, and who was left out and why.

    `instances` is the instance each member had at init, to tell a restart from a survivor.
    `announced_in` is the last round of this generation that named tensors, which empty metadata
    («reuse the previous call's») stands for.
    """

    generation: int
    backend: str | None
    layout: Layout
    instances: dict[str, str | None]
    left_out: dict[str, str]
    opened_by: str
    opened_at: float
    announced_in: int | None = None

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of the members, in rank order."""
        return tuple(slot.replica for slot in self.layout.slots)


class TrainerPause(msgspec.Struct, frozen=True, kw_only=True):
    """A pause that the trainer (or an operator) asked for and has not resumed yet.

    `since` is when it was asked for first, `renewed` when last.
    """

    mode: str
    clear_cache: bool
    by: str
    since: float
    renewed: float = 0.0


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole fleet. `commit_index` counts commits; `commits` holds the last versions in order.

    `weight_version` is None until one is committed. `counter` is the last automatic number.
    `fullest` is the store key of the names of the fullest round so far. `gateways` are those that
    serve the fleet, by id; `holder` is the call that one of them carries now, `ended` the last one.
    `resets` counts how often an operator has abandoned what was open. `departed` is what replicas
    have left with since the last commit (departed.py). `naming` is the label that replicas are
    being given outside of a round.
    """

    name: str
    generation: int
    phase: Phase = Phase.IDLE
    weight_version: str | None = None
    commit_index: int = 0
    commits: tuple[str, ...] = ()
    counter: int = 0
    next_round: int = 1
    kv: str = "current"
    fullest: str | None = None
    replicas: dict[str, Replica] = {}
    group: Group | None = None
    round: Round | None = None
    pause: TrainerPause | None = None
    gateways: dict[str, Seat] = {}
    holder: Holder | None = None
    ended: Ended | None = None
    resets: int = 0
    departed: dict[str, Replica] = {}
    naming: str | None = None

    @property
    def member_ids(self) -> tuple[str, ...]:
        """The ids of the current group's members, in rank order; nobody without a group."""
        return self.group.members if self.group else ()

    def members(self) -> tuple[Replica, ...]:
        """The replicas of the current group that the fleet still knows, in rank order."""
        known = (self.replicas.get(replica) for replica in self.member_ids)
        return tuple(replica for replica in known if replica is not None)

    @property
    def fleet_paused(self) -> bool:
        """Whether new rollouts must wait because of a pause or an open or failed round."""
        failed_in_session = self.phase is Phase.FAILED and self.session_was_open
        return self.pause is not None or self.phase in ROUND_OPEN or failed_in_session

    @property
    def session_was_open(self) -> bool:
        """Whether the current round got as far as a start."""
        records = self.round.records if self.round else ()
        return any(record.phase == Phase.STARTING for record in records)

    def states(self) -> Iterator[tuple[Replica, ReplicaState, str]]:
        """Yield every replica with its state and the reason for it."""
        updating = set(self.member_ids) if self.phase in IN_SESSION else set[str]()
        for replica in self.replicas.values():
            state, reason = state_of(
                replica,
                commit_index=self.commit_index,
                updating=replica.id in updating,
                fleet_paused=self.fleet_paused,
            )
            yield replica, state, reason

    def ready(self) -> list[Replica]:
        """Return the replicas that may serve rollouts now."""
        return [replica for replica, state, _ in self.states() if state is ReplicaState.READY]

    def order_of(self, version: str) -> int | None:
        """Return the newest commit index of a version, or None if it was never committed."""
        for back, committed in enumerate(reversed(self.commits)):
            if committed == version:
                return self.commit_index - back
        return None

    def with_commit(self, version: str | None) -> FleetState:
        """Return the state with one more commit; a higher numeric label moves the counter."""
        numeric = int(version) if version and _is_number(version) else 0
        return msgspec.structs.replace(
            self,
            commit_index=self.commit_index + 1,
            weight_version=version,
            commits=(*self.commits, version or UNSET_VERSION)[-COMMITS_KEPT:],
            counter=max(self.counter, numeric),
            departed={},
        )

    def with_replicas(self, changed: Iterable[Replica]) -> FleetState:
        """Return the state with these replicas put in the place of those with the same id.

        It is this very state if that changes nothing, so that nothing need be written.
        """
        new = {r.id: r for r in changed if self.replicas.get(r.id) != r}
        return msgspec.structs.replace(self, replicas={**self.replicas, **new}) if new else self


def _is_number(version: str) -> bool:
    return version.isascii() and version.isdigit() and len(version) <= 18


def record_outcomes(
    records: tuple[PhaseRecord, ...],
    phase: Phase,
    outcomes: dict[str, Outcome],
    *,
    now: float,
    elapsed_s: float,
) -> tuple[PhaseRecord, ...]:
    """Return the records with one more fan-out in them; calls of one phase add up in one record."""
    before = next((r for r in records if r.phase == phase), None)
    merged = PhaseRecord(
        phase=phase,
        started_at=before.started_at if before else now - elapsed_s,
        elapsed_s=(before.elapsed_s if before else 0.0) + elapsed_s,
        calls=(before.calls if before else 0) + 1,
        replicas={r: _add(before, r, outcome) for r, outcome in outcomes.items()},
    )
    return (*(r for r in records if r.phase != phase), merged)


def _add(before: PhaseRecord | None, replica: str, outcome: Outcome) -> Arrival:
    earlier = before.replicas.get(replica) if before else None
    return Arrival(
        outcome=outcome.outcome,
        elapsed_s=(earlier.elapsed_s if earlier else 0.0) + outcome.elapsed_s,
        status=None if outcome.ok else outcome.status,
        detail=None if outcome.ok else outcome.detail,
    )
