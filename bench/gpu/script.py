"""How a script begins and ends: arguments, the right environment, evidence, an exit status."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from bench.gpu import environment
from bench.gpu.evidence import Evidence
from bench.gpu.options import Options, not_run, options_from
from bench.gpu.processes import end_session

Run = Callable[[Options, Evidence], None]

BROKE_OFF = 3
"""The exit status of a script that could not go on: servers did not boot, say."""


def run_script(
    made: argparse.ArgumentParser,
    run: Run,
    *,
    backend: str,
    needs: Callable[[Options], int] | None = None,
    prepare: Callable[[Options], Options] | None = None,
) -> None:
    """Run one script and exit: 0 if all checks held or GPUs are missing («not run»), 1 if not."""
    options = options_from(made, backend)
    options = prepare(options) if prepare else options
    name = Path(sys.modules["__main__"].__file__ or "script").stem
    environment.enter(options.environment, f"bench.gpu.{name}")
    title = (made.description or name).rstrip(".")
    faulthandler.enable()
    evidence = Evidence(options.out / f"{name}.txt", title, environment.facts())
    try:
        with evidence:
            missing = not_run(options, needs(options) if needs else None)
            if missing:
                evidence.line(missing)
            else:
                run(options, evidence)
    except Exception:
        traceback.print_exc()
        _leave(BROKE_OFF)
    _leave(evidence.status)


def _leave(status: int) -> NoReturn:
    """Exit without waiting for threads that may sit in a collective for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getsid(0) == os.getpid():
        end_session(os.getpid())
    os._exit(status)
