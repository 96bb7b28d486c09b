"""Running an example as its reader would: a command line, with the gateway's URL in it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
LONGEST_S = 400.0


def run_example(name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run it to its end and return what it printed; AssertionError if it failed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
