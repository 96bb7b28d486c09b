"""The gate: which rollouts may go to which replica now, and the line of those that must wait.

Whether it stands open follows from the fleet's state (`follow`), never from a switch of its own,
and from this gateway's lease (`renew`): who cannot see what others decide must not admit anyone.
A rollout gets a ticket: the replica and the version label are fixed in that moment. The gate
counts as closed only when no ticket is between that moment and the last byte sent, so a pause
that goes out after `closed` overtakes nobody. Tickets that may not be used any more, because the
lease has ended or their replica may get nothing now, are called back: nobody waits for a corpse.

The line is first come, first served, and bounded in number, bytes and time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from time import monotonic, time

from fleet.errors import DeadlinePassed, GateOverflow, NoEligibleReplica
from fleet.facts.replica import Replica
from fleet.facts.state import UNSET_VERSION, FleetState
from fleet.gateways.gate import Load
from gateway.routing import POLICIES
from gateway.settings_model import Gate as GateSettings
from gateway.settings_model import GateMode


@dataclass(eq=False)
class Ticket:
    """One admitted rollout: where it goes and which version it was promised."""

    gate: RolloutGate
    replica: Replica
    version: str
    held_s: float
    is_sending: bool = True

    def sent(self) -> None:
        """Say that the last byte of the request is on its way."""
        if self.is_sending:
            self.is_sending = False
            self.gate.stop_sending(self)

    def done(self) -> None:
        """Say that the rollout is over, whatever came of it."""
        self.sent()
        self.gate.leave(self.replica.id)


@dataclass(eq=False)
class _Waiting:
    """One rollout in the line."""

    size: int
    min_version: str | None
    avoid: frozenset[str]
    key: bytes | None
    admitted: asyncio.Future[Ticket]
    since: float = field(default_factory=monotonic)


class RolloutGate:
    """Admits rollouts of this gateway to eligible replicas."""

    def __init__(self, settings: GateSettings, policy: str, min_replicas: int = 0) -> None:
        self._settings = settings
        self._min_replicas = min_replicas
        self._too_few: str | None = None
        self._choose = POLICIES[policy].choose
        self.key_of = POLICIES[policy].key_of
        self._line: dict[_Waiting, None] = {}
        self._held_bytes = 0
        self._eligible: dict[str, Replica] = {}
        self._eligible_ids: list[str] = []
        self.version = UNSET_VERSION
        self.kv = "current"
        self._state: FleetState | None = None
        self._dispatched = 0
        self._unsent: set[Ticket] = set()
        self.inflight: dict[str, int] = {}
        self._closed_since: float | None = None
        self._lease_until = inf
        self._lease_check: asyncio.TimerHandle | None = None
        self.on_lapse: Callable[[], None] | None = None
        self.on_bar: Callable[[Collection[str]], None] | None = None
        self._barred: frozenset[str] = frozenset()
        self._silent: frozenset[str] = frozenset()
        self._is_stopping = False
        self._nothing_sent = _set_event()
        self._nothing_running = _set_event()

    # -- what the control plane asks --------------------------------------------------------------

    def follow(self, state: FleetState) -> None:
        """Take over a new state of the fleet; whoever may go now, goes."""
        self._state = state
        self._too_few = self._why_too_few(state)
        is_open = not state.fleet_paused and self._too_few is None
        self._eligible = {r.id: r for r in state.ready()} if is_open else {}
        self._eligible_ids = list(self._eligible)
        self.version = state.weight_version or UNSET_VERSION
        self.kv = state.kv
        if state.fleet_paused:
            self._closed_since = self._closed_since or time()
        else:
            self._closed_since = None
        self._release()
        self._give_up(state)

    def renew(self, until: float) -> None:
        """Admit rollouts until this moment (monotonic clock), unless renewed again before."""
        self._lease_until = until
        self._release()
        self._check_lease()

    def stop(self) -> None:
        """Send everyone in the line away, and hold nobody any more: the gateway is about to end."""
        self._is_stopping = True
        for waiting in tuple(self._line):
            if not waiting.admitted.done():
                waiting.admitted.set_exception(_stopping())

    async def closed(self) -> None:
        """Return when no rollout is between its choice of a replica and its last byte sent."""
        await self._nothing_sent.wait()

    async def drained(self) -> None:
        """Return when no rollout is being answered by any replica that can answer."""
        await self._nothing_running.wait()

    # -- what the operators see -------------------------------------------------------------------

    def load(self) -> Load:
        """Return what this gateway has in hand."""
        unsent = Counter(ticket.replica.id for ticket in self._unsent)
        return Load(
            held=self.held,
            held_bytes=self._held_bytes,
            inflight=dict(self.inflight),
            unsent=dict(unsent),
        )

    @property
    def oldest_held_s(self) -> float:
        """How long the first in the line has waited, in seconds; 0 if nobody waits."""
        first = next(iter(self._line), None)
        return monotonic() - first.since if first is not None else 0.0

    @property
    def closed_since(self) -> float | None:
        """When the gate closed (seconds since the epoch), or None while it is open."""
        if self._closed_since is None and self.lease_lapsed:
            return time() - (monotonic() - self._lease_until)
        return self._closed_since

    @property
    def lease_lapsed(self) -> bool:
        """Whether nobody is admitted because this gateway has not renewed its lease."""
        return monotonic() >= self._lease_until

    @property
    def held(self) -> int:
        """How many rollouts wait in the line."""
        return len(self._line)

    @property
    def held_bytes(self) -> int:
        """How many bytes of request bodies wait in the line."""
        return self._held_bytes

    # -- what the rollouts ask --------------------------------------------------------------------

    def try_admit(
        self, min_version: str | None, avoid: Iterable[str] = (), key: bytes | None = None
    ) -> Ticket | None:
        """Return a ticket if a replica may take the rollout this instant; `key` is from key_of."""
        return self._try(min_version, avoid, key, held_s=0.0)

    async def admit(
        self,
        size: int,
        min_version: str | None = None,
        avoid: Iterable[str] = (),
        key: bytes | None = None,
    ) -> Ticket:
        """Return a ticket as soon as an eligible replica may take the rollout.

        `avoid` are replicas that have just failed it. Raises GateOverflow when the line is full or
        the mode is `reject`, DeadlinePassed or NoEligibleReplica when the gate's time is over.
        """
        ticket = self.try_admit(min_version, avoid, key)
        if ticket is not None:
            return ticket
        self._check_room(size)
        admitted: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(size, min_version, frozenset(avoid), key, admitted)
        self._line[waiting] = None
        self._held_bytes += size
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._stand_in_line(waiting)
        except BaseException as error:
            _give_back(waiting)
            if isinstance(error, TimeoutError):
                raise self._too_late(min_version) from None
            raise
        finally:
            del self._line[waiting]
            self._held_bytes -= size

    def has_another(self, avoid: Iterable[str]) -> bool:
        """Whether any replica but these may take rollouts, now or after some update."""
        known = self._state.replicas.values() if self._state else ()
        return any(r.may_join_group() and r.id not in avoid for r in known)

    def stop_sending(self, ticket: Ticket) -> None:
        """Count one ticket as sent."""
        self._unsent.discard(ticket)
        if not self._unsent:
            self._nothing_sent.set()

    def leave(self, replica: str) -> None:
        """Count one rollout as over."""
        left = self.inflight[replica] - 1
        if left:
            self.inflight[replica] = left
        else:
            del self.inflight[replica]
        if not self.inflight or (self._silent and self.inflight.keys() <= self._silent):
            self._nothing_running.set()

    # -- pieces -----------------------------------------------------------------------------------

    async def _stand_in_line(self, waiting: _Waiting) -> Ticket:
        """Return a ticket that may be used; what granted it may be over before it is taken."""
        while True:
            ticket = await waiting.admitted
            if monotonic() < self._lease_until and ticket.replica.id not in self._barred:
                return ticket
            ticket.done()
            waiting.admitted = asyncio.get_running_loop().create_future()
            self._release()

    def _give_up(self, state: FleetState) -> None:
        """Call back what is not sent to replicas that may get nothing, and forget the silent ones.

        One that is silent, or gone, has no part in an update that `drained` has to wait for.
        """
        known = {r: state.replicas.get(r) for r in self.inflight}
        self._silent = frozenset(r for r, found in known.items() if not (found and found.reachable))
        self._barred = self._silent.union(
            r for r, found in known.items() if found and (found.barred or found.refusal)
        )
        if self.inflight.keys() <= self._silent:
            self._nothing_running.set()
        else:
            self._nothing_running.clear()
        unsent = self._barred.intersection(ticket.replica.id for ticket in self._unsent)
        if unsent and self.on_bar is not None:
            self.on_bar(unsent)

    def _check_lease(self) -> None:
        """Call back what has not left yet as soon as the lease ends: nobody waits for it longer."""
        left_s = self._lease_until - monotonic()
        if left_s > 0 and self._lease_check is None:  # one timer does for many renewals
            loop = asyncio.get_running_loop()
            self._lease_check = loop.call_later(left_s, self._look_at_lease)
        elif left_s <= 0 and self.on_lapse is not None:
            self.on_lapse()

    def _look_at_lease(self) -> None:
        self._lease_check = None
        self._check_lease()

    def _why_too_few(self, state: FleetState) -> str | None:
        if not self._min_replicas:
            return None
        there = sum(r.may_join_group() for r in state.replicas.values())
        if there >= self._min_replicas:
            return None
        return f"{there} replicas are there, at least {self._min_replicas} are needed"

    def _may_go(self, min_version: str | None) -> bool:
        leased = monotonic() < self._lease_until
        return leased and bool(self._eligible) and self._has_committed(min_version)

    def _has_committed(self, version: str | None) -> bool:
        """Order comes from commits, never from the string; the eligible ones hold the last."""
        if version is None or version == self.version or self._state is None:
            return True
        return version == UNSET_VERSION or self._state.order_of(version) is not None

    def _try(
        self, min_version: str | None, avoid: Iterable[str], key: bytes | None, held_s: float
    ) -> Ticket | None:
        if not self._may_go(min_version):
            return None
        eligible = self._eligible_ids
        if avoid:
            eligible = [replica for replica in eligible if replica not in avoid]
        if not eligible:
            return None
        chosen = self._choose(eligible, self.inflight, self._dispatched, key)
        return self._dispatch(self._eligible[chosen], held_s)

    def _dispatch(self, replica: Replica, held_s: float) -> Ticket:
        self._dispatched += 1
        self._nothing_sent.clear()
        self._nothing_running.clear()
        self.inflight[replica.id] = self.inflight.get(replica.id, 0) + 1
        ticket = Ticket(self, replica, self.version, held_s)
        self._unsent.add(ticket)
        return ticket

    def _release(self) -> None:
        """Let the line move: everyone who may go now, in order of arrival."""
        if not self._eligible or not self._line:
            return
        for waiting in tuple(self._line):
            if waiting.admitted.done():
                continue
            held_s = monotonic() - waiting.since
            ticket = self._try(waiting.min_version, waiting.avoid, waiting.key, held_s)
            if ticket is not None:
                waiting.admitted.set_result(ticket)

    def _check_room(self, size: int) -> None:
        if self._is_stopping:
            raise _stopping()
        if self._too_few is not None:
            raise NoEligibleReplica(self._too_few, hint=_RETRY)
        if self._settings.mode is GateMode.REJECT:
            raise GateOverflow("the fleet is changing its weights", hint=_RETRY)
        full = len(self._line) >= self._settings.max_held
        if full or self._held_bytes + size > self._settings.max_held_bytes:
            raise GateOverflow(
                f"the gate holds {len(self._line)} rollouts ({self._held_bytes} bytes), "
                "as many as it may",
                hint=_RETRY,
            )

    def _too_late(self, min_version: str | None) -> DeadlinePassed | NoEligibleReplica:
        limit = f"{self._settings.timeout_s:g} s"
        if not self._has_committed(min_version):
            return DeadlinePassed(
                f"version {min_version!r} was not committed within {limit}",
                hint=f"the fleet is at version {self.version!r}",
            )
        if self.lease_lapsed:
            return DeadlinePassed(
                f"this gateway could not see the fleet for {limit}: its store does not answer",
                hint="see GET /readyz of this gateway",
            )
        if self.closed_since is not None:
            return DeadlinePassed(f"the gate stayed closed for {limit}", hint="see GET /fleet")
        return NoEligibleReplica(
            f"no replica could serve this within {limit}",
            hint="GET /fleet/replicas says why each of them may not",
        )


def _give_back(waiting: _Waiting) -> None:
    """A rollout whose client left in the very moment it was admitted gives its ticket back."""
    admitted = waiting.admitted
    if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
        admitted.result().done()


def _stopping() -> NoEligibleReplica:
    return NoEligibleReplica("the gateway is stopping", hint=_RETRY)


_RETRY = "retry after the time in Retry-After"


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
