"""`memory://`: the Redis store over an in-process engine, for demos, tests and single gateways.

Why an engine and not a dict: both obey one contract because both run one implementation, the Lua
script included (docs/adr/0002-embedded-store.md).

What it does not do: outlive the process, or be shared with another one.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, cast

from burner_redis import BurnerRedis

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from fleet.store.redis import Commands


class _Shared:
    """One named engine and the number of stores open on it."""

    def __init__(self) -> None:
        self.engine = BurnerRedis()
        self.users = 0


# The one process-wide thing here: a name is a promise to meet others of this process under it.
_NAMED: Final[dict[str, _Shared]] = {}


async def uptime_s() -> float:
    """Say that it has always been there: what it holds lives and dies with this process."""
    return math.inf


@asynccontextmanager
async def open_engine(name: str) -> AsyncGenerator[Commands]:
    """Open an engine: a private one if `name` is empty, else the one of that name.

    A named engine lives, with what it holds, until the last one who opened it has left.
    """
    shared = _NAMED.setdefault(name, _Shared()) if name else _Shared()
    shared.users += 1
    try:
        yield cast("Commands", shared.engine)
    finally:
        shared.users -= 1
        if shared.users == 0:
            _NAMED.pop(name, None)
            await shared.engine.aclose()
