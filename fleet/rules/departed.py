"""What leaves with a replica and comes back with it. Pure.

Weights are in a process, not in a line of a list. Who is removed and added again, or flaps in what
discovery lists, may be the same boot with the same half an update in it; and before the first
commit a newcomer is ready at once. So the fleet remembers what a boot has left with, and whoever
joins as that boot is given it back: the fence with its reason, an open session, a sleep. Only a
restart forgets: the server tells another instance. Where two instances cannot be compared, because
one was never told, or not in the same words, the address speaks for the boot, but not for weights:
those count only if the server names the committed version.

It is remembered until the next commit. After that whoever joins is stale until a full update, which
heals the fenced as well. A session that is open then is found by the start that it refuses, and
that start is undone.
"""

from __future__ import annotations

import msgspec

from fleet.facts.replica import Naming, Replica, naming_of
from fleet.facts.state import IN_SESSION, ROUND_OPEN, UNSET_VERSION, FleetState
from fleet.rules.parts import name_of

change = msgspec.structs.replace

KEPT = 2048
"""How many are remembered: a whole large fleet may flap at once. The oldest go first."""


def remember(state: FleetState, gone: Replica) -> FleetState:
    """Return the state that knows what this replica leaves with; nothing, if it leaves whole."""
    key = f"{gone.instance} at {gone.id}"
    departed = {k: past for k, past in state.departed.items() if k != key}
    past = _past(state, gone)
    if past is not None:
        departed[key] = past
    return change(state, departed=dict([*departed.items()][-KEPT:]))


def recall(state: FleetState, found: Replica, *, paused: bool | None) -> Replica:
    """Return a replica that was just seen for the first time, with what it had left with.

    `paused` is what the look saw, None if it could not tell: then it rests as it did.
    """
    same = [past for past in state.departed.values() if _is_same(past, found)]
    past = max(same, key=lambda past: past.fence is not None, default=None)
    if past is None:
        return found
    is_awake = paused is False and found.sleep is None
    return change(
        found,
        fence=found.fence or past.fence,
        holds=past.holds if _holds_still(state, past, found) else None,
        session_open=found.session_open or past.session_open,
        paused=past.paused if paused is None else found.paused,
        sleep=None if is_awake else past.sleep or found.sleep,
    )


def _past(state: FleetState, gone: Replica) -> Replica | None:
    """Return the facts that are true of this boot wherever it is listed, if there are any."""
    is_member = gone.id in state.member_ids
    in_session = gone.session_open or (is_member and state.phase in IN_SESSION)
    was_paused = is_member and gone.paused and state.phase in ROUND_OPEN
    fence = gone.fence
    if fence is None and in_session:
        fence = f"left the fleet inside {name_of(state)}: nobody knows what it holds"
    if fence is None and gone.sleep is not None and gone.sleep.level == 2:
        fence = "left the fleet at sleep level 2, which discards weights"
    if fence is None and gone.sleep is None and not was_paused:
        return None
    return Replica(
        id=gone.id,
        url=gone.url,
        instance=gone.instance,
        holds=gone.holds,
        fence=fence,
        paused=was_paused,
        sleep=gone.sleep,
        session_open=gone.session_open,
    )


def _is_same(past: Replica, found: Replica) -> bool:
    if _are_comparable(past, found):
        return past.instance == found.instance
    return past.id == found.id


def _holds_still(state: FleetState, past: Replica, found: Replica) -> bool:
    """Whether what the boot held is proven of who came back: its address alone proves no weights.

    Then it must name the committed version itself; before the first commit there is none to miss.
    """
    names_it = found.version == state.weight_version and found.version not in (None, UNSET_VERSION)
    return state.commit_index == 0 or names_it or _are_comparable(past, found)


def _are_comparable(past: Replica, found: Replica) -> bool:
    told, tells = naming_of(past.instance), naming_of(found.instance)
    return told is tells and told in (Naming.BY_START, Naming.BY_ITSELF)
