"""Which tensors a round announced, and so whether it was a full update.

Only a full update lifts a fence or admits a stale replica. A round is full if the names it
announced cover those of the fullest round so far of this model; empty metadata stands for the
previous round's of the same generation. A sparse backend is never full.

The names live in the store, one set per round, so that any gateway can finish a round.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleet.state import FleetState, Group
from fleet.store import Store
from fleet.wire import SPARSE_BACKENDS

KEPT_S = 30 * 24 * 3600.0
"""How long a set of names stays known after the last commit that rests on it."""


def key_of(generation: int, round_id: int) -> str:
    """Return the store key of the names that one round announced."""
    return f"names:{generation}:{round_id}"


def covers(announced: Iterable[str], fullest: Iterable[str]) -> bool:
    """Whether a round that announced these names is as full as the fullest one so far."""
    return set(fullest) <= set(announced)


async def announce(store: Store, state: FleetState, names: Iterable[str]) -> None:
    """Remember names that the open round has announced."""
    if state.round is not None:
        await store.add_members(key_of(state.generation, state.round.id), names, KEPT_S)


async def judge_round(store: Store, state: FleetState) -> tuple[bool, str | None]:
    """Return whether the open round is full, and the key of the names that it rests on."""
    group, current = state.group, state.round
    if group is None or current is None or group.backend in SPARSE_BACKENDS or not current.updates:
        return False, None
    announced, key = await _rests_on(store, group, current.id)
    fullest = await store.members(state.fullest) if state.fullest else frozenset[str]()
    full = covers(announced, fullest)
    if full and announced and key:
        await store.add_members(key, announced, KEPT_S)
    return full, key if full and announced else None


async def _rests_on(store: Store, group: Group, round_id: int) -> tuple[frozenset[str], str | None]:
    key = key_of(group.generation, round_id)
    announced = await store.members(key)
    if announced or group.announced_in is None:
        return announced, key
    before = key_of(group.generation, group.announced_in)
    return await store.members(before), before
