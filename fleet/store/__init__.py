"""The place for everything that the fleet must not forget, behind one contract (base.py).

`open_store` is the way in; it decides by the URL. What this package does not do: rules. It
compares stamps and swaps values (base.py says why).
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import SplitResult, parse_qs, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from fleet.store.base import PERMANENT_KEYS, Entry, Record, Store
from fleet.store.embedded import open_engine, uptime_s
from fleet.store.redis import ANSWER_TIMEOUT_S, RedisStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from fleet.store.redis import Commands

__all__ = [
    "ANSWER_TIMEOUT_S",
    "PERMANENT_KEYS",
    "Entry",
    "Record",
    "Store",
    "check_store_url",
    "open_store",
    "store_address",
]

_SCHEMES: Final = ("memory", "redis", "rediss", "unix")
_OPTIONS: Final = frozenset({"db", "username", "password", "ssl_ca_certs", "ssl_cert_reqs"})
_MAX_CONNECTIONS: Final = 10_000  # each follower holds one; running out must not stop a round


def check_store_url(url: str) -> None:
    """Raise ValueError with one clear line unless `open_store` can take the URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("the store is not a URL") from None  # the cause may quote a password
    if parts.scheme not in _SCHEMES:
        raise ValueError(_refusal(parts.scheme))
    _check_parts(parts)


def store_address(url: str) -> str:
    """Return the URL of a store without password and options, fit for messages."""
    return _where(urlsplit(url))


@asynccontextmanager
async def open_store(url: str, fleet_name: str) -> AsyncGenerator[Store]:
    """Open the store of one fleet; it connects at the first use, not here.

    URLs: `memory://` (private to this opening), `memory://name` (shared within the process),
    `redis://`, `rediss://` and `unix://` with password and db as redis-py reads them. Raises
    ValueError for any other.
    """
    check_store_url(url)
    parts = urlsplit(url)
    if parts.scheme == "memory":
        async with open_engine(parts.netloc) as engine:
            yield RedisStore(engine, fleet_name, _where(parts), uptime_s)
    else:
        async with _open_redis(url) as client:
            uptime = partial(_uptime_of, client)
            yield RedisStore(cast("Commands", client), fleet_name, _where(parts), uptime)


@asynccontextmanager
async def _open_redis(url: str) -> AsyncGenerator[Redis]:
    # Retries are the store's own (reads only), and RESP2 is what the embedded engine answers in.
    client = Redis.from_url(
        url,
        socket_connect_timeout=ANSWER_TIMEOUT_S,
        socket_timeout=ANSWER_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        max_connections=_MAX_CONNECTIONS,
    )
    async with client:
        yield client


async def _uptime_of(client: Redis) -> float:
    try:
        return float((await client.info("server"))["uptime_in_seconds"])
    except (ResponseError, KeyError):  # INFO is not for this user, or says less than Redis's does
        return 0.0


def _refusal(scheme: str) -> str:
    known = ", ".join(f"{name}://" for name in _SCHEMES)
    if "sentinel" in scheme or "cluster" in scheme:
        return f"{scheme}:// is not available in this version; use one of {known}"
    return f"unknown store scheme {scheme!r}; use one of {known}"


def _check_parts(parts: SplitResult) -> None:
    if "," in parts.netloc:
        raise ValueError("several Redis hosts (cluster) are not available in this version; use one")
    try:
        _ = parts.port
    except ValueError:
        # Not quoted, nor its cause: it may be half of a password that has a slash.
        raise ValueError("the store's port is not a number up to 65535") from None
    if parts.scheme == "memory" and (parts.path.strip("/") or parts.query):
        raise ValueError("memory:// takes at most a name: memory://name")
    _check_options(parts, parse_qs(parts.query))


def _check_options(parts: SplitResult, options: dict[str, list[str]]) -> None:
    """Refuse what redis-py would take here, and choke on when it connects, or pass over."""
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise ValueError(f"unknown store option {unknown[0]!r}; use one of {sorted(_OPTIONS)}")
    path = () if parts.scheme == "unix" else (parts.path.strip("/"),)
    if any(n and not n.isdecimal() for n in (*options.get("db", ()), *path)):
        raise ValueError("the store's database is not a number")  # but maybe half of a password
    for name in sorted(options):
        if name.startswith("ssl_") and parts.scheme != "rediss":
            raise ValueError(f"the store's option {name} needs TLS: rediss://")
    for file in options.get("ssl_ca_certs", ()):
        if not Path(file).is_file():
            raise ValueError(f"the store's ssl_ca_certs is no file: {file!r}")


def _where(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
