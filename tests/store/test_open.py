"""Which store a URL opens, who shares it, and which URLs are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from redis import Redis

from fleet.store import Entry, check_store_url, open_store


async def test_two_openings_of_memory_are_two_stores() -> None:
    """A test or a demo never finds what another one left."""
    async with open_store("memory://", "tests") as one, open_store("memory://", "tests") as two:
        await one.swap("state", expected=None, stamp="1", body=b"")
        assert await two.load("state") is None


async def test_two_openings_of_one_memory_name_share_their_keys() -> None:
    """Two gateways in one process meet under a name."""
    async with open_store("memory://a", "tests") as one, open_store("memory://a", "tests") as two:
        await one.swap("state", expected=None, stamp="1", body=b"x")
        assert await two.load("state") == Entry("1", b"x")


async def test_a_named_memory_is_gone_when_the_last_one_has_left() -> None:
    """It lives as long as anybody uses it, and no longer."""
    async with open_store("memory://a", "tests") as one:
        await one.swap("state", expected=None, stamp="1", body=b"x")
        for _ in range(2):
            async with open_store("memory://a", "tests") as other:
                assert await other.load("state") == Entry("1", b"x")
    async with open_store("memory://a", "tests") as later:
        assert await later.load("state") is None


async def test_opening_needs_no_server() -> None:
    """The gateway starts while Redis is away; what it asks then is another matter."""
    for url in ("redis://127.0.0.1:1", "rediss://u:p@127.0.0.1:1/3", "unix:///nowhere.sock?db=1"):
        async with open_store(url, "tests"):
            pass


async def test_the_database_in_the_url_is_used(redis_url: str) -> None:
    """Database 1 does not hold what database 0 does."""
    async with open_store(redis_url, "tests") as zero:
        await zero.swap("state", expected=None, stamp="1", body=b"")
        async with open_store(redis_url.replace("/0", "/1"), "tests") as one:
            assert await one.load("state") is None


async def test_what_is_absent_from_memory_has_never_been_there() -> None:
    """It lives as long as its process, so there is nothing that it may have lost."""
    async with open_store("memory://", "tests") as store:
        assert await store.up_s() == math.inf


async def test_a_redis_tells_for_how_long_it_has_been_running(redis_url: str) -> None:
    """In seconds, rounded down, so that nobody believes it to be older than it is."""
    with Redis.from_url(redis_url) as client:
        told: Any = client.info("server")
        async with open_store(redis_url, "tests") as store:
            assert told["uptime_in_seconds"] <= await store.up_s() < 24 * 3600


async def test_a_redis_that_does_not_tell_its_age_counts_as_new(redis_url: str) -> None:
    """A user without the right to INFO waits a little longer on an empty store, and can start."""
    with Redis.from_url(redis_url) as client:
        client.acl_setuser(
            "shy", True, passwords=["+secret"], keys="*", commands=["+@all", "-info"]
        )
    async with open_store(redis_url.replace("//", "//shy:secret@"), "tests") as store:
        assert await store.up_s() == 0.0
        await store.ping()


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("redis+sentinel://h/service", "redis\\+sentinel:// is not available in this version"),
        ("redis+cluster://h", "redis\\+cluster:// is not available in this version"),
        ("redis://a:1,b:2", "cluster.* not available in this version"),
        ("postgres://h", "unknown store scheme 'postgres'; use one of memory://, redis://"),
        ("localhost", "unknown store scheme ''"),
        ("redis://h:port", "port is not a number"),
        ("redis://[h", "not a URL"),
        ("redis://h?retry_on_timeout=1", "unknown store option 'retry_on_timeout'"),
        ("redis://h/zero", "database is not a number"),
        ("unix:///s.sock?db=x", "database is not a number"),
        ("redis://h?ssl_cert_reqs=none", "ssl_cert_reqs needs TLS: rediss://"),
        ("unix:///s.sock?ssl_ca_certs=/c", "ssl_ca_certs needs TLS: rediss://"),
        ("rediss://h?ssl_ca_certs=/no/such/file", "ssl_ca_certs is no file: '/no/such/file'"),
        ("memory://a/b", "memory://name"),
    ],
)
async def test_an_unusable_url_is_refused_with_one_line(url: str, line: str) -> None:
    """Checked where settings are read, and again where the store is opened."""
    with pytest.raises(ValueError, match=line) as caught:
        check_store_url(url)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=line):
        async with open_store(url, "tests"):
            pass


@pytest.mark.parametrize(
    "url",
    ["redis://:secret@h:port", "redis://:secret@[h", "x://:secret@h", "redis://:se/secret@h/0"],
)
def test_a_refusal_does_not_tell_the_password(url: str) -> None:
    """The line ends up in logs."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the test above has the lines)
        check_store_url(url)
    assert "secret" not in str(caught.value)
