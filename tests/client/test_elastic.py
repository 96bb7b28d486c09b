"""A trainer's session over a fleet that changes: a real gateway, simulated replicas, real gloo."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import SecretStr

from fleet.client import FleetWeightSyncClient
from fleet.client.elastic import ElasticSession, Persistence
from fleet.client.errors import MemberFailed, MembershipChanged, RoundOpen, Unauthenticated
from fleet.sim import SimOptions
from gateway.settings_model import Auth
from tests.cases.conftest import INIT, START, UPDATE, Case, case_of, fast, posts
from tests.client.conftest import aside, url_of
from tests.client.gloo_engine import InitInfo, Weights, trainer_init

QUICK = Persistence(first_wait_s=0.05, longest_wait_s=0.5, settle_s=1, last_word_s=5)


@dataclass
class Training:
    """A trainer of one rank, the session that it has, and the fleet that it trains for."""

    case: Case
    weights: Weights
    session: ElasticSession

    async def sync(self, seed: int, version: str | None = None) -> None:
        """Bring the fleet to the weights of this seed."""
        self.weights.seed = seed
        await aside(self.session.send_weights, weight_version=version)

    def check_weights(self, *replicas: int) -> None:
        """These replicas hold what was sent last."""
        held = {self.case.replicas[index].checksum for index in replicas}
        assert held == {self.weights.checksum}

    def logged(self, path: str, replica: int = 0) -> list[Any]:
        """The bodies that a replica got on one path."""
        return [call.body for call in posts(self.case.replicas[replica], path)]


@asynccontextmanager
async def training(replicas: int = 2, **settings: Any) -> AsyncGenerator[Training]:
    """A session that has not met anybody yet."""
    options = SimOptions(replicas=replicas, backend="gloo")
    async with case_of(options, **settings) as case:
        weights = Weights()
        with FleetWeightSyncClient(url_of(case)) as client:
            session = ElasticSession(
                client, InitInfo, weights, persistence=QUICK, trainer_init=trainer_init
            )
            yield Training(case, weights, session)
            await aside(session.close)


async def test_rounds_over_an_unchanged_fleet_share_one_group() -> None:
    """One init; from the second round on no metadata, as vLLM's engines have it."""
    async with training() as trainer:
        for seed in (1, 2, 3):
            await trainer.sync(seed, version=f"step-{seed}")
            trainer.check_weights(0, 1)
        assert await trainer.case.version() == "step-3"
        assert len(trainer.logged(INIT)) == 1
        names = [len(body["update_info"]["names"]) for body in trainer.logged(UPDATE)]
        assert names[0] > 0
        assert names[1:] == [0, 0]


async def test_a_replica_that_died_between_rounds_is_left_behind() -> None:
    """Start would be refused; the session meets who is left and sends with metadata."""
    async with training(3) as trainer:
        await trainer.sync(1)
        await trainer.case.replicas[2].die()
        await trainer.sync(2)
        trainer.check_weights(0, 1)
        assert trainer.session.world_size == 3
        assert await trainer.case.version() == "2"
        assert all(body["update_info"]["names"] for body in trainer.logged(UPDATE))


async def test_a_newcomer_is_in_from_the_next_round_on() -> None:
    """It is stale until then; the trainer is not restarted."""
    async with training() as trainer:
        await trainer.sync(1)
        newcomer = await trainer.case.sim.add()
        await trainer.case.ok("/fleet/replicas", {"url": newcomer.url})
        await trainer.case.await_states("ready", "ready", "stale")
        await trainer.sync(2)
        assert trainer.session.world_size == 4
        trainer.check_weights(0, 1, 2)
        assert await trainer.case.states() == ["ready", "ready", "ready"]


async def test_a_replica_that_restarted_comes_back_with_the_next_round() -> None:
    """Same address, other process, initial weights."""
    async with training() as trainer:
        await trainer.sync(1)
        await trainer.case.replicas[0].restart()
        await trainer.sync(2)
        trainer.check_weights(0, 1)


