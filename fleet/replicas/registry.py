"""The registry: keeps what the fleet believes of its replicas in line with what they say.

One step (`_look`) looks at replicas that are not busy inside a collective and hands all
observations to the pure rules of `membership.py` in one write. The endless loop around it is
trivial on purpose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from time import monotonic, time

import msgspec

from fleet.errors import Refused, StoreUnavailable, UnknownReplica
from fleet.facts.address import replica_id
from fleet.facts.options import FleetOptions, Placement
from fleet.facts.outcome import had_no_session
from fleet.facts.replica import Replica
from fleet.facts.state import UNSET_VERSION, FleetState
from fleet.ledger import Ledger
from fleet.replicas.fanout import FanOut
from fleet.replicas.probe import (
    explain_silence,
    glance,
    identify,
    same_instance,
    start_time,
)
from fleet.replicas.replica_client import Call, ReplicaClient
from fleet.replicas.restart import Restart
from fleet.rules.doubles import Boot, busy_with, claims, let_in, stands_for, told_apart
from fleet.rules.membership import (
    Observation,
    add_replica,
    adopt,
    in_collective,
    marked,
    observe,
    remove_replica,
)
from fleet.rules.wire import FINISH

log = logging.getLogger(__name__)

SETTLE_S = 4.0
"""How long to wait for survivors of a broken group: gloo lets go of them after about 2 s."""
SWEEP_S = 5.0
"""How long the first look at a replica may take: the gateway listens only after it."""
RELOOK_S = 1.0
"""How long a decision waits for one that counts as lost: it is there at once, or not at all."""
SLICES = 10
"""In how many parts a sweep is cut, so that probing hundreds of replicas is no burst."""


class _Look(Enum):
    """How much one look asks: alive and which version; the same boot; everything."""

    GLANCE = auto()
    CLOSELY = auto()
    WHOLLY = auto()


class Registry:
    """Probes replicas and writes what it sees into the ledger."""

    def __init__(
        self, ledger: Ledger, client: ReplicaClient, fan_out: FanOut, options: FleetOptions
    ) -> None:
        self._ledger = ledger
        self._client = client
        self._fan_out = fan_out
        self._options = options
        self._store_was_empty = not ledger.state.replicas and ledger.state.commit_index == 0
        self._looking: set[str] = set()
        self._silent_since: dict[str, float] = {}
        self._starts: dict[Boot, str] = {}
        self.swept = asyncio.Event()
        ledger.watch(self._forget_who_left)

    async def add(self, urls: Iterable[str]) -> list[str]:
        """Add replicas by URL and return their ids; they join once a probe has seen them."""
        known = {replica_id(url): url for url in urls}
        now = time()

        def change(state: FleetState) -> FleetState:
            for replica, url in known.items():
                state = add_replica(state, url, replica, now)
            return state

        await self._ledger.amend(change)
        return list(known)

    async def remove(self, replica: str) -> None:
        """Forget a replica; UnknownReplica if there is none."""
        self.find(replica)
        await self._ledger.amend(lambda state: remove_replica(state, replica))

    async def admit(self, url: str) -> str:
        """Add one replica after a close look at it, and return its id.

        Refused, with nothing changed, if the fleet has this server under another name.
        """
        replica, now = replica_id(url), time()
        there = self._ledger.state.replicas.get(replica)
        found = there or Replica(id=replica, url=url, joined_at=now, since=now)
        await self._look([found], _Look.CLOSELY, admitting=there is None)
        _refuse_double(self._ledger.state.replicas.get(replica))
        return replica

    def find(self, replica: str) -> Replica:
        """Return one replica's facts; UnknownReplica names those there are."""
        found = self._ledger.state.replicas.get(replica)
        if found is None:
            known = ", ".join(self._ledger.state.replicas) or "none"
            raise UnknownReplica(f"no replica {replica!r}; there are: {known}")
        return found

    async def restart(self, replica: str, hook: Restart) -> None:
        """Have a replica restarted; its facts follow from what the probes see then."""
        found = self.find(replica)
        now = time()
        await self._ledger.amend(lambda state: marked(state, [replica], restarted_at=now))
        log.warning("restart asked for", extra={"replica": replica})
        await hook.restart(found)

    async def run(self) -> None:
        """Look at every replica once per interval, for ever, in slices that spread the work."""
        while True:
            for part in _slices(list(self._ledger.state.replicas)):
                for names in self._apart(part):
                    self._looking.update(names)
                    self._fan_out.spawn(self._look_aside(names), name="probe")
                await asyncio.sleep(self._options.deadlines.probe_interval_s / SLICES)

    def _apart(self, part: list[str]) -> list[list[str]]:
        """Keep those that may not answer out of the way of the others; leave out who is looked at.

        A look is over when the slowest has answered, and a silent one takes its whole deadline.
        """
        known = self._ledger.state.replicas
        free = [r for r in part if r in known and r not in self._looking]
        alone = [[r] for r in free if not known[r].reachable]
        together = [r for r in free if known[r].reachable]
        return [*alone, together] if together else alone

    async def _look_aside(self, names: list[str]) -> None:
        try:
            await self._look_quietly(names)
        finally:
            self._looking.difference_update(names)

    async def suspect(self, replica: str) -> None:
        """Look at a replica that has just broken a connection; never raises."""
        await self._look_quietly([replica], _Look.CLOSELY)

    async def _look_quietly(self, replicas: Iterable[str], how: _Look = _Look.GLANCE) -> None:
        known = self._ledger.state.replicas
        try:
            await self._look([known[r] for r in replicas if r in known], how)
        except StoreUnavailable as error:
            log.warning("probes not written", extra={"error": error.message})
        except Exception:  # a bug in probing must not end the gateway that carries the rollouts
            log.exception("bug in probing")

    async def sweep(self) -> None:
        """Hold what the store says of each replica against the replica, once, before serving.

        Who sits in a collective is left to the probes. Who does not answer in time is looked at
        again aside; only then `swept` is set, and the gateway says that it is ready.
        """
        was_empty = self._store_was_empty
        late = await self._look(self._ledger.state.replicas.values(), _Look.WHOLLY)
        if was_empty:
            await self._close_forgotten_sessions()
        if late:
            self._fan_out.spawn(self._end_sweep(late), name="look at who was late")
        else:
            self.swept.set()

    async def _end_sweep(self, late: list[str]) -> None:
        await self._look_quietly(late)
        self.swept.set()

    async def _close_forgotten_sessions(self) -> None:
        """Fence who had an update open of which the store knows nothing: it may hold half of it.

        Only a finish tells: who has no session refuses it. Servers that nobody has updated or
        paused before are not asked.
        """
        known = [r for r in self._ledger.state.replicas.values() if r.may_join_group()]
        if not any(r.paused or r.version not in (None, UNSET_VERSION) for r in known):
            return
        finish = Call("POST", FINISH, fresh=True)
        attempts = {r.id: partial(self._client.call, r.url, finish) for r in known}
        outcomes = await self._fan_out.ask(attempts, self._options.deadlines.control_s)
        mixed = [r for r, outcome in outcomes.items() if not had_no_session(outcome)]
        if mixed:
            why = "an update was open here of which the store knows nothing"
            await self._ledger.amend(lambda s: marked(s, mixed, fence=why, holds=None))

    async def settle(self) -> None:
        """Give those a moment who only waited for the culprit of a failed collective.

        Without this, a trainer that inits again at once would get a group of the culprit alone.
        Who counts as lost is looked at again: it may only have dropped one connection. Nobody waits
        for those that have had their moment, or cannot come any more.
        """
        state = self._ledger.state
        await self._fan_out.settled(SETTLE_S, self._may_come, in_collective(state))
        known = self._ledger.state.replicas.values()
        lost = [r for r in known if r.lost and not r.leaving and not self._stays_silent(r)]
        if lost:
            await self._look(lost, _Look.WHOLLY)

    def _may_come(self, replica: str) -> bool:
        found = self._ledger.state.replicas.get(replica)
        return found is not None and found.lost is None

    async def verify(self, replicas: Iterable[str]) -> None:
        """Look closely at these replicas now, so that a decision rests on what is, not what was.

        Who is left out anyway because it is silent, and has been for long, is left to the probes.
        """
        known = self._ledger.state.replicas
        there = [known[r] for r in replicas if r in known]
        await self._look([r for r in there if not self._stays_silent(r)], _Look.CLOSELY)

    def _stays_silent(self, replica: Replica) -> bool:
        """Whether the fleet does without a replica whose silence has lasted longer than SETTLE_S.

        The probes see it come back: a call that hangs on it breaks when it is restarted.
        """
        since = self._silent_since.get(replica.id)
        return since is not None and not replica.reachable and monotonic() - since > SETTLE_S

    def _forget_who_left(self, state: FleetState) -> None:
        gone = self._silent_since.keys() - state.replicas.keys()
        for replica in gone:
            del self._silent_since[replica]
        self._fan_out.forget(lambda replica: replica not in state.replicas)
        instances = {r.id: r.instance for r in state.replicas.values()} if self._starts else {}
        over = [boot for boot in self._starts if instances.get(boot[0], boot[1]) != boot[1]]
        for boot in over:
            del self._starts[boot]

    async def _look(
        self, replicas: Iterable[Replica], how: _Look, *, admitting: bool = False
    ) -> list[str]:
        """Look at these replicas and write down what was seen; return who was not seen in time.

        `admitting` adds them first, and raises Refused if one is the server of another.
        """
        replicas = tuple(replicas)
        began = self._ledger.state
        busy = busy_with(began, self._fan_out.in_flight() | in_collective(began))
        before = {r.id: r for r in replicas if r.id not in busy}
        seen = await self._see(before, how)
        others = {r.id: r for r in stands_for(began, _moved(before, seen)) if r.id not in before}
        before |= others
        seen |= await self._see(others, _Look.CLOSELY)
        await self._read_starts(before, seen)
        now = time()
        is_first = self._store_was_empty and bool(seen)
        self._store_was_empty = self._store_was_empty and not is_first

        def change(state: FleetState) -> FleetState:
            for newcomer in replicas if admitting else ():
                state = add_replica(state, newcomer.url, newcomer.id, now)
            for replica, observation in seen.items():
                fresh = _less_what_has_changed(observation, before[replica], began, state)
                fresh = _less_honest_silence(fresh, replica, began, state)
                state = observe(state, replica, fresh, now)
            state = told_apart(let_in(state), self._starts)
            for newcomer in replicas if admitting else ():
                _refuse_double(state.replicas[newcomer.id])
            return adopt(state, now) if is_first else state

        after = await self._ledger.amend(change)
        for name, replica in before.items():
            _tell(replica, after.replicas.get(name))
        return [name for name in before if name not in seen]

    async def _see(self, replicas: Mapping[str, Replica], how: _Look) -> dict[str, Observation]:
        """Return what was seen of each, without those not seen in time."""
        looks = await self._fan_out.look(
            {name: partial(self._observe, replica, how) for name, replica in replicas.items()}
        )
        return {name: look for name, look in looks.items() if look is not None}

    async def _read_starts(
        self, before: Mapping[str, Replica], seen: Mapping[str, Observation]
    ) -> None:
        """Ask when their processes were started where two replicas tell one instance, once each.

        Before what was seen is written down, so that no server counts twice in between.
        """
        there = {r.id: r for r in self._ledger.state.replicas.values() if r.lost is None}
        known = {**before, **there}
        told = {name: r.instance for name, r in there.items() if r.same_as is None}
        told |= {name: look.instance for name, look in seen.items() if look.instance}
        asked = claims(told) - self._starts.keys()
        found = await self._fan_out.look(
            {name: partial(self._read_start, known[name].url) for name, _ in asked}
        )
        answered = ((boot, found[boot[0]]) for boot in asked)
        self._starts |= {boot: start for boot, start in answered if start is not None}

    async def _read_start(self, url: str) -> str | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(RELOOK_S):
                return await start_time(self._client, url)
        return None

    async def _observe(self, replica: Replica, how: _Look) -> Observation | None:
        limit_s = self._options.deadlines.probe_s
        is_first = how is _Look.WHOLLY
        first_s = min(limit_s, RELOOK_S if replica.lost else SWEEP_S)
        began = monotonic()
        try:
            async with asyncio.timeout(first_s if is_first else limit_s):
                seen = await self._ask(replica, how)
        except TimeoutError:
            self._silent_since.setdefault(replica.id, began)
            if is_first:
                return None
            return await explain_silence(self._client, replica.url, limit_s)
        self._silent_since.pop(replica.id, None)
        if replica.wedged and seen.lost is None and replica.id not in self._fan_out.in_flight():
            return msgspec.structs.replace(seen, unwedged=True)
        return seen

    async def _ask(self, replica: Replica, how: _Look) -> Observation:
        client, url = self._client, replica.url
        is_known = how is not _Look.WHOLLY and not _looks_new(replica)
        if is_known and how is _Look.CLOSELY and replica.instance:
            if await same_instance(client, url, replica.instance):
                return Observation()
        elif is_known and how is _Look.GLANCE:
            seen = await glance(client, url)
            if seen.lost is not None or seen.version == replica.version:
                return seen
        told = replica.origin.placement if replica.origin else None
        placement = self._options.placements.get(replica.id) or told or Placement()
        return await identify(client, url, placement)


