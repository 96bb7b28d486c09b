"""One vLLM server as the fleet knows it: frozen facts, and the state that follows from them.

A state is never stored. It is derived by `state_of` from facts that each have one owner: what
probing saw (topology, instance, lost, asleep), what rounds did (holds, fence, wedged, session),
what an operator asked (draining), what discovery found (origin, leaving). So no two parts of the
program can disagree about it.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto

import msgspec

from fleet.facts.endpoint import Origin

UNKNOWN = "unknown since "
POD = "pod "
STARTED = "started at "
"""How an instance begins that no server has told: a restart cannot be ruled out; the pod that it is
in, until the first look at it; when it was started, where it tells nothing better."""


class Naming(Enum):
    """In which words an instance is told; two of different words say nothing of each other."""

    NOT = auto()
    BY_POD = auto()
    BY_START = auto()
    BY_ITSELF = auto()


def naming_of(instance: str | None) -> Naming:
    """Return in which words this instance is told."""
    if instance is None or instance.startswith(UNKNOWN):
        return Naming.NOT
    if instance.startswith(POD):
        return Naming.BY_POD
    return Naming.BY_START if instance.startswith(STARTED) else Naming.BY_ITSELF


SESSION_OPEN = "its update session may still be open"


class ReplicaState(StrEnum):
    """Every state that an operator can see; the words are fixed by the gateway's interface."""

    JOINING = "joining"
    READY = "ready"
    PAUSED = "paused"
    ASLEEP = "asleep"
    UPDATING = "updating"
    STALE = "stale"
    FENCED = "fenced"
    WEDGED = "wedged"
    DRAINING = "draining"
    GONE = "gone"


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers a server adds to a group, and with which servers it shares a deployment.

    `workers` is what the server's /get_world_size answers (TP x PP, and x DP where the server
    counts it). Servers with the same `deployment` are one deployment behind an external load
    balancer and share one rank offset; `counts_deployment` says that `workers` already covers
    all of it (expert parallel), `servers` how many servers it has (None: those we know). `master`
    is the data-parallel master that any server names: the first server of a dense deployment
    looks like an independent one, but for a second server with the same master.
    Source: vllm/config/parallel.py and distributed/weight_transfer/nccl_common.py, 0.32.
    """

    workers: int = 1
    deployment: str | None = None
    counts_deployment: bool = False
    servers: int | None = None
    index: int | None = None
    master: str | None = None


class Sleep(msgspec.Struct, frozen=True, kw_only=True):
    """A sleeping server: its level and which of `weights`, `kv_cache` are awake again.

    `at` is when it was asked for, in seconds since the epoch; it tells one sleep from the next.
    """

    level: int
    awake: tuple[str, ...] = ()
    at: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether every part is awake again."""
        return self.level == 0 or {"weights", "kv_cache"} <= set(self.awake)


class Replica(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts about one replica that the whole fleet must agree on.

    `holds` is the index of the commit whose weights the replica is known to hold (0: the weights
    it booted with, before any commit); None means that nobody knows or that it missed one.
    `version` is the label it has been given or names, `named` what it has last named itself.
    `origin` is where discovery found it, `leaving` why discovery wants it to take no rollouts.
    `same_as` is the replica that is this very server under another URL, and stands for it.
    `restarted_at` is when somebody was last asked to restart it. Times are seconds since the epoch.
    """

    id: str
    url: str
    joined_at: float = 0.0
    topology: Topology | None = None
    backend: str | None = None
    instance: str | None = None
    version: str | None = None
    named: str | None = None
    refusal: str | None = None
    holds: int | None = None
    fence: str | None = None
    wedged: str | None = None
    lost: str | None = None
    draining: bool = False
    paused: bool = False
    sleep: Sleep | None = None
    session_open: bool = False
    origin: Origin | None = None
    leaving: str | None = None
    same_as: str | None = None
    since: float = 0.0
    restarted_at: float = 0.0

    @property
    def known(self) -> bool:
        """Whether probing has seen this server's topology."""
        return self.topology is not None

    @property
    def refused(self) -> str | None:
        """Why it can never be a member as it is, None if it may: itself, or under this name."""
        return self.refusal or (f"the same server as {self.same_as}" if self.same_as else None)

    @property
    def barred(self) -> str | None:
        """Why it must not run, whatever it holds and whoever has paused it; None if it may."""
        return self.fence or (SESSION_OPEN if self.session_open else None)

    @property
    def frozen(self) -> bool:
        """Whether what it has begun must not run on: its weights may be others by now."""
        return self.barred is not None and (self.paused or self.sleep is not None)

    @property
    def reachable(self) -> bool:
        """Whether a call to this server has a chance of being answered now."""
        return self.lost is None and self.wedged is None

    def may_join_group(self) -> bool:
        """Whether the next init takes this replica in; a full update heals stale and fenced."""
        leaves = self.draining or self.leaving is not None
        return self.known and self.reachable and not leaves and self.refused is None


def why_left_out(replica: Replica) -> str | None:
    """Return why the next init leaves this replica out, or None if it takes it."""
    if replica.may_join_group():
        return None
    reasons = (replica.refused, replica.wedged, replica.lost, replica.leaving)
    return next((r for r in reasons if r), "draining" if replica.draining else "not probed yet")


def state_of(
    replica: Replica, *, commit_index: int, updating: bool, fleet_paused: bool
) -> tuple[ReplicaState, str]:
    """Return the replica's state and the reason for it.

    `updating` says that the replica is inside start..finish of the open round; `fleet_paused`
    that the trainer or the open round has paused the fleet. The first fact that forbids
    serving wins, the gravest first.
    """
    checks: tuple[tuple[bool, ReplicaState, str], ...] = (
        (replica.lost is not None, ReplicaState.GONE, replica.lost or ""),
        (replica.wedged is not None, ReplicaState.WEDGED, replica.wedged or ""),
        (replica.refused is not None, ReplicaState.FENCED, replica.refused or ""),
        (not replica.known, ReplicaState.JOINING, "not probed yet"),
        (replica.leaving is not None, ReplicaState.DRAINING, replica.leaving or ""),
        (replica.draining, ReplicaState.DRAINING, "an operator asked for it"),
        (updating, ReplicaState.UPDATING, "inside start..finish of the open round"),
        (replica.sleep is not None, ReplicaState.ASLEEP, _sleep_reason(replica.sleep)),
        (replica.barred is not None, ReplicaState.FENCED, replica.barred or ""),
        (
            replica.holds != commit_index,
            ReplicaState.STALE,
            "does not hold the committed version; the next init and full update bring it in",
        ),
        (
            fleet_paused or replica.paused,
            ReplicaState.PAUSED,
            "the fleet is paused" if fleet_paused else "its server is, though the fleet is not",
        ),
    )
    return next(((s, why) for hit, s, why in checks if hit), (ReplicaState.READY, ""))


def _sleep_reason(sleep: Sleep | None) -> str:
    if sleep is None:
        return ""
    woken = ", ".join(sleep.awake) or "nothing"
    return f"sleep level {sleep.level}, awake: {woken}"
