"""The store over the `redis.asyncio` command surface: the only place that speaks Redis.

Why one class: `memory://` runs this very code over an in-process engine (`embedded.py`), so only
commands that both know are used: GET, EVAL, EXISTS, SADD, SMEMBERS, EXPIRE, XADD, XTRIM, XREAD.

Channels are short capped streams rather than PUBLISH/SUBSCRIBE: a subscriber that loses its
connection for a moment must not miss that a gate has closed, and pub/sub forgets.

What it does not do: open connections (`__init__.py`, `embedded.py`) or retry a write, whose
answer may be lost after it was done.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from fleet.errors import StoreUnavailable
from fleet.store.base import Entry, Record

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Generator,
        Iterable,
        Mapping,
        Sequence,
    )

ANSWER_TIMEOUT_S: Final = 2.0
"""Longest wait for a connection and for each answer: a dead Redis must not hang a control call."""

CHANNEL_CAP: Final = 1000
"""Messages that a channel remembers for subscribers that lost their connection."""

CHANNEL_TTL_S: Final = 3600.0
"""How long a silent channel is remembered."""

# One XREAD waits less than ANSWER_TIMEOUT_S, so a silent stream is told from a silent server.
_BLOCK_MS: Final = 1000
_BATCH: Final = 256
_READ_ATTEMPTS: Final = 2
_READ_PAUSE_S: Final = 0.05

# KEYS[1]; ARGV: "absent" or "held", expected stamp, "drop" or "set", value, ttl in ms or "".
_SWAP: Final = r"""
local current = redis.call('GET', KEYS[1])
if ARGV[1] == 'absent' then
  if current then return 0 end
else
  if not current then return 0 end
  if string.sub(current, 1, string.find(current, '\n', 1, true) - 1) ~= ARGV[2] then return 0 end
end
if ARGV[3] == 'drop' then
  redis.call('DEL', KEYS[1])
elseif ARGV[5] == '' then
  redis.call('SET', KEYS[1], ARGV[4])
else
  redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5])
