"""The pages that are generated from the code say what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_state_machine_page_is_up_to_date() -> None:
    """`python docs/generate_state_machine.py` writes it."""
    command = [sys.executable, str(DOCS / "generate_state_machine.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0
