"""Pauses and sleeps by the trainer: what is known while a call is on its way, and what after it.

A sleep is written down before it is sent, the loss of the weights at level 2 included, and taken
back only where a server says for certain that it does not sleep: a gateway may die, and a store be
away, at every moment in between. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from fleet.facts.replica import Replica, Sleep
from fleet.facts.state import ROUND_OPEN, FleetState
from fleet.rules.parts import changed

change = msgspec.structs.replace

DISCARDED = "sleep level 2 discarded its weights"
"""Why only a full update makes such a server eligible again."""


def clears(state: FleetState, *, clear_cache: bool) -> bool:
    """Whether the caches are clear after a pause: who is paused in a round is not paused again."""
    if state.phase not in ROUND_OPEN:
        return clear_cache
    cleared_before = state.pause.clear_cache if state.pause else True  # the round's own pause does
    someone_runs = any(not replica.paused for replica in state.members())
    return cleared_before and (clear_cache or not someone_runs)


def paused(state: FleetState, ids: Iterable[str], *, cleared: bool) -> FleetState:
    """Return the state with these replicas paused, their caches `cleared` or not."""
    state = changed(state, ids, paused=True)
    return change(state, kv="current") if cleared and state.phase not in ROUND_OPEN else state


def runs_on(replica: Replica, mode: str) -> bool:
    """Whether a pause or sleep in this mode would first let a frozen replica run on.

    vLLM's mode ``wait`` lets what was kept go on to its end (v1/engine/core.py, 0.32).
    """
    return mode == "wait" and replica.frozen


def laid_down(state: FleetState, ids: Iterable[str], sleep: Sleep) -> FleetState:
    """Return the state with these replicas asleep; at level 2 nobody knows their weights."""
    replicas = (_laid_down(state.replicas[r], sleep) for r in ids if r in state.replicas)
    return state.with_replicas(replicas)


def got_up(state: FleetState, before: Iterable[Replica], sleep: Sleep) -> FleetState:
    """Return the state with these replicas as they were `before` a sleep that never began."""
    pairs = [(state.replicas[b.id], b) for b in before if b.id in state.replicas]
    return state.with_replicas(
        change(now, sleep=was.sleep, fence=was.fence, holds=was.holds)
        for now, was in pairs
        if now.sleep == sleep and now.instance == was.instance
    )


def asleep_again(state: FleetState, ids: Iterable[str], sleep: Sleep) -> FleetState:
    """Return the state with these replicas asleep although a wake-up has overtaken their sleep.

    Which of the two a server did last nobody knows, so it counts as what keeps it safe.
    """
    found = (state.replicas[r] for r in ids if r in state.replicas)
    return state.with_replicas(_laid_down(r, sleep) for r in found if r.sleep is None)


def wakes_wholly(sleep: Sleep | None, tags: tuple[str, ...]) -> bool:
    """Whether waking these parts (none: all) ends a sleep, and so sets the engine going."""
    return sleep is not None and _with_awake(sleep, tags).whole


def woken(
    state: FleetState,
    answers: Mapping[str, Any],
    tags: tuple[str, ...],
    asked: Mapping[str, Sleep | None],
) -> FleetState:
    """Return the state after these answers to a wake-up of sleepers as they were when `asked`.

    Who has been put to sleep anew since then sleeps on.
    """
    known = [(state.replicas[r], answer) for r, answer in answers.items() if r in state.replicas]
    same = [(r, answer) for r, answer in known if _at(r.sleep) == _at(asked.get(r.id))]
    return state.with_replicas(_wake(replica, answer, tags) for replica, answer in same)


def _laid_down(replica: Replica, sleep: Sleep) -> Replica:
    if sleep.level < 2:
        return change(replica, sleep=sleep)
    return change(replica, sleep=sleep, fence=replica.fence or DISCARDED, holds=None)


def _at(sleep: Sleep | None) -> float | None:
    return None if sleep is None else sleep.at


def _wake(replica: Replica, answer: Any, tags: tuple[str, ...]) -> Replica:
    """Believe a server that says whether it is awake; older ones do not, so the tags decide."""
    sleep = replica.sleep or Sleep(level=1)
    sleep = _with_awake(sleep, tags)
    said = cast("dict[str, Any]", answer).get("status") if isinstance(answer, dict) else None
    awake = sleep.whole if said is None else said == "awake"
    if awake:
        return change(replica, sleep=None, paused=False)
    return change(replica, sleep=sleep)


def _with_awake(sleep: Sleep, tags: tuple[str, ...]) -> Sleep:
    parts = (*sleep.awake, *(tags or ("weights", "kv_cache")))
    return change(sleep, awake=tuple(dict.fromkeys(parts)))


def why_unread(replica: Replica) -> str:
    """Return why a call must not touch a replica's weights, empty if it may.

    From sleep level 1 on they are not in the GPU's memory, and an engine that reaches for them dies
    (vllm/device_allocator/cumem.py: sleep, 0.33). Level 0 leaves them where they are.
    """
    sleep = replica.sleep
    if sleep is None or sleep.level == 0 or "weights" in sleep.awake:
        return ""
    return f"its weights are asleep (level {sleep.level})"
