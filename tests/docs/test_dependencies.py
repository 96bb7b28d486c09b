"""What pyproject.toml asks for is what the program imports: nothing is installed for nothing."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.docs.pages import ROOT

BY_NAME = {"uvloop"}
"""Loaded by uvicorn if it is there."""


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _distributions() -> set[str]:
    """Return whatever `fleet` and `gateway` import from, by the names that pip knows."""
    files = [*(ROOT / "fleet").rglob("*.py"), *(ROOT / "gateway").rglob("*.py")]
    packages = {name.partition(".")[0] for file in files for name in _imported(file)}
    known = packages_distributions()
    return {_plain(found) for package in packages for found in known.get(package, ())}


def test_every_dependency_is_imported_by_some_module() -> None:
    """What nobody imports is one more download, one more licence and one more advisory."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^\w.-]", asked, maxsplit=1)[0] for asked in project["dependencies"]}
    assert {_plain(name) for name in names} - _distributions() == BY_NAME
