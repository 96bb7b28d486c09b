"""Which version of the gateway runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "vllm-fleet-gateway"


def gateway_version(distribution: str = DISTRIBUTION) -> str:
    """Return the installed version, "unknown" where the code runs from a bare checkout."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