def _slices(replicas: list[str]) -> list[list[str]]:
    """Cut the fleet into SLICES parts of about equal size, some of them empty if it is small."""
    return [replicas[part::SLICES] for part in range(SLICES)]


def _less_what_has_changed(
    seen: Observation, before: Replica, began: FleetState, state: FleetState
) -> Observation:
    """Leave out of an observation whether the replica rests if that was changed meanwhile.

    `before` are the facts, `began` the fleet when the probe went out: it may have looked just
    before a resume or a wake-up that has been written down since, and nothing would look again. A
    round that came and went leaves the facts as they were, though the probe saw its pause; with a
    newcomer it had nothing to do.
    """
    after = state.replicas.get(before.id)
    if after is None:
        return seen
    rests = (after.paused, after.sleep) == (before.paused, before.sleep)
    if rests and (not before.known or _rounds_of(began) == _rounds_of(state)):
        return seen
    return msgspec.structs.replace(seen, paused=None, asleep=False)


def _rounds_of(state: FleetState) -> object:
    """Return what every round and every pause of the trainer that begins or ends changes."""
    return state.next_round, state.phase, state.commit_index, state.resets, state.pause


def _less_honest_silence(
    seen: Observation, replica: str, began: FleetState, state: FleetState
) -> Observation:
    """Leave silence out of an observation if a collective has begun since the probe went out.

    Whichever gateway carries that: its members answer nothing else, and are not wedged for it.
    """
    moved = (state.generation, state.phase, _updates(state)) != (
        began.generation,
        began.phase,
        _updates(began),
    )
    is_excused = seen.silent is not None and moved and replica in state.member_ids
    return Observation() if is_excused else seen


