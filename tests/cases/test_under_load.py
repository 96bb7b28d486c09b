"""Ten weight updates under hundreds of rollouts, judged by what the replicas themselves wrote down.

The clients' side says what was promised (labels), the replicas' logs say what was true: when each
rollout came, when each update began and ended, and so which weights were held at any moment.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
import pytest

from fleet.sim import SimOptions, SimReplica
from fleet.sim.log import RolloutRecord
from fleet.sim.trainer import SimTrainer
from fleet.sim.weights import build_state_dict, replica_checksum
from gateway.settings_model import PauseOnUpdate
from tests.cases.conftest import FINISH, START, Case, case_of, posts
from tests.waiting import wait_until

REPLICAS = 4
UPDATES = 10
CLIENTS = 220
IN_FLIGHT = 200
NEWCOMERS_S = 0.01
"""Between two rollouts of those who ask whatever the others wait for: some meet every update."""
ENOUGH = 30
"""Answers under each version before the next one comes."""
VERSIONS = ["default", *(str(number) for number in range(1, UPDATES + 1))]
OPTIONS = SimOptions(replicas=REPLICAS, token_delay_ms=60)


@dataclass(frozen=True)
class Answer:
    """One answer as its client got it; `spans` are the versions that made its tokens."""

    request_id: str
    wanted: int
    is_stream: bool
    status: int
    headers: dict[str, str]
    text: str

    @property
    def label(self) -> str:
        """The version that was promised."""
        return self.headers["x-weight-version"]

    @property
    def end(self) -> str | None:
        """The version at its end, if the gateway said that it was another one."""
        return self.headers.get("x-weight-version-end")

    @property
    def sim(self) -> dict[str, Any]:
        """What the replica says that it did; only a whole answer has it."""
        return self._last()["sim"]

    @property
    def reason(self) -> str:
        """Why it ended."""
        return self._last()["choices"][0]["finish_reason"]

    @property
    def spans(self) -> list[dict[str, Any]]:
        """Which weights made which tokens."""
        return self.sim["choices"][0]["spans"]

    def _last(self) -> dict[str, Any]:
        if not self.is_stream:
            return json.loads(self.text)
        events = [event.removeprefix("data: ") for event in self.text.split("\n\n") if event]
        assert events[-1] == "[DONE]", events[-1]
        return json.loads(events[-2])


@dataclass
class Load:
    """Clients that ask without a break; `lost` are those that got no answer."""

    url: str
    answers: list[Answer] = field(default_factory=list[Answer])
    lost: list[str] = field(default_factory=list[str])
    is_over: bool = False
    _numbers: count[int] = field(default_factory=count)

    async def ask_on(self, http: aiohttp.ClientSession) -> None:
        """Ask one rollout after the other until the load is over."""
        while not self.is_over:
            await self._ask_once(http)

    async def keep_coming(self, http: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        """Ask at a steady pace until the load is over, without waiting for answers."""
        while not self.is_over:
            group.create_task(self._ask_once(http))
            await asyncio.sleep(NEWCOMERS_S)

    async def _ask_once(self, http: aiohttp.ClientSession) -> None:
        number = next(self._numbers)
        try:
            self.answers.append(await self._ask(http, number))
        except (aiohttp.ClientError, OSError) as error:
            self.lost.append(f"{number}: {error!r}")

    async def _ask(self, http: aiohttp.ClientSession, number: int) -> Answer:
        wanted, is_stream = 2 + number % 7, number % 2 == 0
        body = {"prompt": f"rollout {number}", "max_tokens": wanted, "stream": is_stream}
        headers = {"X-Request-Id": f"load-{number}"}
        async with http.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
            text = await answer.text()
            found = {name.lower(): value for name, value in answer.headers.items()}
        return Answer(f"load-{number}", wanted, is_stream, answer.status, found, text)

    def count(self, version: str) -> int:
        """How many answers were promised this version."""
        return sum(answer.headers.get("x-weight-version") == version for answer in self.answers)


@pytest.mark.parametrize("mode", [PauseOnUpdate.KEEP, PauseOnUpdate.WAIT, PauseOnUpdate.ABORT])
async def test_ten_updates_under_full_load_lose_and_mislabel_no_rollout(
    mode: PauseOnUpdate,
) -> None:
    """None lost, none asked twice, none at an engine between start and finish, every label true."""
    async with case_of(OPTIONS, pause_on_update=mode) as case:
        async with load_on(case.served.url) as load:
            await _update_ten_times(case, load)
        assert load.lost == []
        assert {answer.status for answer in load.answers} == {200}
        checksums = {"default": replica_checksum(build_state_dict(0))} | {
            version: replica_checksum(build_state_dict(int(version))) for version in VERSIONS[1:]
        }
        _check_each_ran_once(case, load)
        _check_dispatches(case, load)
        _check_ends(load, mode, checksums)
        assert {answer.label for answer in load.answers} == set(VERSIONS)
        assert await _count_held(case) >= UPDATES


@asynccontextmanager
async def load_on(url: str) -> AsyncGenerator[Load]:
    """Keep more than CLIENTS rollouts under way; on leaving, those under way are the last."""
    load = Load(url)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(load.ask_on(http))
        group.create_task(load.keep_coming(http, group))
        yield load
        load.is_over = True


async def _update_ten_times(case: Case, load: Load) -> None:
    trainer = SimTrainer(case.served.url, timeout_s=30)
    try:
        await asyncio.to_thread(trainer.init)
        for version in VERSIONS[1:]:
            await _until_full(case, load, str(int(version) - 1) if version != "1" else "default")
            await asyncio.to_thread(trainer.send_weights, build_state_dict(int(version)))
        await _until_full(case, load, VERSIONS[-1])
    finally:
        trainer.close()


async def _until_full(case: Case, load: Load, version: str) -> None:
    """Wait for full load at the replicas, and for some whole answers under this version."""

    async def reached() -> bool:
        running = sum(replica.stats()["running"] for replica in case.replicas)
        return running >= IN_FLIGHT and load.count(version) >= ENOUGH

    await wait_until(reached, timeout_s=30)


async def _count_held(case: Case) -> float:
    """How many rollouts had to wait at the gate."""
    lines = (await case.http.get("/metrics")).text.splitlines()
    [found] = [line for line in lines if line.startswith("fleet_rollout_held_seconds_count ")]
    return float(found.split(" ")[1])


def _records(case: Case) -> dict[str, list[tuple[SimReplica, RolloutRecord]]]:
    """Every rollout that any replica ran, by the client's request id."""
    found: dict[str, list[tuple[SimReplica, RolloutRecord]]] = {}
    for replica in case.replicas:
        for record in replica.log.rollouts:
            found.setdefault(record.request_id.removeprefix("cmpl-"), []).append((replica, record))
    return found