end
return 1
"""

# The embedded engine knows XREVRANGE inside a script only. A plain read, no rule.
_TAIL: Final = "return redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', ARGV[1])"


_T = TypeVar("_T")


class Batch(Protocol):
    """The part of a pipeline that the store uses; commands go out together, in order."""

    def sadd(self, name: str, *values: str) -> Any: ...
    def expire(self, name: str, time: int) -> Any: ...
    def xadd(self, name: str, fields: Any) -> Any: ...
    def xtrim(self, name: str, maxlen: int, *, approximate: bool) -> Any: ...
    async def execute(self) -> list[Any]: ...


class Commands(Protocol):
    """The part of `redis.asyncio.Redis` that the store uses, answers in their RESP2 form."""

    def get(self, name: str) -> Awaitable[bytes | None]: ...
    def eval(self, script: str, numkeys: int, *keys_and_args: str | bytes) -> Awaitable[Any]: ...
    def exists(self, *names: str) -> Awaitable[int]: ...
    def smembers(self, name: str) -> Awaitable[set[bytes]]: ...
    def xread(self, streams: Any, count: int, block: int) -> Awaitable[Any]: ...
    def pipeline(self) -> Batch: ...


class RedisStore:
    """The `Store` contract (base.py) over one client; `where` names the server in errors."""

    def __init__(
        self,
        commands: Commands,
        fleet_name: str,
        where: str,
        uptime: Callable[[], Awaitable[float]],
    ) -> None:
        self._commands = commands
        self._uptime = uptime
        self._prefix = f"fleet:{{{fleet_name}}}:"
        self._where = where

    def __repr__(self) -> str:
        return f"<RedisStore {self._prefix}* at {self._where}>"

    async def load(self, key: str) -> Entry | None:
        value = await self._read("load", key, lambda: self._commands.get(self._name(key)))
        return None if value is None else _decode(value)

    async def swap(
        self,
        key: str,
        *,
        expected: str | None,
        stamp: str,
        body: bytes,
        ttl_s: float | None = None,
    ) -> bool:
        ttl_ms = "" if ttl_s is None else str(math.ceil(_positive("ttl_s", ttl_s) * 1000))
        held = ("absent", "") if expected is None else ("held", expected)
        return await self._compare("swap", key, *held, "set", _encode(stamp, body), ttl_ms)

    async def drop(self, key: str, *, expected: str) -> bool:
        return await self._compare("drop", key, "held", expected, "drop", "", "")

    async def add_members(self, key: str, members: Iterable[str], ttl_s: float) -> None:
        ttl = math.ceil(_positive("ttl_s", ttl_s))
        found = list(members)
        if not found:
            return
        batch = self._commands.pipeline()
        batch.sadd(self._name(key), *found)
        batch.expire(self._name(key), ttl)
        await self._execute("add_members", key, batch)

    async def members(self, key: str) -> frozenset[str]:
        found = await self._read("members", key, lambda: self._commands.smembers(self._name(key)))
        return frozenset(member.decode() for member in found)

    async def append(self, stream: str, fields: Mapping[str, str | bytes], *, cap: int) -> str:
        return await self._append("append", stream, [fields], cap, ttl_s=None)

    async def extend(
        self, stream: str, records: Sequence[Mapping[str, str | bytes]], *, cap: int
    ) -> None:
        if records:
            await self._append("extend", stream, records, cap, ttl_s=None)

    async def tail(self, stream: str, count: int) -> list[Record]:
        _positive("count", count)
        found: list[Any] = await self._read(
            "tail", stream, lambda: self._commands.eval(_TAIL, 1, self._name(stream), str(count))
        )
        return [_record(id_, dict(zip(flat[::2], flat[1::2], strict=True))) for id_, flat in found]

    def follow(self, stream: str, after: str | None) -> Feed:
        return Feed(self, stream, after)

    async def publish(self, channel: str, message: str | bytes) -> None:
        await self._append("publish", channel, [{"m": message}], CHANNEL_CAP, ttl_s=CHANNEL_TTL_S)

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncGenerator[AsyncIterator[bytes]]:
        yield _Messages(Feed(self, channel, await self.newest_id(channel)))

    async def up_s(self) -> float:
        return await self._read("info", "server", self._uptime)

    async def ping(self) -> None:
        await self._read("ping", "ping", lambda: self._commands.exists(self._name("ping")))

    async def newest_id(self, stream: str) -> str:
        """Return the id of the newest record, or the id before all if there is none."""
        newest = await self.tail(stream, 1)
        return newest[0].id if newest else "0-0"

    async def wait_for_records(self, stream: str, after: str) -> list[Record]:
        """Return the records after `after`, oldest first; none if `_BLOCK_MS` passed without."""
        with self._translated("follow", stream):
            async with asyncio.timeout(_BLOCK_MS / 1000 + ANSWER_TIMEOUT_S):
                answer = await self._commands.xread(
                    {self._name(stream): after}, count=_BATCH, block=_BLOCK_MS
                )
        return [_record(id_, fields) for _, found in answer or () for id_, fields in found]

    async def _append(
        self,
        verb: str,
        stream: str,
        records: Sequence[Mapping[str, str | bytes]],
        cap: int,
        *,
        ttl_s: float | None,
    ) -> str:
        """Append records and return the id of the first."""
        if not all(records):
            raise ValueError("a record needs at least one field")
        batch = self._commands.pipeline()
        for fields in records:
            batch.xadd(self._name(stream), dict(fields))
        batch.xtrim(self._name(stream), int(_positive("cap", cap)), approximate=False)
        if ttl_s is not None:
            batch.expire(self._name(stream), math.ceil(ttl_s))
        answers = await self._execute(verb, stream, batch)
        return answers[0].decode()

    async def _compare(self, verb: str, key: str, *args: str | bytes) -> bool:
        with self._translated(verb, key):
            async with asyncio.timeout(2 * ANSWER_TIMEOUT_S):
                return await self._commands.eval(_SWAP, 1, self._name(key), *args) == 1

    async def _execute(self, verb: str, key: str, batch: Batch) -> list[Any]:
        with self._translated(verb, key):
            async with asyncio.timeout(2 * ANSWER_TIMEOUT_S):
                return await batch.execute()

    async def _read(self, verb: str, key: str, ask: Callable[[], Awaitable[_T]]) -> _T:
        with self._translated(verb, key):
            async with asyncio.timeout(2 * ANSWER_TIMEOUT_S):
                async for attempt in _read_attempts():
                    with attempt:
                        return await ask()
        raise AssertionError("tenacity reraises the last error")

    def _name(self, key: str) -> str:
        return self._prefix + key

    @contextmanager
    def _translated(self, verb: str, key: str) -> Generator[None]:
        with _cancellation_kept():
            try:
                yield
            except (RedisError, OSError) as error:
                fact = str(error) or type(error).__name__
                raise StoreUnavailable(
                    f"the store does not answer ({verb} {key!r} at {self._where}: {fact})",
                    hint="retry once it does: GET /readyz of a gateway says whether it can",
                ) from error


@contextmanager
def _cancellation_kept() -> Generator[None]:
    """Raise CancelledError at the end if the caller was cancelled and has not heard of it.

    redis-py 8.1 sends under asyncio.wait_for, which before Python 3.12 loses a cancellation that
    comes in the very moment when it is done: the caller would go on for ever.
    """
    task = asyncio.current_task()
    asked_to_stop = task.cancelling() if task else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > asked_to_stop:
            raise asyncio.CancelledError


class Feed:
    """The records of one stream after a position, for ever; keeps its position over errors."""

    def __init__(self, store: RedisStore, stream: str, after: str | None) -> None:
        self._store = store
        self._stream = stream
        self._after = after
        self._waiting: deque[Record] = deque()

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> Record:
        if self._after is None:
            self._after = await self._store.newest_id(self._stream)
        while not self._waiting:
            self._waiting.extend(await self._store.wait_for_records(self._stream, self._after))
        record = self._waiting.popleft()
        self._after = record.id
        return record


class _Messages:
    """A feed of a channel, reduced to its messages."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> bytes:
        return (await self._feed.__anext__()).fields["m"]


def _read_attempts() -> AsyncRetrying:
    return AsyncRetrying(
        retry=retry_if_exception_type(RedisConnectionError),
        stop=stop_after_attempt(_READ_ATTEMPTS),
        wait=wait_fixed(_READ_PAUSE_S),
        reraise=True,
    )


def _encode(stamp: str, body: bytes) -> bytes:
    if not stamp or "\n" in stamp:
        raise ValueError(f"a stamp is not empty and holds no newline: {stamp!r}")
    return stamp.encode() + b"\n" + body


def _decode(value: bytes) -> Entry:
    stamp, _, body = value.partition(b"\n")
    return Entry(stamp.decode(), body)


def _record(id_: bytes, fields: Mapping[bytes, bytes]) -> Record:
    return Record(id_.decode(), {name.decode(): value for name, value in fields.items()})


def _positive(name: str, number: float) -> float:
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be positive and finite, not {number!r}")
    return number
