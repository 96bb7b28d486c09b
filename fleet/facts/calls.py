"""Whose call holds the fleet, and what became of the last one. Pure values and two decisions.

Several gateways share one fleet, so "a call is on its way" is written into the fleet's state: by
whom, for which request, with a token that fences everyone else's answers off. When it is over, the
state keeps its story, so that a retry of it gets the real result at any gateway, also at one that
never saw the call (`earlier`). And when its gateway is gone, another one takes the call over
(rounds.py: HolderLost).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from fleet.facts.outcome import Outcome


class CallId(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What tells a control call from another: path, query and a digest of the body as one name.

    An empty name is never the same as another one. `key` is the caller's Idempotency-Key, `by` who
    it is, as far as a connection tells.
    """

    by: str
    name: str = ""
    key: str | None = None

    def repeats(self, other: CallId) -> bool:
        """Whether this is the same request once more."""
        return bool(self.name) and self.name == other.name


class Past(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a call: whom it went wrong on (the others were fine), and how long it took.

    `why` is set if the event is not a fan-out but the loss of the gateway that carried the call.
    """

    event: str
    asked: tuple[str, ...] = ()
    bad: dict[str, Outcome] = {}
    elapsed_s: float = 0.0
    why: str | None = None


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The one control call that may move the round now, and the gateway that carries it.

    `token` is the fencing token: answers that bring another one change nothing. `after` is that
    of the last call that was over when this one was found to be new.
    """

    gateway: str
    token: str
    what: str
    call: CallId
    since: float
    story: tuple[Past, ...] = ()
    after: str | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The last call that held the fleet, with its whole story.

    `undelivered` says that every caller had left before the answer could be handed over.
    """

    holder: Holder
    at: float
    undelivered: bool = False

    @property
    def was_lost(self) -> bool:
        """Whether the gateway that carried it died on the way."""
        return any(past.why is not None for past in self.holder.story)


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway that serves this fleet: where it listens and since when."""

    where: str
    since: float


class Meeting(StrEnum):
    """How a call meets an earlier one."""

    NONE = "none"
    ON_ITS_WAY = "on its way"
    ANSWERED = "answered"
    IN_DOUBT = "in doubt"


def is_overtaken(holder: Holder, ended: Ended | None) -> bool:
    """Whether an equal call was carried out between the look for one and this call's own turn.

    Then both were on their way at once, so this one is a repetition and must not be sent again.
    """
    if ended is None or ended.holder.token == holder.after:
        return False
    return holder.call.repeats(ended.holder.call)


KEPT_S = 600.0
"""For how long after its end a call may be met by a retry."""

SAFE_TO_REPLAY = frozenset({"start", "finish"})
"""Calls whose repetition is never a new piece of work: a second one right after is out of phase."""


def earlier(
    call: CallId,
    holder: Holder | None,
    ended: Ended | None,
    *,
    me: str,
    alive: Iterable[str],
    now: float,
) -> Meeting:
    """Tell whether this call repeats one that another gateway carries or has carried.

    `me` and `alive` are ids of gateways. What this gateway has carried itself is met before it
    comes here (gateway/single_flight.py), so only an Idempotency-Key counts for that. A live
    gateway says whether an answer was delivered; of a dead one nobody knows: a start or finish is
    then answered as it was, an init or update is in doubt, since an equal one may be meant anew.
    """
    if holder is not None:
        on_its_way = call.repeats(holder.call) and holder.gateway != me
        return Meeting.ON_ITS_WAY if on_its_way else Meeting.NONE
    if ended is None or not call.repeats(ended.holder.call) or now - ended.at > KEPT_S:
        return Meeting.NONE
    if call.key is not None and call.key == ended.holder.call.key:
        return Meeting.ANSWERED
    if ended.undelivered:
        return Meeting.ANSWERED
    if ended.holder.gateway == me or ended.holder.gateway in alive:
        return Meeting.NONE
    return Meeting.ANSWERED if ended.holder.what in SAFE_TO_REPLAY else Meeting.IN_DOUBT
