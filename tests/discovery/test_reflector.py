"""The reflector against an API server that lets it down in every way that others have seen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fleet.discovery.api import ApiServer
from fleet.discovery.kubernetes import Pace, PodSource
from fleet.discovery.patience import Backoff
from fleet.facts.endpoint import Endpoint, Snapshot
from fleet.owner import task_owner
from tests.discovery.fake_api import FakeApi, a_pod, fake_api
from tests.waiting import wait_until

FAST = Pace(
    watch_s=1.0,
    slack_s=0.3,
    relist_s=60.0,
    confirm_s=0.05,
    first_retry_s=0.01,
    most_retry_s=0.1,
)
RELISTING = Pace(watch_s=1.0, slack_s=0.3, relist_s=1.0, confirm_s=0.05, first_retry_s=0.01)


@dataclass
class Seen:
    """Every snapshot that a source has told."""

    snapshots: list[Snapshot] = field(default_factory=list[Snapshot])

    def tell(self, snapshot: Snapshot) -> None:
        """Take one more."""
        self.snapshots.append(snapshot)

    @property
    def names(self) -> list[str]:
        """The pods of the newest snapshot."""
        return sorted(e.origin.name for e in self.now())

    def now(self) -> list[Endpoint]:
        """The endpoints of the newest snapshot."""
        return list(self.snapshots[-1].endpoints.values()) if self.snapshots else []

    async def has(self, *names: str, timeout_s: float = 5.0) -> None:
        """Wait until exactly these pods are listed."""

        async def reached() -> bool:
            return bool(self.snapshots) and self.names == sorted(names)

        try:
            await wait_until(reached, timeout_s=timeout_s)
        except TimeoutError:
            raise AssertionError(f"expected {names}, seen {self.names}") from None


@asynccontextmanager
async def reflecting(
    api: FakeApi, account: Path, selector: str = "app=vllm", pace: Pace = FAST
) -> AsyncGenerator[Seen]:
    """Run a reflector over the fake API server."""
    seen = Seen()
    source = PodSource(ApiServer(url=api.url, account=account), api.namespace, selector, 8000, pace)
    async with task_owner() as owner:
        owner.create_task(source.run(seen.tell))
        yield seen


async def watching(api: FakeApi, more_than: int = 0) -> None:
    """Wait until there is a watch, and more than so many have been asked for."""

    async def reached() -> bool:
        return bool(api.watches) and watches(api) > more_than

    await wait_until(reached)


def watches(api: FakeApi) -> int:
    """How many watches have been asked for."""
    return sum(1 for a in api.asked if a.verb == "watch")


async def test_pods_come_and_go_by_selector_without_another_list(tmp_path: Path) -> None:
    """One list, then events; a pod whose label changes leaves like one that is deleted."""
    async with fake_api() as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        await api.put(a_pod("b", "10.0.0.2:8000", labels={"app": "other"}))
        async with reflecting(api, tmp_path, "app=vllm,tier notin (x,y)") as seen:
            await seen.has("a")
            await watching(api)
            await api.put(a_pod("c", "10.0.0.3:8000"))
            await seen.has("a", "c")
            await api.put(a_pod("c", "10.0.0.3:8000", labels={"tier": "x"}))
            await seen.has("a")
            await api.delete("a")
            await seen.has()
        assert api.lists() == 1
    assert [s.asked_at is not None for s in seen.snapshots] == [True, False, False, False]


async def test_a_dropped_watch_goes_on_where_it_was(tmp_path: Path) -> None:
    """What happened meanwhile, deletions too, comes without another list."""
    async with fake_api() as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path) as seen:
            for round_number in range(5):
                await watching(api, round_number)
                api.drop()
                name = f"b{round_number}"
                await api.put(a_pod(name, "10.0.0.2:8000"))
                await seen.has("a", name)
                api.drop()
                await api.delete(name)
                await seen.has("a")
        assert api.lists() == 1


async def test_the_regular_end_of_a_watch_is_no_failure(tmp_path: Path) -> None:
    """It goes on from the last bookmark, without a list, though nothing happened."""
    async with fake_api() as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path) as seen:
            await watching(api)
            api.version += 50  # of other objects: only bookmarks tell
            await watching(api, 2)
            await api.put(a_pod("b", "10.0.0.2:8000"))
            await seen.has("a", "b")
        versions = [int(a.query["resourceVersion"]) for a in api.asked if a.verb == "watch"]
        assert api.lists() == 1
        assert versions[0] == 101
        assert versions[2] == 151


@pytest.mark.parametrize("in_stream", [True, False])
async def test_a_version_that_is_too_old_means_another_list(
    tmp_path: Path, in_stream: bool
) -> None:
    """410, as an event or as a status: what was missed is found by listing."""
    async with fake_api(gone_in_stream=in_stream, bookmark_s=30) as api:
        for name in ("a", "b"):
            await api.put(a_pod(name, "10.0.0.1:8000"))
        async with reflecting(api, tmp_path) as seen:
            await seen.has("a", "b")
            await watching(api)
            await api.delete("a", silently=True)
            api.forget()
            api.drop()
            await seen.has("b")
        assert api.lists() == 2


async def test_a_lost_deletion_is_healed_by_the_next_list(tmp_path: Path) -> None:
    """The watch says nothing of it, ever; the clock does."""
    async with fake_api() as api:
        for name in ("a", "b"):
            await api.put(a_pod(name, "10.0.0.1:8000"))
        async with reflecting(api, tmp_path, pace=RELISTING) as seen:
            await seen.has("a", "b")
            await watching(api)
            await api.delete("a", silently=True)
            await seen.has("b")
        assert api.lists() > 1


async def test_a_pod_made_again_tells_that_the_old_one_is_gone(tmp_path: Path) -> None:
    """Same name, another uid, and the deletion was lost: one pod, the new one."""
    async with fake_api() as api:
        await api.put(a_pod("a", "10.0.0.1:8000", uid="old"))
        async with reflecting(api, tmp_path) as seen:
            await seen.has("a")
            await watching(api)
            await api.replace(a_pod("a", "10.0.0.2:8000", uid="new"))

            async def renewed() -> bool:
                return [e.origin.uid for e in seen.now()] == ["new@10.0.0.2:8000"]

            await wait_until(renewed)
        assert api.lists() == 1


async def test_a_silent_connection_is_given_up(tmp_path: Path) -> None:
    """Neither events nor bookmarks nor its end: a new watch brings what the dead one kept."""
    async with fake_api() as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path) as seen:
            await watching(api)
            api.freeze()
            await api.put(a_pod("b", "10.0.0.2:8000"))
            await seen.has("a", "b")
        assert api.lists() == 1


async def test_an_api_server_that_is_away_takes_nobody_with_it(tmp_path: Path) -> None:
    """Errors tell nothing; it comes back, and what changed meanwhile is told."""
    async with fake_api() as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path, pace=RELISTING) as seen:
            await watching(api)
            await api.go_away()
            told = len(seen.snapshots)
            await asyncio.sleep(1.5)  # longer than a list is due: nothing must come of that
            assert len(seen.snapshots) == told
            assert seen.names == ["a"]
            await api.put(a_pod("b", "10.0.0.2:8000"))
            await api.come_back()
            await seen.has("a", "b")


async def test_an_empty_list_counts_only_if_it_comes_twice(tmp_path: Path) -> None:
    """An API server that has just come back may know nothing yet."""
    empty = {"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}
    async with fake_api() as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path) as seen:
            await seen.has("a")
            await watching(api)
            api.answers = [(500, b"no"), (200, json.dumps(empty).encode())]
            api.forget()
            api.drop()

            async def listed_again() -> bool:
                return len(seen.snapshots) > 1

            await wait_until(listed_again)
            assert [len(s.endpoints) for s in seen.snapshots] == [1, 1]
            api.pods.clear()
            api.forget()
            api.drop()
            await seen.has()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"{}",
        b"[]",
        b"<html>",
        b'{"kind":"Status"}',
        b'{"kind":"PodList","metadata":{"resourceVersion":""},"items":[]}',
        b'{"kind":"PodList","metadata":{},"items":null}',
        b'{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":[{}]}',
    ],
)
async def test_nonsense_is_no_list(tmp_path: Path, nonsense: bytes) -> None:
    """A 200 of some proxy, say: nothing is told until a real list comes."""
    async with fake_api() as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        api.answers = [(200, nonsense)] * 3
        async with reflecting(api, tmp_path) as seen:
            await seen.has("a")
        assert [len(s.endpoints) for s in seen.snapshots] == [1]


async def test_who_may_not_watch_still_lists(tmp_path: Path) -> None:
    """403 on the watch: slower, with a warning, but never blind."""
    async with fake_api(forbidden={"watch"}) as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path) as seen:
            await seen.has("a")
            await api.put(a_pod("b", "10.0.0.2:8000"))
            await seen.has("a", "b")


async def test_who_is_refused_tells_nothing_and_goes_on_asking(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """403 on the list: the log says why, in the server's words, and rights granted later work."""
    pace = Pace(first_retry_s=0.01, most_retry_s=0.2)
    async with fake_api(forbidden={"list"}) as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path, pace=pace) as seen:

            async def refused() -> bool:
                return len(api.asked) >= 7

            await wait_until(refused)
            assert seen.snapshots == []
            api.forbidden.clear()
            await seen.has("a")
    told = [getattr(record, "error", "") for record in caplog.records]
    assert "403: pods is forbidden: may not list" in told


