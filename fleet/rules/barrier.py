"""The barrier: a phase is over when every member has arrived, and failed when one cannot.

Pure and small on purpose: this is the one place that decides whether a fleet may move on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from fleet.facts.outcome import Outcome, Result


class Barrier(msgspec.Struct, frozen=True):
    """Who is awaited and who has arrived; arrivals of strangers do not count."""

    members: frozenset[str]
    arrived: frozenset[str] = frozenset()

    def arrive(self, replicas: Iterable[str]) -> Barrier:
        """Return the barrier after these replicas arrived; arriving twice counts once."""
        return Barrier(self.members, self.arrived | (self.members & frozenset(replicas)))

    @property
    def missing(self) -> frozenset[str]:
        """The members that have not arrived."""
        return self.members - self.arrived

    @property
    def complete(self) -> bool:
        """Whether every member has arrived; a barrier nobody is awaited at never completes."""
        return bool(self.members) and not self.missing


def arrivals(members: Iterable[str], outcomes: Mapping[str, Outcome]) -> Barrier:
    """Return the barrier of `members` after one fan-out's outcomes."""
    reached = (replica for replica, outcome in outcomes.items() if outcome.ok)
    return Barrier(frozenset(members)).arrive(reached)


def only_deadlines_passed(outcomes: Mapping[str, Outcome]) -> bool:
    """Whether silence, and nothing but silence, kept the barrier closed."""
    bad = [o.outcome for o in outcomes.values() if o.bad]
    return bool(bad) and all(o in (Result.TIMEOUT, Result.WEDGED) for o in bad)
