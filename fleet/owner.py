"""Who owns long-lived tasks: a task group that ends them when its context ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class _Ended(Exception):
    """The context is over; what still runs in the group is cancelled."""


@asynccontextmanager
async def task_owner() -> AsyncGenerator[asyncio.TaskGroup]:
    """Yield a task group whose tasks are cancelled, and awaited, when the context is left."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
            raise _Ended
    except* _Ended:
        pass
