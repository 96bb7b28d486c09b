"""Accounts of rollouts: what each of them was, for counters and for the optional access log.

A rollout's record says which version it was promised and which one its last token came under,
which replica answered, how long it waited at the gate, and how many tokens it got if the answer
says so. The log is one JSON object a line, appended to a file; a line is lost rather than a rollout
delayed when the disk does not take it.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from time import time
from typing import BinaryIO, cast

import msgspec

from gateway.metrics import Metrics

log = logging.getLogger(__name__)

TAIL_BYTES = 2048
"""How much of the end of an answer is kept to find its usage in."""
_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')


def _append_to(file: str) -> BinaryIO:
    """Open for the gateway's life, without a buffer: a line is there when its rollout is over."""
    return cast("BinaryIO", Path(file).open("ab", buffering=0))


def try_file(file: str) -> None:
    """Open the file of an access log once, as its gateway will; OSError if that cannot be.

    A pipe is left alone: who reads it would take this for the end.
    """
    if not Path(file).is_fifo():
        _append_to(file).close()


class Account(msgspec.Struct, kw_only=True):
    """One rollout. Times are in seconds, `ended_at` since the epoch; `outcome` is `complete`,
    `broken` (the replica died in mid-answer), `cancelled` (the client left), `aborted` (while held)
    or `refused`."""

    request_id: str
    path: str
    outcome: str
    status: int | None
    replica: str | None
    version: str
    version_end: str
    held_s: float
    elapsed_s: float
    tokens: int | None = None
    ended_at: float = 0.0


class Accounts:
    """Counts rollouts that are over, and writes them down if there is a file for it."""

    def __init__(self, metrics: Metrics, file: str | None) -> None:
        self._metrics = metrics
        self._path = file
        self._file = _append_to(file) if file else None

    @property
    def are_written(self) -> bool:
        """Whether accounts go to a file, so that exchanges should keep the end of their answers."""
        return self._file is not None

    def count(self, outcome: str, held_s: float, *, spans: bool) -> None:
        """Count one rollout that is over; `spans`: its end came under another version."""
        metrics = self._metrics
        if held_s:
            metrics.rollout_held_s.observe(held_s)
        if outcome == "complete":
            if spans:
                metrics.rollouts_spanning.inc()
        elif outcome == "cancelled":
            metrics.rollouts_cancelled.inc()
        elif outcome == "broken":
            metrics.rollouts_broken.inc()

    def flush(self) -> None:
        """Hand what is written to the system; called when the gateway stops."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, account: Account, tail: bytes) -> None:
        """Write one rollout down; `tail` is the end of its answer, where its usage may be."""
        assert self._file is not None
        found = _TOKENS.findall(tail)
        account.tokens = int(found[-1]) if found else None
        account.ended_at = time()
        try:
            self._file.write(msgspec.json.encode(account) + b"\n")
        except OSError:
            log.exception("access log given up", extra={"file": self._path})
            self._file = None
