"""What a line of the log looks like, in either form."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Callable, Generator
from itertools import product

import pytest

from gateway.logs import configure_logging
from gateway.settings_model import Log, LogFormat

log = logging.getLogger(__name__)

Told = Callable[[], str]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Generator[Told]:
    """What was logged since, with the root logger as it was before on leaving."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield lambda: capsys.readouterr().err
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_value_with_blanks_stands_in_quotes(told: Told) -> None:
    """So a line can be taken apart again, as a shell would; plain values stay plain."""
    configure_logging(Log())
    lost = "unreachable: Cannot connect to host a:1 [Connect call failed ('10.0.0.1', 1)]\nor so"
    fields = {"replica": "a:1", "lost": lost, "why": "", "failed": {}, "by": "x=1", "n": 3}
    log.warning("replica", extra=fields)
    (line,) = told().splitlines()
    _, _, written = line.partition(f"{__name__}: replica ")
    assert written.startswith("replica=a:1 lost=")
    assert written.endswith(' why="" failed={} by="x=1" n=3')
    read = dict(part.split("=", 1) for part in shlex.split(written))
    assert read == {name: str(value).replace("\n", "\\n") for name, value in fields.items()}


def test_of_several_processes_each_says_which_one_it_is(told: Told) -> None:
    """In either form; one alone has nothing to tell apart."""
    lines = dict[tuple[LogFormat, bool], str]()
    for form, tells in product(LogFormat, (True, False)):
        configure_logging(Log(format=form), tells_process=tells)
        log.info("held")
        lines[form, tells] = told()
    assert f" INFO    [{os.getpid()}] {__name__}: held" in lines[LogFormat.TEXT, True]
    assert f" INFO    {__name__}: held" in lines[LogFormat.TEXT, False]
    assert json.loads(lines[LogFormat.JSON, True])["process"] == os.getpid()
    assert "process" not in json.loads(lines[LogFormat.JSON, False])
