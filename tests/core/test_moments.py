"""Moments in prose: how long ago, or when in UTC."""

from __future__ import annotations

import pytest

from fleet.facts.moments import ago, utc

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0.0 s ago"),
        (4.24, "4.2 s ago"),
        (59.94, "59.9 s ago"),
        (59.96, "1 min 0 s ago"),
        (200, "3 min 20 s ago"),
        (3_599.7, "1 h 0 min ago"),
        (7_500, "2 h 5 min ago"),
        (187_300, "2 d 4 h ago"),
        (-3, "0.0 s ago"),
    ],
)
def test_the_past_is_told_in_its_two_largest_units(seconds: float, told: str) -> None:
    """And a clock of another machine that is ahead makes nothing negative."""
    assert ago(NOW - seconds, NOW) == told


def test_a_moment_is_told_in_utc() -> None:
    """Wherever the reader and the gateway are."""
    assert utc(NOW + 0.25) == "2023-11-14T22:13:20.250Z"
