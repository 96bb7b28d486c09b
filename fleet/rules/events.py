"""What can happen to a weight update (events) and what must then be done (actions).

Values only. `rounds.py` holds the table and the rules that turn one into the other; the
coordinator turns actions back into events.
"""

from __future__ import annotations

import msgspec

from fleet.facts.calls import Holder
from fleet.facts.outcome import Outcome
from fleet.facts.state import Group, Round

# ---- events ------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened; `now` is in seconds since the epoch."""

    now: float


class Requested(Event, frozen=True, kw_only=True):
    """A call that moves the round; `holder` is the call and the gateway that carries it.

    `planned_on` is the generation that it was planned on: it does not fit another one.
    """

    holder: Holder | None = None
    planned_on: int | None = None


class InitRequested(Requested, frozen=True, kw_only=True):
    """A trainer wants a group; `group` is already laid out and checked."""

    group: Group


class StartRequested(Requested, frozen=True, kw_only=True):
    """A trainer opens a weight update. `auto_pause` is False with FLEET_PAUSE_ON_UPDATE=off."""

    by: str
    draft: bool = False
    auto_pause: bool = True


class UpdateRequested(Requested, frozen=True, kw_only=True):
    """A trainer sends weights; `announces` says that the body names tensors."""

    announces: bool = False


class FinishRequested(Requested, frozen=True, kw_only=True):
    """A trainer closes the update; `version` is its own label, `full` what the names cover.

    `names_key` is where the store keeps the names that the round rests on, if it is full; `round`
    is the id of the round for which that was found out.
    """

    round: int | None = None

    full: bool
    names_key: str | None = None
    version: str | None = None
    auto_version: bool = True


class CommitRequested(Requested, frozen=True, kw_only=True):
    """An operator commits a failed finish for those that completed it; `round` is its id."""

    by: str
    round: int


class ShutdownRequested(Requested, frozen=True, kw_only=True):
    """A trainer gives its group back."""


class HolderLost(Requested, frozen=True, kw_only=True):
    """The gateway that carried a call is gone; `holder` carries on what can be carried on.

    `lost` is the token of the call that it carried, `why` what happened to it.
    """

    why: str
    lost: str | None = None


class ResetRequested(Event, frozen=True, kw_only=True):
    """An operator abandons whatever is open; `silent` are members whose calls are in flight.

    `new_model` forgets which tensors a full update has, so that the next round sets that anew.
    """

    by: str
    silent: tuple[str, ...] = ()
    new_model: bool = False


class Answered(Event, frozen=True, kw_only=True):
    """A fan-out is over: one outcome per replica, `elapsed_s` of wall time.

    `token` is that of the call which it belongs to: another call's answers change nothing.
    """

    outcomes: dict[str, Outcome]
    elapsed_s: float = 0.0
    token: str | None = None


class InitArrived(Answered, frozen=True, kw_only=True):
    """Every member has joined the group."""


class InitFailed(Answered, frozen=True, kw_only=True):
    """Some member has not joined the group."""


class PauseArrived(Answered, frozen=True, kw_only=True):
    """Every member that had to be paused is paused."""


class PauseFailed(Answered, frozen=True, kw_only=True):
    """Some member did not pause."""


class StartArrived(Answered, frozen=True, kw_only=True):
    """Every member has an open session."""


class StartFailed(Answered, frozen=True, kw_only=True):
    """Some member refused to open a session."""


class Undone(Answered, frozen=True, kw_only=True):
    """What a refused pause or start had done is taken back; `closed` ended their sessions."""

    closed: tuple[str, ...] = ()


class UpdateArrived(Answered, frozen=True, kw_only=True):
    """Every member has loaded what was sent."""


class UpdateFailed(Answered, frozen=True, kw_only=True):
    """Some member has not loaded what was sent: nobody knows who holds what."""


class FinishArrived(Answered, frozen=True, kw_only=True):
    """Every member has arrived at the barrier: the version commits."""


class FinishFailed(Answered, frozen=True, kw_only=True):
    """Some member did not arrive at the barrier: nothing commits."""


class Resumed(Answered, frozen=True, kw_only=True):
    """The round's own pause is lifted (or was not there); `cleared` says that no cache is old."""

    cleared: bool = True


# ---- actions -----------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something the coordinator must do; actions of one step are carried out in order."""

    targets: tuple[str, ...] = ()


class Archive(Action, frozen=True, kw_only=True):
    """Keep the record of a round that is over."""

    round: Round


class CloseSessions(Action, frozen=True, kw_only=True):
    """Send a bare finish where a session may still be open; a 500 is fine.

    `wait` says that the next action needs them closed; otherwise nobody waits for it.
    """

    wait: bool


class SendInit(Action, frozen=True, kw_only=True):
    """Let every member join the group, all at once."""


class SendPause(Action, frozen=True, kw_only=True):
    """Close the gate, then pause these members (none: only wait for rollouts to leave)."""


class SendStart(Action, frozen=True, kw_only=True):
    """Open a session on every member."""

    draft: bool


class SendUndo(Action, frozen=True, kw_only=True):
    """Close the sessions of `targets` again, then resume `resume`."""

    resume: tuple[str, ...]


class SendUpdate(Action, frozen=True, kw_only=True):
    """Send the trainer's bytes to every member, all at once."""


class SendFinish(Action, frozen=True, kw_only=True):
    """Close every session, labelled with `version` if there is one."""

    version: str | None


class SendResume(Action, frozen=True, kw_only=True):
    """Reset the prefix caches of the members if asked, then resume `targets`."""

    reset_caches: bool


class Unpause(Action, frozen=True, kw_only=True):
    """Resume `targets` outside of any round, after a bare finish for `close`.

    Whose session may still be open then is not resumed.
    """

    close: tuple[str, ...] = ()


class SendShutdown(Action, frozen=True, kw_only=True):
    """Let the members leave the group."""
