"""What the servers behind a fleet really do: the half of the truth that the fleet cannot see.

An engine knows its session, its pause and its weights for certain; the fleet only hears answers,
some of which are lost. The machine in test_rounds_machine.py holds the one against the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleet.facts.outcome import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Callable

Weights = tuple[int, ...]
"""Which rounds made these weights: a full round replaces all before it."""

MIXED: Weights = (-1,)
OK = Outcome(outcome=Result.OK, status=200)
NO = Outcome(outcome=Result.FAILED, status=500, detail="no")
SILENT = Outcome(outcome=Result.TIMEOUT, detail="no answer")
GONE = Outcome(outcome=Result.UNREACHABLE, detail="reset")

FATES = ("well", "well", "well", "well", "refuses", "late", "ignored", "answer lost", "dies")
"""What may become of one call; the good ones more often, or no round would ever commit."""


@dataclass
class Engine:
    """One server: boots anew when it restarts, and forgets everything then."""

    boot: int = 1
    alive: bool = True
    session: bool = False
    paused: bool = False
    weights: Weights = ()

    def restart(self) -> None:
        """Come up again with the weights it was started with."""
        self.boot, self.alive = self.boot + 1, True
        self.session, self.paused, self.weights = False, False, ()

    def pause(self) -> bool:
        """Freeze; may be repeated."""
        self.paused = True
        return True

    def resume(self) -> bool:
        """Go on; may be repeated."""
        self.paused = False
        return True

    def start(self) -> bool:
        """Open a session; a second one is refused."""
        opened = not self.session
        self.session = True
        return opened

    def finish(self) -> bool:
        """Close the session; without one it is refused."""
        closed = self.session
        self.session = False
        return closed

    def load(self, round_id: int, *, full: bool) -> bool:
        """Take new weights in; without a session it is refused."""
        if self.session and full:
            self.weights = (round_id,)
        elif self.session and self.weights != MIXED and self.weights[-1:] != (round_id,):
            self.weights = (*self.weights, round_id)
        return self.session


@dataclass
class Engines:
    """All servers, and calls to them that end in one of FATES."""

    of: dict[str, Engine] = field(default_factory=dict[str, Engine])

    def call(self, name: str, fate: str, act: Callable[[Engine], bool]) -> Outcome:
        """Make one call; what is heard of it and what was done are two things."""
        engine = self.of[name]
        if not engine.alive:
            return GONE
        if fate == "dies":
            engine.alive = False
            return GONE
        if fate == "refuses":
            return NO
        if fate == "ignored":
            return SILENT
        done = act(engine)
        return {"late": SILENT, "answer lost": GONE}.get(fate, OK if done else NO)
