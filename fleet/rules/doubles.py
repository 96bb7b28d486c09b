"""One server under two names counts once. Pure.

A list and a discovery source, or two spellings of a host, can name one server twice. Counted twice
it would get two places in a group, whose init then waits for ranks that nobody takes. So a replica
that turns out to be the server of another one (`Replica.same_as`) takes no part in anything.

The proof is one instance and one start of the process, both. An instance alone may be five hex
digits (vllm/config/vllm.py: random_uuid()[:5]; the time in nanoseconds in 0.32 and 0.33), so that
among hundreds of servers two share one; a start alone is told in hundredths of a second, in which
many pods start. The servers of one data-parallel deployment share neither: each is a process that
makes its own config (vllm/entrypoints/launchers/dp_supervisor.py, 0.33). A server that tells no
instance, or no start in /metrics, as with several API servers behind one port, proves nothing.

Who stays is a member of the current group, else who was there first. It is judged once, in the
state that all gateways share, and holds until either of the two changes: who was left out is then
a newcomer, and is looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from fleet.facts.replica import Naming, Replica, naming_of
from fleet.facts.state import FleetState

change = msgspec.structs.replace

Boot = tuple[str, str]
"""A replica's id, and the instance that it has told."""


def claims(told: Mapping[str, str | None]) -> set[Boot]:
    """Return the boots whose instance more than one replica tells; `told` is instances by id."""
    by_instance: dict[str, list[str]] = {}
    for replica, instance in told.items():
        if instance is not None and naming_of(instance) is Naming.BY_ITSELF:
            by_instance.setdefault(instance, []).append(replica)
    shared = (item for item in by_instance.items() if len(item[1]) > 1)
    return {(replica, instance) for instance, replicas in shared for replica in replicas}


def told_apart(state: FleetState, starts: Mapping[Boot, str]) -> FleetState:
    """Return the state in which every server counts once; `starts` are those of the processes.

    A start that is empty or unknown proves nothing. The same state if there is nothing new.
    """
    counted = [r for r in state.replicas.values() if r.same_as is None]
    by_server: dict[tuple[str, str], list[Replica]] = {}
    for replica in counted:
        start = starts.get((replica.id, replica.instance or ""))
        if start and replica.instance:
            by_server.setdefault((replica.instance, start), []).append(replica)
    members = set(state.member_ids)
    for found in by_server.values():
        first, *others = sorted(found, key=lambda r: r.id not in members)
        doubles = (change(r, same_as=first.id, holds=None, wedged=None) for r in others)
        state = state.with_replicas(doubles)
    return state


def let_in(state: FleetState) -> FleetState:
    """Return the state in which who is no double any more is a newcomer, not probed yet.

    Its own fence or open session stays; what the other one leaves behind, it is given back when it
    is looked at (departed.py).
    """
    free = [r for r in state.replicas.values() if r.same_as and not _is_double(state, r)]
    return state.with_replicas(
        change(r, same_as=None, topology=None, instance=None, holds=None) for r in free
    )


def is_doubled(state: FleetState, replica: str) -> bool:
    """Whether somebody else is left out for being this replica's server."""
    return any(r.same_as == replica for r in state.replicas.values())


def stands_for(state: FleetState, doubles: Iterable[str]) -> list[Replica]:
    """Return who stands for these: where they have another boot, it may have that as well."""
    known = (state.replicas.get(r) for r in doubles)
    firsts = (state.replicas.get(r.same_as) for r in known if r is not None and r.same_as)
    return [first for first in firsts if first is not None]


def busy_with(state: FleetState, busy: Iterable[str]) -> frozenset[str]:
    """Return who cannot answer because these cannot: they, and their servers' other names."""
    busy = frozenset(busy)
    return busy | {r.id for r in state.replicas.values() if r.same_as in busy}


def _is_double(state: FleetState, replica: Replica) -> bool:
    other = state.replicas.get(replica.same_as or "")
    return other is not None and other.same_as is None and other.instance == replica.instance
