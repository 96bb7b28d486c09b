"""Rounds with real tensors and a real trainer: what fails, what is told, what is held then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from fleet.sim import SimOptions
from fleet.sim.faults import Action
from fleet.sim.generation import expected_text
from fleet.sim.trainer import SimTrainer, TrainerError
from fleet.sim.weights import build_state_dict, replica_checksum
from tests.cases.conftest import UPDATE, Case, case_of, fast


@pytest.mark.parametrize("kind", ["status", "die", "hang"])
async def test_an_update_that_failed_on_one_leaves_no_one_serving_until_it_is_repeated(
    kind: Action,
) -> None:
    """The others sat in the broadcast; a new init and a full update give all the same weights."""
    async with _gloo(update_s=2.0 if kind == "hang" else 60.0) as (case, trainer):
        await asyncio.to_thread(trainer.init)
        await asyncio.to_thread(trainer.send_weights, build_state_dict(1))
        case.replicas[1].faults.add(UPDATE, kind)
        with pytest.raises(TrainerError) as failed:
            await asyncio.to_thread(trainer.send_weights, build_state_dict(2))
        assert failed.value.path == UPDATE
        assert failed.value.status == (504 if kind == "hang" else 424)
        second = {"die": "gone", "hang": "wedged"}.get(kind, "fenced")
        await case.await_states("fenced", second, "fenced")
        assert await case.version() == "1"
        await asyncio.to_thread(trainer.init)
        await asyncio.to_thread(trainer.send_weights, build_state_dict(3))
        await _check_all_hold(case, seed=3, version="2", but=kind in ("die", "hang"))


async def test_a_trainer_that_inits_again_at_once_gets_the_whole_fleet() -> None:
    """Who only waited for the culprit is counted, though it takes a moment until it is free."""
    async with _gloo() as (case, trainer):
        await asyncio.to_thread(trainer.init)
        case.replicas[1].faults.add(UPDATE, "status", status=500)
        with pytest.raises(TrainerError):
            await asyncio.to_thread(trainer.send_weights, build_state_dict(2))
        await asyncio.to_thread(trainer.init)
        assert trainer.world_size == 4
        await asyncio.to_thread(trainer.send_weights, build_state_dict(3))
        await _check_all_hold(case, seed=3, version="1")


async def test_a_restarted_replica_gets_the_weights_that_the_others_got() -> None:
    """It is out of the group until the next init, whose first update names all tensors again."""
    async with _gloo() as (case, trainer):
        await asyncio.to_thread(trainer.init)
        await asyncio.to_thread(trainer.send_weights, build_state_dict(1))
        await case.replicas[2].restart()
        await case.await_states("ready", "ready", "stale")
        with pytest.raises(TrainerError, match="re-init with world_size=4") as refused:
            await asyncio.to_thread(trainer.send_weights, build_state_dict(2))
        assert refused.value.status == 409
        await asyncio.to_thread(trainer.init)
        await asyncio.to_thread(trainer.send_weights, build_state_dict(2))
        await _check_all_hold(case, seed=2, version="2")


async def test_unequal_replicas_receive_one_broadcast() -> None:
    """Case 2 with real ranks: 1, 2 and 4 workers hold the same tensors afterwards."""
    async with _gloo(world_sizes=(1, 2, 4)) as (case, trainer):
        await asyncio.to_thread(trainer.init)
        assert trainer.world_size == 8
        await asyncio.to_thread(trainer.send_weights, build_state_dict(5), "five")
        await _check_all_hold(case, seed=5, version="five")


async def test_three_versions_one_after_the_other_are_the_trainers_own() -> None:
    """From the second round on with empty metadata; the checker sees equal weights everywhere."""
    async with _gloo() as (case, trainer):
        await asyncio.to_thread(trainer.init)
        for seed in (1, 2, 3):
            await asyncio.to_thread(trainer.send_weights, build_state_dict(seed))
            await _check_all_hold(case, seed=seed, version=str(seed))
        checksums = (await case.ok("/weight_checker", {"action": "checksum"}))["checksums"]
        assert len(checksums) == len(build_state_dict(3))


@asynccontextmanager
async def _gloo(
    world_sizes: tuple[int, ...] = (1, 1, 1), **times: float
) -> AsyncGenerator[tuple[Case, SimTrainer]]:
    options = SimOptions(replicas=3, world_sizes=world_sizes, init_timeout_s=2.5)
    async with case_of(options, timeouts=fast(**times)) as case:
        trainer = SimTrainer(case.served.url, timeout_s=20)
        try:
            yield case, trainer
        finally:
            trainer.close()


async def _check_all_hold(case: Case, seed: int, version: str, *, but: bool = False) -> None:
    """Everyone (but the second, if it is out) holds these weights and answers from them."""
    weights = replica_checksum(build_state_dict(seed))
    members = [r for index, r in enumerate(case.replicas) if not (but and index == 1)]
    assert {r.checksum for r in members} == {weights}
    assert await case.version() == version
    served: set[str] = set()
    for _ in range(2 * len(members)):
        answer = await case.complete("what do you hold?", 6)
        assert answer.headers["X-Weight-Version"] == version
        assert answer.json()["choices"][0]["text"] == expected_text(weights, "what do you hold?", 6)
        served.add(answer.headers["X-Fleet-Replica"])
    assert served == {r.id for r in members}
