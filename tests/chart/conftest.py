"""What the tests of the chart need beside Python: `make test-chart` installs it."""

from __future__ import annotations

import pytest

from tests.chart.helm import TOOLS


@pytest.fixture(autouse=True, scope="session")
def tools() -> None:
    """Say what to do where the tools are missing, instead of failing a hundred times."""
    if not (TOOLS / "installed.sha256").exists():
        pytest.exit("the tools are not installed: run `make test-chart`", returncode=1)
