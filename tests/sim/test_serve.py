"""The blocking entry point that the command line calls."""

import re
import signal
import subprocess
import sys

SCRIPT = "from fleet.sim import SimOptions, serve; serve(SimOptions(replicas=2, control_port=0))"


def test_serve_prints_a_line_per_replica_and_ends_on_sigterm() -> None:
    """A script can wait for the lines, and stop the fleet with a signal."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        lines = [run.stdout.readline() for _ in range(3)]
        run.send_signal(signal.SIGTERM)
        assert run.wait(20) == 0
    assert all(
        re.match(r"replica \d listening on http://127.0.0.1:\d+ ", line) for line in lines[:2]
    )
    assert lines[2].startswith("control port on http://127.0.0.1:")