def test_the_delay_doubles_up_to_its_bound_and_is_never_quite_the_same() -> None:
    """Else all gateways would come back in one moment, to a server that has just come back."""
    backoff = Backoff(0.1, 2.0)
    for longest_s in (0.1, 0.2, 0.4, 0.8, 1.6, *[2.0] * 100):
        assert longest_s / 2 <= backoff.next_s() <= longest_s
    assert len({backoff.next_s() for _ in range(20)}) > 10
    backoff.reset()
    assert backoff.next_s() <= 0.1


async def test_a_new_token_is_used_as_soon_as_it_is_there(tmp_path: Path) -> None:
    """The kubelet replaces the file; the old token ends, and no restart is needed."""
    (tmp_path / "token").write_text("first\n")
    async with fake_api(tokens={"first"}) as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path) as seen:
            await watching(api)
            (tmp_path / "token").write_text("second")
            api.tokens = {"second"}
            api.drop()
            await api.put(a_pod("b", "10.0.0.2:8000"))
            await seen.has("a", "b")
        assert api.lists() == 1
        assert [a.token for a in api.asked][-1] == "second"


async def test_a_token_that_has_ended_takes_nobody_with_it(tmp_path: Path) -> None:
    """401 until the kubelet brings another one: the fleet stays as it is."""
    (tmp_path / "token").write_text("first")
    async with fake_api(tokens={"first"}) as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path) as seen:
            await watching(api)
            api.tokens = {"second"}
            api.drop()

            async def is_refused() -> bool:
                return sum(1 for a in api.asked if a.token == "first") > 5

            await wait_until(is_refused)
            assert [len(s.endpoints) for s in seen.snapshots] == [1]
            await api.put(a_pod("b", "10.0.0.2:8000"))
            (tmp_path / "token").write_text("second")
            await seen.has("a", "b")