def _updates(state: FleetState) -> int:
    return state.round.updates if state.round else 0


def _moved(before: Mapping[str, Replica], seen: Mapping[str, Observation]) -> list[str]:
    """Return who tells another instance than before."""
    return [r for r, look in seen.items() if look.instance not in (None, before[r].instance)]


def _refuse_double(replica: Replica | None) -> None:
    if replica is not None and replica.same_as is not None:
        raise Refused(
            f"{replica.id} is the same server as {replica.same_as}, which is in the fleet",
            hint="nothing was changed: a server counts once, under the name that was there first",
        )


def _looks_new(replica: Replica) -> bool:
    return not replica.known or replica.lost is not None or replica.wedged is not None


def _tell(before: Replica, after: Replica | None) -> None:
    """Log what a probe changed: who came, went, came back or can never be a member."""
    if after is None or before == after:
        return
    for fact in ("lost", "wedged", "refusal"):
        was, now = getattr(before, fact), getattr(after, fact)
        if was != now:
            level = logging.WARNING if now else logging.INFO
            log.log(level, "replica", extra={"replica": after.id, fact: now or "no more"})
    if before.instance != after.instance:
        told = "restarted" if before.instance else "joined"
        log.info("replica", extra={"replica": after.id, "event": told, "instance": after.instance})
