"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def wait_until(predicate: Callable[[], Awaitable[bool]], *, timeout_s: float = 10.0) -> None:
    """Return as soon as the predicate holds; TimeoutError if it does not in time."""
    async with asyncio.timeout(timeout_s):
        # The condition is on the other side of a socket, where no Event can be set.
        while not await predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
