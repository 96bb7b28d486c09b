"""The trainer's own pause and resume, and what the prefix caches rest on afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fleet.sim import SimOptions
from fleet.sim.generation import expected_text
from fleet.sim.trainer import SimTrainer
from fleet.sim.weights import build_state_dict, replica_checksum
from tests.cases.conftest import FINISH, START, UPDATE, Case, case_of, check_error

PROMPT = "a prompt that is much longer than one block of the KV cache, which has 16 tokens"


async def test_a_fleet_that_the_trainer_paused_stays_paused_after_finish() -> None:
    """What the trainer paused, the trainer resumes; the round pauses and resumes nothing."""
    async with case_of() as case:
        await case.first_sync()
        case.forget_logs()
        await case.ok("/pause?mode=keep")
        await case.sync("2")
        assert await case.states() == ["paused"] * 3
        assert case.all_sent() == [["/pause", START, UPDATE, FINISH]] * 3
        assert (await case.http.get("/is_paused")).json() == {"is_paused": True}
        await case.ok("/resume")
        assert await case.states() == ["ready"] * 3
        assert (await case.complete()).headers["X-Weight-Version"] == "2"


async def test_a_resume_inside_start_and_finish_is_refused() -> None:
    """A running engine in a session dies: 409, and no replica hears of it."""
    async with case_of() as case:
        await case.first_sync()
        for step in (case.start, case.update):
            assert (await step()).status_code == 200
            case.forget_logs()
            check_error(await case.post("/resume"), 409, "resume")
            assert case.all_sent() == [[], [], []]
        assert (await case.finish()).status_code == 200
        await case.ok("/resume")


async def test_a_pause_inside_a_round_outlives_it() -> None:
    """The replicas are paused already; after finish the fleet waits for the trainer."""
    async with case_of() as case:
        await case.first_sync()
        assert (await case.start()).status_code == 200
        await case.ok("/pause?mode=keep")
        assert (await case.update()).status_code == 200
        assert (await case.finish()).status_code == 200
        assert await case.states() == ["paused"] * 3
        assert [r.engine.paused for r in case.replicas] == ["keep"] * 3
        await case.ok("/resume")
        assert await case.states() == ["ready"] * 3


async def test_pause_and_resume_are_idempotent() -> None:
    """Twice is once; `since` is when it began."""
    async with case_of() as case:
        await case.ok("/pause?mode=keep")
        since = (await case.fleet())["pause"]["since"]
        await case.ok("/pause?mode=keep")
        assert (await case.fleet())["pause"]["since"] == since
        for _ in range(2):
            assert (await case.ok("/resume"))["status"] == "resumed"
        assert await case.states() == ["ready"] * 3
        assert (await case.fleet())["pause"] is None


async def test_a_second_pause_that_fails_leaves_the_first_one_standing() -> None:
    """A failed call leaves the fleet as it found it: paused."""
    async with case_of() as case:
        await case.ok("/pause?mode=keep")
        case.replicas[1].faults.add("/pause", "status")
        check_error(await case.post("/pause?mode=wait"), 503)
        assert await case.states() == ["paused"] * 3
        assert (await case.fleet())["pause"]["mode"] == "keep"
        assert [r.engine.paused is not None for r in case.replicas] == [True] * 3


async def test_a_resume_that_failed_on_one_is_told_and_may_be_repeated() -> None:
    """Not a 2xx: TRL and vLLM's client take any of those for success."""
    async with case_of() as case:
        await case.ok("/pause")
        case.replicas[1].faults.add("/resume", "status")
        check_error(await case.post("/resume"), 424, case.replicas[1].id)
        await case.ok("/resume")
        assert await case.states() == ["ready"] * 3
        assert [r.engine.paused for r in case.replicas] == [None] * 3


async def test_without_clearing_the_caches_are_mixed_until_they_are_cleared() -> None:
    """clear_cache=false: header, /fleet and the round's record say so; the tokens show it."""
    async with _gloo() as (case, trainer):
        await _warm_up(case)
        await case.ok("/pause?mode=keep&clear_cache=false")
        await asyncio.to_thread(trainer.send_weights, build_state_dict(1))
        await case.ok("/resume")
        assert (await case.fleet())["kv"] == "mixed"
        assert (await case.rounds())[0]["kv"] == "mixed"
        await _check_answers(case, seed=1, stale=True)
        assert (await case.ok("/reset_prefix_cache"))["success"]
        assert (await case.fleet())["kv"] == "current"
        await _check_answers(case, seed=1, stale=False)


