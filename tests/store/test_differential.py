"""The embedded engine against a real Redis: any sequence of calls, the same answers.

Times to live are compared with a model, not waited for: both engines must agree with it on which
keys expire and when. That an expired key is gone is the contract suite's test.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fleet.store import Store, open_store
from tests.store.conftest import raw

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

KEYS = st.sampled_from(["state", "lease"])
STAMPS = st.sampled_from(["1", "2", "10", "é"])
BODIES = st.binary(max_size=20)
TTLS = st.sampled_from([100.0, 2000.5])
NAMES = st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=4)
FIELDS = st.dictionaries(st.sampled_from(["a", "b"]), st.binary(max_size=5), min_size=1)


class BothEngines(RuleBasedStateMachine):
    """Every rule asks both stores the same and compares what they say."""

    def __init__(self, redis_url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.name = f"machine-{uuid.uuid4()}"
        self.stores = [self._open("memory://"), self._open(redis_url)]
        self.ttls: dict[str, float | None] = {}
        self.ids: list[tuple[str, str]] = []

    def _open(self, url: str) -> Store:
        return self.runner.run(self.stack.enter_async_context(open_store(url, self.name)))

    def teardown(self) -> None:
        """Close both stores and the loop."""
        self.runner.run(self.stack.aclose())
        self.runner.close()

    def ask(self, call: Callable[[Store], Awaitable[Any]]) -> Any:
        """Return the answer of both, which must be one."""
        memory, redis = [self.runner.run(_awaited(call(store))) for store in self.stores]
        assert memory == redis
        return memory

    @rule(key=KEYS, expected=st.none() | STAMPS, stamp=STAMPS, body=BODIES, ttl=st.none() | TTLS)
    def swap(
        self, key: str, expected: str | None, stamp: str, body: bytes, ttl: float | None
    ) -> None:
        """Claim, replace, renew, or fail to."""
        if self.ask(lambda s: s.swap(key, expected=expected, stamp=stamp, body=body, ttl_s=ttl)):
            self.ttls[key] = ttl

    @rule(key=KEYS, expected=STAMPS)
    def drop(self, key: str, expected: str) -> None:
        """Delete, or fail to."""
        if self.ask(lambda s: s.drop(key, expected=expected)):
            del self.ttls[key]

    @rule(key=KEYS)
    def load(self, key: str) -> None:
        """Absent or present as the model says."""
        assert (self.ask(lambda s: s.load(key)) is not None) == (key in self.ttls)

    @rule(names=NAMES, ttl=TTLS)
    def add_members(self, names: list[str], ttl: float) -> None:
        """Names add up, and prolong."""
        self.ask(lambda s: s.add_members("names", names, ttl))
        if names:
            self.ttls["names"] = ttl

    @rule()
    def members(self) -> None:
        """The same set."""
        self.ask(lambda s: s.members("names"))

    @rule(fields=FIELDS, cap=st.integers(1, 4))
    def append(self, fields: dict[str, bytes], cap: int) -> None:
        """Ids differ, since the clocks do; everything else must not."""
        memory, redis = [
            self.runner.run(_awaited(s.append("events", fields, cap=cap))) for s in self.stores
        ]
        self.ids.append((memory, redis))

    @rule(count=st.integers(1, 6))
    def tail(self, count: int) -> None:
        """The same records, newest first."""
        self.ask(lambda s: _fields(s.tail("events", count)))

    @precondition(lambda self: len(self.ids) > 1)
    @rule()
    def follow(self) -> None:
        """From the last id but one on, both see the newest record."""
        before = self.ids[-2]
        seen = [
            self.runner.run(_awaited(anext(store.follow("events", after))))
            for store, after in zip(self.stores, before, strict=True)
        ]
        assert tuple(record.id for record in seen) == self.ids[-1]
        assert seen[0].fields == seen[1].fields

    @invariant()
    def both_expire_as_modelled(self) -> None:
        """Each key lives for ever, or about as long as its last write said."""
        for store in self.stores:
            for key, ttl in self.ttls.items():
                left = self.runner.run(_awaited(raw(store).ttl(f"fleet:{{{self.name}}}:{key}")))
                assert left == -1 if ttl is None else ttl - 30 < left <= ttl + 1


def test_both_engines_answer_alike(redis_url: str) -> None:
    """No sequence of calls tells the embedded store from a real Redis."""
    run_state_machine_as_test(
        cast("type[BothEngines]", lambda: BothEngines(redis_url)),
        settings=settings(max_examples=40, stateful_step_count=30, deadline=None),
    )


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


async def _fields(tail: Awaitable[list[Any]]) -> list[Any]:
    return [record.fields for record in await tail]
