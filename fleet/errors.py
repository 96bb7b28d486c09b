"""Everything that can go wrong with a fleet, as one tree of facts.

    FleetError
    ├── BadInput              the caller's words are wrong; nothing was sent
    │   └── BodyTooLarge
    ├── NotAllowed            right words, but this door is shut
    ├── UnknownReplica
    ├── Refused               the words are right, the moment or the number is not
    │   ├── WrongPhase
    │   ├── RoundOpen
    │   ├── MembershipChanged
    │   ├── WorldSizeMismatch
    │   └── LayoutUnsupported
    ├── MemberFailed          at least one replica said no; `outcomes` has every replica
    ├── DeadlinePassed        at least one replica said nothing in time
    └── Unavailable           may be retried as it is, after `retry_after_s`
        ├── PauseNotReached
        ├── NoEligibleReplica
        ├── GateOverflow
        └── StoreUnavailable
            └── LeaseLost     this gateway may not act for the fleet any more

The tree carries no HTTP: `gateway/errors.py` owns the one table from class to status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet.facts.outcome import Outcome


class FleetError(Exception):
    """Base of the tree; `hint` says what to do next, `outcomes` what each replica answered."""

    def __init__(
        self,
        message: str = "",
        *,
        hint: str | None = None,
        outcomes: Mapping[str, Outcome] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.outcomes: dict[str, Outcome] = dict(outcomes or {})


class BadInput(FleetError):
    """The request is malformed; nothing was sent to any replica."""


class BodyTooLarge(BadInput):
    """The request body is over its limit; nothing was sent to any replica."""


class NotAllowed(FleetError):
    """The request is well formed, but an operator has not opened this door."""


class UnknownReplica(FleetError):
    """No replica of the fleet has this id."""


class Refused(FleetError):
    """The fleet is not in a state in which this call can be carried out; nothing was sent."""


class WrongPhase(Refused):
    """The call does not follow from the fleet's phase."""


class RoundOpen(Refused):
    """Another trainer holds an open round."""


class MembershipChanged(Refused):
    """A member of the group was lost or restarted since init."""


class WorldSizeMismatch(Refused):
    """The trainer's world_size is not the trainer's ranks plus all workers."""


class LayoutUnsupported(Refused):
    """This backend or topology cannot be laid out over these replicas."""


class MemberFailed(FleetError):
    """A member failed a phase."""


class DeadlinePassed(FleetError):
    """A member did not answer a phase within its deadline."""


class Unavailable(FleetError):
    """The call may be retried as it is after `retry_after_s` seconds."""

    retry_after_s: float = 1.0


class PauseNotReached(Unavailable):
    """Not every replica paused; those that did were resumed."""


class NoEligibleReplica(Unavailable):
    """No replica may serve this rollout now."""


class GateOverflow(Unavailable):
    """The gate is closed and holds as much as it may."""


class StoreUnavailable(Unavailable):
    """The store did not answer."""


class LeaseLost(StoreUnavailable):
    """This gateway has not renewed its lease in time, so it may not act for the fleet."""
