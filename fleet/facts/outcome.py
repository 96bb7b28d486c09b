"""What one replica made of one call: a frozen value that travels into answers and records.

Outcome words are fixed by the gateway's interface: ok, failed, timeout, unreachable, wedged,
skipped.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import msgspec


class Result(StrEnum):
    """How a replica's call ended."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    WEDGED = "wedged"
    SKIPPED = "skipped"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's part of a fan-out.

    `elapsed_s` is in seconds; `answer` is the decoded JSON body of a 2xx answer and is never
    stored or shown.
    """

    outcome: Result
    status: int | None = None
    detail: str | None = None
    elapsed_s: float = 0.0
    answer: Any = None

    @property
    def ok(self) -> bool:
        """Whether the replica did what it was asked."""
        return self.outcome is Result.OK

    @property
    def bad(self) -> bool:
        """Whether the replica was asked and did not do it."""
        return self.outcome not in (Result.OK, Result.SKIPPED)

    def public(self) -> dict[str, Any]:
        """Return the four fields of the error shape."""
        return {
            "outcome": self.outcome.value,
            "status": self.status,
            "detail": self.detail,
            "elapsed_s": round(self.elapsed_s, 6),
        }


_NO_SESSION = re.compile(
    r"without a matching start|\bno\b.*\b(?:session|update|start)|"
    r"\bnot\b.*\b(?:start|started|active|open|progress)\b|\bbefore\b.*\bstart|start\w*\b.*\bfirst\b",
    re.IGNORECASE | re.DOTALL,
)
"""How servers refuse to finish what was not started: vLLM's words (v1/worker/gpu_worker.py, 0.32),
and those of servers that only speak its protocol."""


def had_no_session(finished: Outcome) -> bool:
    """Whether a bare finish was refused because there was nothing to finish.

    The engine takes calls in order: this refusal means that no start came through before. Any
    other failure may have left the session open.
    """
    if finished.outcome is not Result.FAILED:
        return False
    return finished.status in (404, 405, 409) or bool(_NO_SESSION.search(finished.detail or ""))


def skipped(detail: str) -> Outcome:
    """Return the outcome of a replica that was not called, and why."""
    return Outcome(outcome=Result.SKIPPED, detail=detail)


def describe_failures(outcomes: dict[str, Outcome]) -> str:
    """Return `id: detail` of every replica that did not do what it was asked, in one line.

    Who merely sat in a collective comes after who failed it.
    """
    bad = [(replica, outcome) for replica, outcome in outcomes.items() if outcome.bad]
    return "; ".join(
        f"{replica}: {outcome.outcome.value}" + (f" ({outcome.detail})" if outcome.detail else "")
        for replica, outcome in sorted(bad, key=lambda item: item[1].outcome is Result.WEDGED)
    )
