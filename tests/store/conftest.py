"""Both engines for the contract suite, and a look at every key after every test."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import pytest

from fleet.store import PERMANENT_KEYS, Store, open_store
from fleet.store.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """One opening of that store, for the fleet `tests`."""
    async with open_store(store_url, "tests") as opened:
        yield opened


@pytest.fixture(autouse=True)
async def every_key_expires(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail a test that left a key without a time to live, unless it is a documented one."""
    if "store_url" not in request.fixturenames:
        yield
        return
    async with open_store(request.getfixturevalue("store_url"), "tests") as opened:
        yield
        assert await immortal_keys(opened) == []


async def immortal_keys(store: Store) -> list[str]:
    """Return the undocumented keys, of all fleets, that would live for ever."""
    commands = raw(store)
    keys = [key.decode() for key in await commands.keys("*")]
    bare = {key: key.rpartition("}:")[2] for key in keys}
    documented = {k for k in keys if any(fnmatch(bare[k], known) for known in PERMANENT_KEYS)}
    return [key for key in keys if key not in documented and await commands.ttl(key) == -1]


def raw(store: Store) -> Any:
    """Return the client below the store, to look at what the contract hides."""
    assert isinstance(store, RedisStore)
    return store._commands