def _check_each_ran_once(case: Case, load: Load) -> None:
    records = _records(case)
    assert set(records) == {answer.request_id for answer in load.answers}
    assert {len(runs) for runs in records.values()} == {1}
    for answer in load.answers:
        [(replica, record)] = records[answer.request_id]
        assert answer.headers["x-fleet-replica"] == replica.id
        assert record.outcome == ("aborted" if answer.reason == "abort" else "finished")
        assert record.tokens == sum(span["end"] - span["start"] for span in answer.spans)
        assert answer.reason == "abort" or record.tokens == answer.wanted


def _check_dispatches(case: Case, load: Load) -> None:
    """Held against each replica's own clock: outside of updates, and labelled as it was then."""
    labels = {answer.request_id: answer.label for answer in load.answers}
    for replica in case.replicas:
        starts = [call.t_start for call in posts(replica, START)]
        finishes = [call.t_end or 0.0 for call in posts(replica, FINISH)]
        assert len(starts) == len(finishes) == UPDATES
        for record in replica.log.rollouts:
            begun = bisect_right(starts, record.t_start)
            ended = bisect_right(finishes, record.t_start)
            assert begun == ended, f"{record} came in the middle of update {begun}"
            assert labels[record.request_id.removeprefix("cmpl-")] == VERSIONS[ended]


def _check_ends(load: Load, mode: PauseOnUpdate, checksums: dict[str, str]) -> None:
    """The last token came under the version that the end names, and versions mean weights."""
    for answer in load.answers:
        versions = [span["version"] for span in answer.spans]
        for span in answer.spans:
            assert span["checksum"] == checksums[span["version"]]
        assert answer.end != answer.label
        if not answer.is_stream and versions:
            assert versions[-1] == (answer.end or answer.label), answer
        if mode is not PauseOnUpdate.KEEP:
            assert set(versions) <= {answer.label}
    spanning = Counter(len(answer.spans) > 1 for answer in load.answers)
    aborted = Counter(answer.reason for answer in load.answers)["abort"]
    assert bool(spanning[True]) == (mode is PauseOnUpdate.KEEP)
    assert bool(aborted) == (mode is PauseOnUpdate.ABORT)
