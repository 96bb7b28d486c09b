"""How a script begins and ends: arguments, the right environment, evidence, an exit status."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable
from pathlib import Path

from bench.gpu import environment
from bench.gpu.evidence import Evidence
from bench.gpu.options import Options, not_run, options_from
from bench.gpu.processes import end_session

Run = Callable[[Options, Evidence], None]


def run_script(
    made: argparse.ArgumentParser,
    run: Run,
    *,
    backend: str,
    needs: Callable[[Options], int] | None = None,
    prepare: Callable[[Options], Options] | None = None,
) -> None:
    """Run one script and exit with its status; 0 with «not run» where GPUs are missing."""
    options = options_from(made, backend)
    options = prepare(options) if prepare else options
    name = Path(sys.modules["__main__"].__file__ or "script").stem
    environment.enter(options.environment, f"bench.gpu.{name}")
    title = (made.description or name).rstrip(".")
    with Evidence(options.out / f"{name}.txt", title, environment.facts()) as evidence:
        missing = not_run(options, needs(options) if needs else None)
        if missing:
            evidence.line(missing)
            return
        faulthandler.enable()
        run(options, evidence)
    _leave(evidence.status)


def _leave(status: int) -> None:
    """Exit without waiting for threads that may sit in a collective for ever."""
    import os

    sys.stdout.flush()
    sys.stderr.flush()
    if os.getsid(0) == os.getpid():
        end_session(os.getpid())
    os._exit(status)