async def test_a_start_that_finds_the_membership_changed_is_followed_by_a_new_group() -> None:
    """The loss shows only then: 409, K; once more with K, at once and logged."""
    async with training(3) as trainer:
        await trainer.sync(1)
        gateway = trainer.session.client
        info = gateway.weight_info

        def ask_then_lose() -> str:
            version = info()
            trainer.case.replicas[1].faults.add(START, "die")
            return version

        gateway.weight_info = ask_then_lose
        await trainer.sync(2)
        gateway.weight_info = info
        trainer.check_weights(0, 2)
        assert await trainer.case.version() == "2"


async def test_a_replica_that_dies_in_mid_update_costs_one_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The survivors were fenced; the whole update, sent again, heals them."""
    async with training(3) as trainer:
        await trainer.sync(1)
        trainer.case.replicas[1].faults.add(UPDATE, "die")
        with caplog.at_level(logging.WARNING, "fleet.client.elastic"):
            await trainer.sync(2, version="two")
        assert "once more" in caplog.text
        trainer.check_weights(0, 2)
        assert await trainer.case.version() == "two"
        assert [r["result"] for r in await trainer.case.rounds()][:2] == ["committed", "failed"]


async def test_a_replica_that_fails_an_update_is_in_the_next_attempt() -> None:
    """An error is no death. Who waited for it in the collective is free by then, or comes later."""
    async with training(3) as trainer:
        trainer.case.replicas[1].faults.add(UPDATE, "status", status=500)
        await trainer.sync(1)
        trainer.check_weights(1)
        await trainer.case.await_nobody("wedged")
        await trainer.sync(2)
        trainer.check_weights(0, 1, 2)
        assert await trainer.case.states() == ["ready", "ready", "ready"]


async def test_attempts_are_bounded_and_the_last_reason_is_raised() -> None:
    """Nobody is left to train for."""
    async with training() as trainer:
        await trainer.sync(1)
        for replica in trainer.case.replicas:
            await replica.die()
        await trainer.case.await_states("gone", "gone")
        with pytest.raises(MembershipChanged, match="no replica can join"):
            await trainer.sync(2)
        await trainer.case.replicas[0].restart()
        await trainer.case.await_states("stale", "gone")
        await trainer.sync(3)
        trainer.check_weights(0)


async def test_a_failed_round_leaves_no_label_behind() -> None:
    """The next round is not committed under the name of the one that failed."""
    async with training(1) as trainer:
        for replica in trainer.case.replicas:
            replica.faults.add(START, "status", status=500, times=0)
        with pytest.raises(MemberFailed, match="start failed"):
            await trainer.sync(1, version="lost")
        assert trainer.session.client.next_weight_version is None
        trainer.case.replicas[0].faults.clear()
        await trainer.sync(2)
        assert await trainer.case.version() == "1"


async def test_another_trainers_open_round_is_nothing_to_insist_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A second attempt would take the fleet away from it."""
    async with training() as trainer:
        await trainer.sync(1)
        await trainer.case.ok(START)
        with caplog.at_level(logging.WARNING, "fleet.client.elastic"), pytest.raises(RoundOpen):
            await trainer.sync(2)
        assert "once more" not in caplog.text
        assert len(trainer.logged(INIT)) == 1


async def test_a_wrong_token_is_raised_at_once() -> None:
    """No attempt helps."""
    async with training(auth=Auth(trainer_token=SecretStr("t"))) as trainer:
        with pytest.raises(Unauthenticated):
            await trainer.sync(1)


async def test_a_gateway_that_lost_the_group_gets_a_new_one() -> None:
    """An operator has reset it, say."""
    async with training(timeouts=fast()) as trainer:
        await trainer.sync(1)
        await trainer.case.ok("/fleet/reset")
        await trainer.sync(2)
        trainer.check_weights(0, 1)
