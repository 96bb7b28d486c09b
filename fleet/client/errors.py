"""What went wrong, on the trainer's side of the wire: the fleet's own tree, with facts of the call.

Every class of `fleet/errors.py` has a twin of the same name here, which is a subclass of it, so
`except MembershipChanged` means the same on both sides. Two more know of connections:

    FleetError
    ├── … as in fleet/errors.py, each with `status`, `type`, `outcomes` and `hint`
    ├── Unauthenticated, Forbidden   the token is missing, unknown, or opens less than this
    ├── Unreachable                  no connection: nothing was sent, the call may be repeated
    └── AnswerLost                   sent, but no answer came: whether it had an effect is unknown

An error that none of these fits (a proxy's own 502, a model server's 404) is a bare FleetError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet import errors
from fleet.facts.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Told:
    """What an answer said besides its message: the call, HTTP's part, and the fleet's.

    `retry_after_s` is None unless the answer invites to a retry of the very same call.
    """

    call: str = ""
    status: int | None = None
    type: str = ""
    hint: str | None = None
    outcomes: Mapping[str, Outcome] = field(default_factory=dict[str, Outcome])
    retry_after_s: float | None = None


class FleetError(errors.FleetError):
    """A call failed; `outcomes` has what each replica made of it, `hint` what to do next.

    `status` is None if there was no answer, `type` the gateway's name for the error.
    """

    def __init__(self, message: str = "", told: Told = Told()) -> None:
        super().__init__(message, hint=told.hint, outcomes=told.outcomes)
        self.call = told.call
        self.status = told.status
        self.type = told.type or type(self).__name__
        if told.retry_after_s is not None:
            self.retry_after_s = told.retry_after_s

    @property
    def world_size(self) -> int | None:
        """The world size that the next init must ask for, if the answer names one.

        It counts the trainer's ranks and all workers, also of those that
        should answer again any moment, and was true when the call failed.
        """
        found = _WORLD_SIZE.search(f"{self.hint or ''} {self.message}")
        return int(found.group(1)) if found else None

    def __str__(self) -> str:
        where = f"{self.call}: " if self.call else ""
        status = f"{self.status} " if self.status is not None else ""
        hint = f" (next: {self.hint})" if self.hint else ""
        return f"{where}{status}{self.type}: {self.message}{hint}"


class BadInput(FleetError, errors.BadInput):
    """The request is malformed; nothing was sent to any replica."""


class BodyTooLarge(BadInput, errors.BodyTooLarge):
    """The request body is over the gateway's limit; nothing was sent to any replica."""


class NotAllowed(FleetError, errors.NotAllowed):
    """The request is well formed, but an operator has not opened this door."""


class Unauthenticated(FleetError):
    """The call carries no token that the gateway knows."""


class Forbidden(FleetError):
    """The call carries a known token of a lower right, or no token could open this route."""


class UnknownReplica(FleetError, errors.UnknownReplica):
    """No replica of the fleet has this id."""


class Refused(FleetError, errors.Refused):
    """The fleet is not in a state in which this call can be carried out; nothing was sent."""


class WrongPhase(Refused, errors.WrongPhase):
    """The call does not follow from the fleet's phase."""


class RoundOpen(Refused, errors.RoundOpen):
    """Another trainer holds an open round."""


class MembershipChanged(Refused, errors.MembershipChanged):
    """A member of the group was lost or restarted since init: re-init with `world_size`."""


class WorldSizeMismatch(Refused, errors.WorldSizeMismatch):
    """The init's world_size is not the trainer's ranks plus all workers: `world_size` is."""


class LayoutUnsupported(Refused, errors.LayoutUnsupported):
    """This backend or topology cannot be laid out over these replicas."""


class MemberFailed(FleetError, errors.MemberFailed):
    """A member failed a phase; `outcomes` says which one and how."""


class DeadlinePassed(FleetError, errors.DeadlinePassed):
    """A member did not answer a phase within its deadline."""


class Unavailable(FleetError, errors.Unavailable):
    """Nothing has happened; the call may be repeated as it is after `retry_after_s` seconds."""


class PauseNotReached(Unavailable, errors.PauseNotReached):
    """Not every replica paused; those that did were resumed."""


class NoEligibleReplica(Unavailable, errors.NoEligibleReplica):
    """No replica may serve this rollout now."""


class GateOverflow(Unavailable, errors.GateOverflow):
    """The gate is closed and holds as much as it may."""


class StoreUnavailable(Unavailable, errors.StoreUnavailable):
    """The gateway's store did not answer."""


class LeaseLost(StoreUnavailable, errors.LeaseLost):
    """The gateway that was asked may not act for the fleet just now; another one may."""


class Unreachable(FleetError):
    """No connection to the gateway came about, so nothing was sent; it may be repeated."""

    retry_after_s: float = 1.0


class AnswerLost(FleetError):
    """The call was sent, and no answer came: nobody here knows whether it had an effect.

    Do not repeat it blindly. GET /fleet says what phase the fleet is in.
    """


_WORLD_SIZE = re.compile(r"world_size=(\d+)")


def _family(kind: type[FleetError]) -> list[type[FleetError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _family(child))]


BY_NAME: dict[str, type[FleetError]] = {kind.__name__: kind for kind in _family(FleetError)}
"""From the `type` of an answer to its class here."""

BY_STATUS: dict[int, type[FleetError]] = {
    400: BadInput,
    401: Unauthenticated,
    403: NotAllowed,
    404: UnknownReplica,
    409: Refused,
    424: MemberFailed,
    503: Unavailable,
    504: DeadlinePassed,
}
"""What an error means whose `type` only a later gateway knows."""
