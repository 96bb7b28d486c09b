"""The simulated trainer against one replica of two workers: rounds, refusals, bounded waits."""

import asyncio
import time

import pytest

from fleet.backends.gloo_group import GlooError
from fleet.sim import SimFleet
from fleet.sim.generation import expected_text
from fleet.sim.trainer import SimTrainer, TrainerError
from fleet.sim.weights import build_state_dict, replica_checksum
from tests.sim.conftest import Http


async def test_rounds_arrive_and_the_second_has_empty_metadata(http: Http) -> None:
    """What the trainer sent is what both workers hold and answer from."""
    async with SimFleet(world_size=2) as fleet:
        replica = fleet.replicas[0]
        await asyncio.to_thread(_two_rounds, replica.url)
        weights = build_state_dict(2)
        assert replica.checksum == replica_checksum(weights)
        assert replica.engine.version == "v2"
        bodies = replica.log.bodies("/update_weights")
        assert [bool(body["update_info"]["names"]) for body in bodies] == [True, False]
        answer = await http.complete(replica, "hello", 6)
        assert answer["choices"][0]["text"] == expected_text(replica.checksum, "hello", 6)


def _two_rounds(url: str) -> None:
    trainer = SimTrainer(url, timeout_s=20)
    trainer.init()
    trainer.send_weights(build_state_dict(1), "v1")
    trainer.send_weights(build_state_dict(2), "v2")
    trainer.close()


async def test_refused_init_ends_at_once_and_says_why() -> None:
    """The trainer does not wait for a group whose members were told no."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        replica.faults.add("/init_weight_transfer_engine", "status", status=409, body={"e": "no"})
        trainer = SimTrainer(replica.url, timeout_s=20)
        began = time.monotonic()
        with pytest.raises(TrainerError, match=r'409: \{"e":"no"\}'):
            await asyncio.to_thread(trainer.init)
        assert time.monotonic() - began < 5
        trainer.close()


async def test_refused_update_ends_the_broadcast() -> None:
    """A broadcast that nobody receives is left, and the answer's text is what is raised."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        trainer = SimTrainer(replica.url, timeout_s=20)
        await asyncio.to_thread(trainer.init)
        replica.faults.add("/update_weights", "status", status=424, body={"e": "failed"})
        began = time.monotonic()
        with pytest.raises(TrainerError, match="424"):
            await asyncio.to_thread(trainer.send_weights, build_state_dict(1))
        assert time.monotonic() - began < 5
        trainer.close()


async def test_death_in_an_update_reaches_the_trainer() -> None:
    """A replica that dies while it receives breaks the call and the group."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        trainer = SimTrainer(replica.url, timeout_s=20)
        await asyncio.to_thread(trainer.init)
        replica.faults.add("/update_weights", "die")
        began = time.monotonic()
        with pytest.raises((TrainerError, GlooError)):
            await asyncio.to_thread(trainer.send_weights, build_state_dict(1))
        assert time.monotonic() - began < 5
        trainer.close()
