"""The pages name only what exists: files, settings, metrics, commands, flags, targets, messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from fleet.errors import FleetError
from gateway.cli import app
from gateway.errors import STATUSES, TREE
from gateway.settings import CLIENT_URL, environment_name, setting_names
from gateway.settings_model import Settings
from tests.docs.messages import is_said
from tests.docs.pages import PAGES, ROOT, anchors_of, code_of, links_of, name_of, spans_of, text_of
from tests.gateway.serving import serve

OPERATIONS = ROOT / "docs" / "operations.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
OF_KUBERNETES = {"FLEET_SERVICE_HOST", "FLEET_PORT"}  # settings.md tells that these are passed over

each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    """Files exist, and headings that links point at too."""
    for link in links_of(page):
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        assert file.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors_of(file), link


_SETTING = re.compile(r"\bFLEET_[A-Z0-9]+(?:_+[A-Z0-9]+)*(_*[*…{])?")


@each_page
def test_every_setting_that_is_named_exists(page: Path) -> None:
    """A name that ends in * or … is the beginning of some."""
    known = {environment_name(name) for name in setting_names()} | {CLIENT_URL} | OF_KUBERNETES
    for found in _SETTING.finditer(text_of(page)):
        name = found.group()
        if found.group(1):
            stem = name.rstrip("*…{")
            assert any(setting.startswith(stem) for setting in known), name
        else:
            assert name in known, name


_METRIC = re.compile(r"\bfleet_[a-z_]+[a-z]\b(?!\*|\()")
_KINDS = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)


async def test_every_metric_is_explained_to_operators_and_no_other_is_named() -> None:
    """operations.md has one row per metric of /metrics, and alarms are never on a ghost."""
    async with serve(Settings()) as served:
        text = (await served.http.get("/metrics")).text
    exported = {name for name, _ in _KINDS.findall(text) if not name.endswith("_created")}
    parts = {name + suffix for name in exported for suffix in ("", "_bucket", "_sum", "_count")}
    rows = [line for line in text_of(OPERATIONS).splitlines() if line.startswith("| `fleet_")]
    explained = {name for row in rows for name in _METRIC.findall(row.split("|")[1])}
    assert explained == exported
    for page in PAGES:
        named = {name for code in code_of(page) for name in _METRIC.findall(code)}
        assert named <= parts, name_of(page)


def _errors(kind: type[FleetError] = FleetError) -> Iterator[type[FleetError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _errors(child)


def test_every_error_has_a_section_with_its_status() -> None:
    """The `type` of an answer can be looked up, and no section is of a class that is no more."""
    sections = dict(re.findall(r"^## `(\w+)` \((\d+)", text_of(TROUBLESHOOTING), re.MULTILINE))
    del sections["NoRoute"]  # no class: the type of the answer to an unknown path
    ours = [e for e in _errors() if e.__module__ in TREE]
    assert sections == {
        error.__name__: str(next(STATUSES[kind] for kind in error.__mro__ if kind in STATUSES))
        for error in ours
    }


def test_every_error_of_the_client_is_explained() -> None:
    """Those that only the client's side knows stand in a table of their own."""
    from fleet.client import errors
    from fleet.client.ranks import SenderFailed

    own = (errors.Unreachable, errors.AnswerLost, SenderFailed)
    rows = [line for line in text_of(TROUBLESHOOTING).splitlines() if line.startswith("| `")]
    told = {span for row in rows for span in spans_of(row.split("|")[1])}
    assert {error.__name__ for error in own} <= told


def test_every_message_that_is_explained_can_be_said() -> None:
    """The first column of troubleshooting.md quotes the code, with … where that fills in."""
    quoted = [
        span
        for line in text_of(TROUBLESHOOTING).splitlines()
        if line.startswith("| ")
        for span in spans_of(line.split(" | ")[0])
        if " " in span
    ]
    assert len(quoted) > 100
    assert [message for message in quoted if not is_said(message)] == []


_COMMAND = re.compile(r"(?:^\s*|&& )fleet ([a-z][a-z|]*)([^#;&]*)")


@each_page
def test_every_command_and_flag_exists(page: Path) -> None:
    """In code; prose may speak of a fleet status."""
    commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    for code in code_of(page):
        for names, rest in _COMMAND.findall(code):
            for name in names.split("|"):
                assert name in commands, code
                known = {flag for option in commands[name].params for flag in option.opts}
                assert set(re.findall(r"--[a-z][a-z-]*", rest)) <= known, code


@each_page
def test_every_target_of_make_exists(page: Path) -> None:
    """`make` lists them."""
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for code in code_of(page):
        for target in re.findall(r"(?:^|\s)make ([a-z0-9-]+)", code):
            assert target in targets, code
