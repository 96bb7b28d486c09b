"""The pause that a round makes by itself: nothing lost, nothing in between, true labels."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import httpx
import pytest

from fleet.sim import SimReplica
from gateway.settings_model import PauseOnUpdate
from tests.cases.conftest import FINISH, START, UPDATE, Case, case_of, nccl, posts
from tests.waiting import wait_until

TOKENS = 60
CLIENTS = 6


@dataclass
class Rollouts:
    """Clients that keep asking, half of them streaming, and what they were answered."""

    case: Case
    answered: list[tuple[httpx.Headers, str, list[str]]] = field(default_factory=list)
    stop: bool = False

    async def ask(self, number: int) -> None:
        """Ask until told to stop."""
        turn = 0
        while not self.stop:
            turn += 1
            streamed = (number + turn) % 2 == 0
            body = {"prompt": f"{number}:{turn}", "max_tokens": TOKENS, "stream": streamed}
            answer = await self.case.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            facts, reason = _facts(answer, streamed=streamed)
            self.answered.append((answer.headers, reason, facts))

    async def have_seen_the_last(self) -> bool:
        """Whether a rollout was dispatched under the last version."""
        return any(headers["X-Weight-Version"] == "3" for headers, _, _ in self.answered)


def _facts(answer: httpx.Response, *, streamed: bool) -> tuple[list[str], str]:
    """The versions that made the tokens of an answer, and why it ended."""
    if not streamed:
        body = answer.json()
        spans = body["sim"]["choices"][0]["spans"]
        return [span["version"] for span in spans], body["choices"][0]["finish_reason"]
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    last = json.loads(lines[-2])
    spans = last["sim"]["choices"][0]["spans"]
    return [span["version"] for span in spans], last["choices"][0]["finish_reason"]


@pytest.mark.parametrize("mode", list(PauseOnUpdate))
async def test_three_updates_lose_no_rollout_in_flight(mode: PauseOnUpdate) -> None:
    """Streaming or not: all are answered, none ran between start and finish, labels are true."""
    async with case_of(nccl(3, token_delay_ms=3), pause_on_update=mode) as case:
        assert (await case.init()).status_code == 200
        rollouts = Rollouts(case)
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(rollouts.ask(number))
            for _ in range(3):
                await _until_all_busy(case)
                await case.sync()
            await wait_until(rollouts.have_seen_the_last)
            rollouts.stop = True
        assert await case.version() == "3"
        reasons = {reason for _, reason, _ in rollouts.answered}
        assert reasons <= {"length", "abort"} if mode is PauseOnUpdate.ABORT else {"length"}
        for replica in case.replicas:
            _check_replica(replica, mode)
        for headers, _, versions in rollouts.answered:
            _check_labels(headers, versions, mode)


async def _until_all_busy(case: Case) -> None:
    async def reached() -> bool:
        return all(replica.stats()["running"] for replica in case.replicas)

    await wait_until(reached)


def _check_replica(replica: SimReplica, mode: PauseOnUpdate) -> None:
    """From its own log: no rollout between start and finish, and what else it was told."""
    assert replica.log.outcomes["killed"] == replica.log.outcomes["refused"] == 0
    starts, finishes = posts(replica, START), posts(replica, FINISH)
    assert len(starts) == len(finishes) == 3
    for begun, over in zip(starts, finishes, strict=True):
        ended = over.t_end or float("inf")
        between = [r for r in replica.log.rollouts if begun.t_start <= r.t_start <= ended]
        assert not between
    one = [START, UPDATE, FINISH]
    off = mode is PauseOnUpdate.OFF
    one = [*one, "/reset_prefix_cache"] if off else ["/pause", *one, "/resume"]
    assert replica.log.paths()[1:] == one * 3
    for call in posts(replica, "/pause"):
        assert call.query == {"mode": [mode.value], "clear_cache": ["true"]}
    for call in posts(replica, "/reset_prefix_cache"):
        assert call.query == {"reset_running_requests": ["true"]}


def _check_labels(headers: httpx.Headers, versions: list[str], mode: PauseOnUpdate) -> None:
    """An answer is labelled with the version at dispatch, and at its end if that is another."""
    order = ["default", "1", "2", "3"]
    first = order.index(headers["X-Weight-Version"])
    made = [order.index(version) for version in versions]
    assert all(number >= first for number in made)
    assert "X-Weight-Version-Kv" not in headers
    if mode in (PauseOnUpdate.WAIT, PauseOnUpdate.OFF):
        assert versions == [headers["X-Weight-Version"]]


async def test_a_rollout_frozen_over_an_update_names_both_versions() -> None:
    """Mode keep: dispatched under one version, completed under the next."""
    async with case_of(nccl(1, token_delay_ms=2)) as case:
        await case.first_sync("old")
        rollout = asyncio.ensure_future(case.complete(max_tokens=200))
        await _until_all_busy(case)
        await case.sync("new")
        answer = await rollout
        assert answer.headers["X-Weight-Version"] == "old"
        assert answer.headers["X-Weight-Version-End"] == "new"
        spans = answer.json()["sim"]["choices"][0]["spans"]
        assert [span["version"] for span in spans] == ["old", "new"]


async def test_an_answer_within_one_version_has_no_second_label() -> None:
    """The second label is there only when it says something."""
    async with case_of(nccl(1)) as case:
        await case.first_sync("only")
        answer = await case.complete()
        assert answer.headers["X-Weight-Version"] == "only"
        assert "X-Weight-Version-End" not in answer.headers


async def test_a_fleet_that_never_synced_is_labelled_default() -> None:
    """As /weight_info says before the first version."""
    async with case_of() as case:
        assert (await case.complete()).headers["X-Weight-Version"] == "default"
        assert await case.version() == "default"
