"""Evidence: what ran, what came out, and whether it is what was promised, line by line as text.

Every line is on disk before the next one is measured, so a run that is killed leaves what it found.
A *check* must hold; an *aim* is a figure to reach, and missing it is no failure.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self


class Evidence:
    """One text file, appended to and shown at the same time."""

    def __init__(self, path: Path, title: str, facts: Sequence[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.failed: list[str] = []
        self.missed: list[str] = []
        self._began = time.monotonic()
        self._file = path.open("a", buffering=1)
        self.line(f"# {title}")
        self.line(f"command: python -m bench.gpu.{path.stem} {shlex.join(sys.argv[1:])}".rstrip())
        self.line(time.strftime("begun: %Y-%m-%d %H:%M:%S UTC", time.gmtime()))
        for fact in facts:
            self.line(fact)

    def line(self, text: str = "") -> None:
        """Write one line, or several."""
        self._file.write(text + "\n")
        print(text, flush=True)

    def step(self, text: str) -> None:
        """Begin a part; the seconds are since the script began."""
        self.line(f"\n== {text}  [{time.monotonic() - self._began:.1f} s]")

    def check(self, holds: bool, text: str) -> bool:
        """Note whether something that must hold does."""
        self.line(f"check {'ok    ' if holds else 'FAILED'}  {text}")
        if not holds:
            self.failed.append(text)
        return holds

    def aim(self, reached: bool, text: str) -> None:
        """Note whether a figure is what was aimed at."""
        self.line(f"aim   {'met   ' if reached else 'MISSED'}  {text}")
        if not reached:
            self.missed.append(text)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table with aligned columns, the first one to the left."""
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            first, *others = (
                cell.rjust(width) if number else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            self.line("  ".join([first, *others]).rstrip())

    @contextmanager
    def part(self, text: str) -> Generator[None]:
        """A part whose failure is noted and does not end the script."""
        self.step(text)
        try:
            yield
        except Exception as error:  # what comes after may still be worth knowing
            self.check(False, f"{text}: {type(error).__name__}: {error}")
            self.line(_last_frames(error))

    @property
    def status(self) -> int:
        """The exit status: 0 if every check held."""
        return 1 if self.failed else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self.check(False, f"ended early: {type(error).__name__}: {error}")
            self.line(_last_frames(error))
        took = time.monotonic() - self._began
        held = f"{len(self.failed)} checks FAILED" if self.failed else "every check held"
        missed = f", {len(self.missed)} aims missed" if self.missed else ""
        self.line(f"\nresult: {held}{missed}; {took:.0f} s\n")
        self._file.close()


def spread(values: Sequence[float], unit: str = "ms", scale: float = 1000.0) -> str:
    """A median with the least and the greatest behind it."""
    if not values:
        return "none"
    low, high = min(values) * scale, max(values) * scale
    return f"{statistics.median(values) * scale:.1f} {unit} ({low:.1f}–{high:.1f})"


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """The ratio of two medians; NaN where there is nothing to compare."""
    if not of or not to or statistics.median(to) == 0:
        return float("nan")
    return statistics.median(of) / statistics.median(to)


def _last_frames(error: BaseException, count: int = 4) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-count:]
    return "".join(traceback.format_list(frames)).rstrip()
