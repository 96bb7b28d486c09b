"""The pages of documentation, and what can be read off them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "helm" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)

_FENCE = re.compile(r"^ *```.*?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    """A page's path from the project's root, for the names of cases."""
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    """A page's text."""
    return page.read_text(encoding="utf-8")


def code_of(page: Path) -> Iterator[str]:
    """Every line of a code block, continued lines joined, and every code span outside of them."""
    text = text_of(page)
    for block in _FENCE.findall(text):
        yield from re.sub(r"\\\n\s*", " ", block).splitlines()
    yield from spans_of(_FENCE.sub("", text))


def spans_of(text: str) -> list[str]:
    """Every code span."""
    return _SPAN.findall(text)


def links_of(page: Path) -> list[str]:
    """Every link that does not leave the project."""
    found = _LINK.findall(_FENCE.sub("", text_of(page)))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = _HEADING.findall(_FENCE.sub("", text_of(page)))
    return {_anchor(heading) for heading in headings}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
