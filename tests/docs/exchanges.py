"""The calls that docs/http.md shows, and what it says that they answer."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

GAP = "…"
CURLS_TYPE = "application/x-www-form-urlencoded"
"""What curl says of a body if it is told nothing."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `([A-Z]+ /[^`]*)` \|(.*)\|(.*)\|$", re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One call, and what the page says of its answer: a JSON body, or a head.

    `whole` says that the body has no other fields than these; `replicas` is then one of them.
    """

    at: int
    method: str
    path: str
    body: str | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    answer: Any = None
    head: str | None = None
    whole: bool = True

    @property
    def status(self) -> int:
        """An error says its status in its body."""
        return self.answer["error"]["code"] if self.head is None and "error" in self.answer else 200


def exchanges_of(text: str) -> list[Exchange]:
    """Every call of a page in its order: curl with the block behind it, and rows of tables."""
    return sorted((*_in_blocks(text), *_in_rows(text)), key=lambda found: found.at)


def _in_blocks(text: str) -> Iterator[Exchange]:
    asked: re.Match[str] | None = None
    for block in _BLOCK.finditer(text):
        language, content = block.groups()
        if content.startswith("curl "):
            assert asked is None, f"nothing is said of the answer to {asked}"
            asked = block
        elif asked is not None:
            shown: dict[str, Any] = (
                {"answer": json.loads(content)} if language == "json" else {"head": content}
            )
            yield Exchange(at=asked.start(), **_of_curl(asked.group(2)), **shown)
            asked = None


def _of_curl(command: str) -> dict[str, Any]:
    words = iter(shlex.split(command.replace("\\\n", " "))[1:])
    found: dict[str, Any] = {"method": "GET", "headers": {}}
    for word in words:
        if word == "-X":
            found["method"] = next(words)
        elif word == "-d":
            found |= {"method": "POST", "body": next(words)}
            found["headers"].setdefault("content-type", CURLS_TYPE)
        elif word == "-H":
            name, _, value = next(words).partition(": ")
            found["headers"][name.lower()] = value
        elif word != "-i":
            found["path"] = word.removeprefix("localhost:8000")
    return found


def _in_rows(text: str) -> Iterator[Exchange]:
    for row in _ROW.finditer(text):
        call, body, answer = row.groups()
        method, _, path = call.partition(" ")
        sent, told = _SPAN.search(body), _SPAN.search(answer)
        assert told is not None, call
        yield Exchange(
            at=row.start(),
            method=method,
            path=path,
            body=sent.group(1) if sent else None,
            headers={"content-type": CURLS_TYPE} if sent else {},
            answer=json.loads(told.group(1)),
            whole=False,
        )


def differences(said: Any, found: Any, where: str = "") -> list[str]:
    """What is otherwise than the page says. … stands for anything, as a key for other fields too.

    A float only says that there is a number.
    """
    if said == GAP:
        return []
    if isinstance(said, dict) and isinstance(found, dict):
        return _in_objects(cast("dict[str, Any]", said), cast("dict[str, Any]", found), where)
    if isinstance(said, list) and isinstance(found, list) and said != [GAP]:
        items, others = cast("list[Any]", said), cast("list[Any]", found)
        inside = [differences(*both, f"{where}[]") for both in zip(items, others, strict=False)]
        return sum(inside, [] if len(items) == len(others) else [f"{where}: {found}"])
    same = said == [GAP] or (isinstance(said, float) and isinstance(found, float)) or said == found
    return [] if same else [f"{where}: {found!r}"]


def _in_objects(said: dict[str, Any], found: dict[str, Any], where: str) -> list[str]:
    names = said.keys() - {GAP}
    missing = [f"{where}.{name} is not there" for name in names - found.keys()]
    more = [] if GAP in said else [f"{where}.{name} is there" for name in found.keys() - names]
    shared = sorted(names & found.keys())
    inside = [differences(said[name], found[name], f"{where}.{name}") for name in shared]
    return sum(inside, missing + more)
