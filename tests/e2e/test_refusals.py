"""What the gateway refuses, and how a trainer gets on from there, shown on real servers.

Here are the refusals whose point is what a real server would have done otherwise: hang in a
rendezvous, take traffic with the wrong weights, miss a rank.
"""

import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import requests

from tests.e2e.gateway_process import RunningGateway
from tests.e2e.real_vllm import RealFleet
from tests.e2e.rollouts import ask
from tests.e2e.trainer import TinyTrainer, joined_trainer

PROMPT = [7, 300, 12, 45]
INIT = "POST /init_weight_transfer_engine"


@pytest.mark.parametrize("wrong", [2, 4])
def test_a_wrong_world_size_is_refused_before_any_server_hears_of_it(
    gateway: RunningGateway, real_fleet: RealFleet, wrong: int
) -> None:
    """The stock trainer gets 409 with the right number at once; with it the next init works."""
    before = inits_seen(real_fleet)
    refusal = refused(lambda: joined_trainer(gateway.url, world_size=wrong).__enter__())
    assert "world_size=3" in refusal["hint"]
    assert inits_seen(real_fleet) == before
    with joined_trainer(gateway.url, world_size=3):
        assert inits_seen(real_fleet) == [count + 1 for count in before]


def test_a_server_killed_after_init_is_left_behind_and_taken_back_by_a_later_init(
    gateway: RunningGateway, real_fleet: RealFleet
) -> None:
    """Start names the new world size, the survivor goes on alone, the revived one waits."""
    survivor, victim = real_fleet.servers
    with joined_trainer(gateway.url, world_size=3) as trainer:
        trainer.send(91)
        victim.signal(signal.SIGKILL)
        refusal = refused(lambda: trainer.send(99))
        assert "world_size=2" in refusal["hint"]
        assert victim.url.removeprefix("http://") in refusal["error"]["message"]
    with joined_trainer(gateway.url, world_size=2) as trainer:
        trainer.send(92)
        assert gateway.version == "2"
        assert answered_by(gateway, trainer) == {survivor.url}
        real_fleet.revive()
        gateway.wait_for_states("ready", "stale")
        assert answered_by(gateway, trainer) == {survivor.url}
    with joined_trainer(gateway.url, world_size=3) as trainer:
        trainer.send(93)
        gateway.wait_for_states("ready", "ready")
        assert answered_by(gateway, trainer) == {survivor.url, victim.url}
        assert victim.get("/weight_info") == {"weight_version": "3"}


def inits_seen(real_fleet: RealFleet) -> list[int]:
    """How many init calls each server has logged."""
    return [log.read_text(errors="replace").count(INIT) for log in real_fleet.logs]


def refused(call: Callable[[], object]) -> Any:
    """The body of the 409 that the stock client raises in this call."""
    with pytest.raises(requests.HTTPError) as refusal:
        call()
    response = refusal.value.response
    assert response is not None
    assert response.status_code == 409
    return response.json()


def answered_by(gateway: RunningGateway, trainer: TinyTrainer) -> set[str]:
    """Ask several times; every answer is made by the trainer's weights; who answered."""
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        answers = [ask(http, [*PROMPT, number], 8) for number in range(6)]
    for answer in answers:
        assert trainer.explains(answer.prompt, answer.tokens)
    return {f"http://{answer.replica}" for answer in answers}
