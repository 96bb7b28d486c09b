"""Every text that the program can say, with … where it fills something in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT

GAP = "…"


@cache
def all_texts() -> str:
    """The string literals of both packages, one a line."""
    files = [*(ROOT / "fleet").rglob("*.py"), *(ROOT / "gateway").rglob("*.py")]
    return "\n".join(text for file in files for text in _texts(file))


def is_said(message: str) -> bool:
    """Whether some text of the program has each part of this message, and has them in order.

    A message may leave out the beginning or the end of what is said, and … stands for a gap.
    """
    parts = [part.strip() for part in message.split(GAP)]
    wanted = [part for part in parts if any(character.isalpha() for character in part)]
    return any(_has(line, wanted) for line in all_texts().splitlines())


def _has(line: str, parts: list[str]) -> bool:
    at = 0
    for part in parts:
        found = line.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _texts(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(_piece(value) for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


def _piece(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else GAP
