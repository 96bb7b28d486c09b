"""What replicas have answered, read with care: a server may answer 200 and anything at all."""

from __future__ import annotations

from typing import Any, cast


def field_of(answer: Any, name: str) -> Any:
    """Return one field, None if the answer is no object or lacks it."""
    return cast("dict[str, Any]", answer).get(name) if isinstance(answer, dict) else None


def items_of(answer: Any, name: str) -> list[Any]:
    """Return one field that should be a list, empty if it is none."""
    found = field_of(answer, name)
    return cast("list[Any]", found) if isinstance(found, list) else []


def table_of(answer: Any, name: str) -> dict[str, Any]:
    """Return one field that should be an object, empty if it is none."""
    found = field_of(answer, name)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def count_of(answer: Any, name: str) -> int:
    """Return one field that should be a number, 0 if it is none."""
    found = field_of(answer, name)
    return found if isinstance(found, int) else 0
