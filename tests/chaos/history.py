"""What a chaos run wrote down. Values only; every time is of the driver's monotonic clock, in s.

Four points of view that know nothing of each other: the clients of rollouts, the trainer, each
replica's own log, and the store (every write of the fleet's state that Redis has confirmed, as a
proxy saw it pass). `outages` are the faults, so that a rule can excuse what a fault explains.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet.facts.state import FleetState


@dataclass(frozen=True, kw_only=True)
class Made:
    """Tokens of one rollout that came from one state of one replica's weights."""

    version: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One rollout as its client saw it; `status` None means that no whole answer came.

    `label` and `end_label` are X-Weight-Version and X-Weight-Version-End; `made` is what the
    replica says in the answer itself. `broken` says that the answer tells its own failure in a
    stream's last event.
    """

    gateway: str
    began: float
    ended: float
    status: int | None
    label: str | None = None
    end_label: str | None = None
    replica: str | None = None
    made: tuple[Made, ...] = ()
    is_stream: bool = False
    broken: bool = False
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Called:
    """One control call as the trainer saw it; `deadline_s` is how long it may take at most."""

    gateway: str
    path: str
    began: float
    ended: float
    deadline_s: float
    status: int | None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Did:
    """One control call as a replica saw it; `ended` None means that it never got an answer."""

    replica: str
    boot: int
    path: str
    began: float
    ended: float | None
    status: int | None
    version: str | None = None


@dataclass(frozen=True, kw_only=True)
class Served:
    """One rollout as the replica that computed it saw it."""

    replica: str
    began: float
    ended: float
    outcome: str


@dataclass(frozen=True, kw_only=True)
class Written:
    """One state of the fleet, when Redis confirmed it; `revision` counts the writes.

    One that `restores` is what a gateway brought back to a store that had lost everything; nobody
    builds on it before the others have had their say.
    """

    at: float
    revision: int
    state: FleetState
    restores: bool = False


@dataclass(frozen=True, kw_only=True)
class Outage:
    """A fault: what it was, whom it hit (a gateway, a replica or `store`), and for how long."""

    kind: str
    target: str
    began: float
    ended: float


@dataclass(kw_only=True)
class History:
    """Everything that was seen in one run; `weights` gives the checksum of each label's weights."""

    rollouts: list[Rollout] = field(default_factory=list[Rollout])
    calls: list[Called] = field(default_factory=list[Called])
    did: list[Did] = field(default_factory=list[Did])
    served: list[Served] = field(default_factory=list[Served])
    states: list[Written] = field(default_factory=list[Written])
    outages: list[Outage] = field(default_factory=list[Outage])
    engines_killed: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    weights: dict[str, str] = field(default_factory=dict[str, str])
