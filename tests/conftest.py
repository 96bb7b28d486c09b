"""What every room's tests may ask for."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One real server for the whole run; tests that kill it start one of their own."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of a real Redis that holds nothing."""
    redis_server.empty()
    return redis_server.url


@pytest.fixture(params=["memory", "redis"])
def store_url(request: pytest.FixtureRequest) -> str:
    """An empty store that several openings within the test share, in process and on Redis."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4()}"
    return request.getfixturevalue("redis_url")


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A real server that this test may kill."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