async def test_long_lists_come_in_pages(tmp_path: Path) -> None:
    """Every page, and then the watch from the list's version."""
    async with fake_api(page=3) as api:
        names = [f"p{n}" for n in range(8)]
        for number, name in enumerate(names):
            await api.put(a_pod(name, f"10.0.0.{number}:8000"))
        async with reflecting(api, tmp_path) as seen:
            await seen.has(*names)
            await watching(api)
        assert len([a for a in api.asked if a.verb == "list"]) == 3


async def test_a_slow_api_server_is_waited_for(tmp_path: Path) -> None:
    """Half a second an answer, and nothing is lost or asked twice."""
    async with fake_api(delay_s=0.5) as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path) as seen:
            await watching(api)
            await api.put(a_pod("b", "10.0.0.2:8000"))
            await seen.has("a", "b")
        assert api.lists() == 1


async def test_an_annotation_may_hold_any_line_separator(tmp_path: Path) -> None:
    """Events end at a line feed, and at none of Unicode's other separators."""
    strange = {"note": "one\x85two\u2028three\x0bfour"}
    async with fake_api() as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path) as seen:
            await watching(api)
            await api.put(a_pod("b", "10.0.0.2:8000", annotations=strange))
            await seen.has("a", "b")
        assert api.lists() == 1


async def test_what_means_nothing_to_a_fleet_is_not_told(tmp_path: Path) -> None:
    """The kubelet writes a pod's status often; only readiness, address and deletion count."""
    async with fake_api() as api:
        await api.put(a_pod("a", "10.0.0.1:8000"))
        async with reflecting(api, tmp_path) as seen:
            await watching(api)
            for number in range(5):
                await api.put(a_pod("a", "10.0.0.1:8000", annotations={"n": str(number)}))
            await api.put(a_pod("a", "10.0.0.1:8000", ready=False))

            async def is_told() -> bool:
                return seen.now()[0].unready is not None

            await wait_until(is_told)
        assert len(seen.snapshots) == 2
        assert seen.now()[0].origin.revision == 107