async def test_a_later_clearing_pause_ends_the_mixture() -> None:
    """«Until the next clearing»: a round that pauses by itself clears."""
    async with _gloo() as (case, trainer):
        await _warm_up(case)
        await case.ok("/pause?mode=keep&clear_cache=false")
        await asyncio.to_thread(trainer.send_weights, build_state_dict(1))
        await case.ok("/resume")
        await asyncio.to_thread(trainer.send_weights, build_state_dict(2))
        assert (await case.fleet())["kv"] == "current"
        assert [r["kv"] for r in await case.rounds()] == ["current", "mixed"]
        await _check_answers(case, seed=2, stale=False)


@pytest.mark.parametrize("paused_by", ["the round", "the trainer"])
async def test_with_clearing_the_caches_are_never_mixed(paused_by: str) -> None:
    """clear_cache=true: no token after the commit rests on KV of the old weights."""
    async with _gloo() as (case, trainer):
        await _warm_up(case)
        if paused_by == "the trainer":
            await case.ok("/pause?mode=keep&clear_cache=true")
        await asyncio.to_thread(trainer.send_weights, build_state_dict(1))
        await case.ok("/resume")
        assert (await case.fleet())["kv"] == "current"
        assert (await case.rounds())[0]["kv"] == "current"
        await _check_answers(case, seed=1, stale=False)


async def test_a_clearing_pause_inside_a_round_does_not_hide_what_was_not_cleared() -> None:
    """The first pause kept the caches; if the second is not sent, they still are what they were."""
    async with _gloo() as (case, trainer):
        await _warm_up(case)
        await case.ok("/pause?mode=keep&clear_cache=false")
        await asyncio.to_thread(trainer.post, START)
        await case.ok("/pause?mode=keep&clear_cache=true")
        await asyncio.to_thread(trainer.update, build_state_dict(1))
        await asyncio.to_thread(trainer.post, FINISH)
        await case.ok("/resume")
        assert (await case.fleet())["kv"] == "mixed"
        await _check_answers(case, seed=1, stale=True)


async def test_a_pause_inside_a_round_without_clearing_finds_the_caches_cleared() -> None:
    """The round's own pause has dropped them, and nothing has run since."""
    async with _gloo() as (case, trainer):
        await _warm_up(case)
        await asyncio.to_thread(trainer.post, START)
        await case.ok("/pause?mode=keep&clear_cache=false")
        await asyncio.to_thread(trainer.update, build_state_dict(1))
        await asyncio.to_thread(trainer.post, FINISH)
        await case.ok("/resume")
        assert (await case.fleet())["kv"] == "current"
        await _check_answers(case, seed=1, stale=False)


async def test_with_pause_off_the_caches_are_reset_after_the_commit() -> None:
    """Nothing was paused, so nothing was cleared on the way."""
    async with _gloo(pause_on_update="off") as (case, trainer):
        await _warm_up(case)
        await asyncio.to_thread(trainer.send_weights, build_state_dict(1))
        for replica in case.replicas:
            assert replica.log.paths()[-2:] == [FINISH, "/reset_prefix_cache"]
        await _check_answers(case, seed=1, stale=False)


@asynccontextmanager
async def _gloo(**settings: Any) -> AsyncGenerator[tuple[Case, SimTrainer]]:
    """Two replicas with real weights and a trainer in their group."""
    async with case_of(SimOptions(replicas=2), **settings) as case:
        trainer = SimTrainer(case.served.url, timeout_s=20)
        try:
            await asyncio.to_thread(trainer.init)
            yield case, trainer
        finally:
            trainer.close()


async def _warm_up(case: Case) -> None:
    """Let every replica have the prompt's KV, of the weights it holds now."""
    for _ in case.replicas:
        assert (await case.complete(PROMPT)).status_code == 200
    assert all(len(replica.log.rollouts) == 1 for replica in case.replicas)


async def _check_answers(case: Case, seed: int, *, stale: bool) -> None:
    weights = replica_checksum(build_state_dict(seed))
    for _ in case.replicas:
        answer = await case.complete(PROMPT, 8)
        assert answer.json()["sim"]["checksum"] == weights
        assert answer.headers.get("X-Weight-Version-Kv") == ("mixed" if stale else None)
        fresh = answer.json()["choices"][0]["text"] == expected_text(weights, PROMPT, 8)
        assert fresh is not stale
