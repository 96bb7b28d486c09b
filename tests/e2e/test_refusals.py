"""What the gateway refuses, and how a trainer gets on from there, shown on real servers.

Here are the refusals whose point is what a real server would have done otherwise: hang in a
rendezvous, take traffic with the wrong weights, miss a rank.
"""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import requests

from tests.e2e.gateway_process import RunningGateway
from tests.e2e.real_vllm import RealFleet, RealServer
from tests.e2e.rollouts import ANSWER_S, ask
from tests.e2e.trainer import BETWEEN_Q_AND_K, TinyTrainer, at_broadcast, joined_trainer

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
        assert name_of(victim) in refusal["error"]["message"]
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


def test_a_server_killed_in_the_middle_of_an_update_costs_no_rollout(
    gateway: RunningGateway, real_fleet: RealFleet
) -> None:
    """The half-loaded survivor is fenced and asked nothing; after a full update it answers."""
    survivor, victim = real_fleet.servers
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=gateway.url, timeout=ANSWER_S) as http,
    ):
        with joined_trainer(gateway.url, world_size=3) as trainer:
            trainer.send(94)
            at_broadcast(trainer, BETWEEN_Q_AND_K, lambda: victim.signal(signal.SIGKILL))
            failure = refused(lambda: trainer.send(95), status=424)
        assert failure["replicas"][name_of(victim)]["outcome"] == "unreachable"
        gateway.wait_for_states("fenced", "gone")
        assert gateway.version == "1"
        waiting = pool.submit(ask, http, PROMPT, 8)
        gateway.wait_until(lambda: gateway.fleet()["gate"]["held"] == 1)
        with joined_trainer(gateway.url, world_size=2) as trainer:
            trainer.send(96)
            answer = waiting.result(ANSWER_S)
            assert (answer.version, answer.replica) == ("2", name_of(survivor))
            assert trainer.explains(answer.prompt, answer.tokens)
    assert survivor.alive()


@pytest.mark.parametrize("gateway_settings", [{"FLEET_TIMEOUTS__UPDATE_S": "5"}])
def test_a_server_that_falls_silent_in_an_update_is_named_and_nobody_waits_for_it(
    gateway: RunningGateway, real_fleet: RealFleet
) -> None:
    """The deadline ends the wait; the other is free when the collective's own time is over.

    Then it goes on alone, and an init takes the silent one in once it answers again.
    """
    survivor, silent = real_fleet.servers
    try:
        with joined_trainer(gateway.url, world_size=3, timeout_s=8) as trainer:
            trainer.send(97)
            at_broadcast(trainer, BETWEEN_Q_AND_K, lambda: silent.signal(signal.SIGSTOP))
            failure = refused(lambda: trainer.send(98), status=504)
        assert failure["replicas"][name_of(silent)]["outcome"] == "wedged"
        gateway.wait_for_states("fenced", "wedged")
        with joined_trainer(gateway.url, world_size=2) as trainer:
            trainer.send(99)
            assert answered_by(gateway, trainer) == {survivor.url}
    finally:
        silent.signal(signal.SIGCONT)
    gateway.wait_for_states("ready", "fenced")
    with joined_trainer(gateway.url, world_size=3) as trainer:
        trainer.send(100)
        gateway.wait_for_states("ready", "ready")
        assert answered_by(gateway, trainer) == {survivor.url, silent.url}


def name_of(server: RealServer) -> str:
    """The server's id in the fleet."""
    return server.url.removeprefix("http://")


def inits_seen(real_fleet: RealFleet) -> list[int]:
    """How many init calls each server has logged."""
    return [log.read_text(errors="replace").count(INIT) for log in real_fleet.logs]


def refused(call: Callable[[], object], status: int = 409) -> Any:
    """The body of the refusal that the stock client raises in this call."""
    with pytest.raises(requests.HTTPError) as refusal:
        call()
    response = refusal.value.response
    assert response is not None
    assert response.status_code == status, response.text
    return response.json()


def answered_by(gateway: RunningGateway, trainer: TinyTrainer) -> set[str]:
    """Ask several times; every answer is made by the trainer's weights; who answered."""
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        answers = [ask(http, [*PROMPT, number], 8) for number in range(6)]
    for answer in answers:
        assert trainer.explains(answer.prompt, answer.tokens)
    return {f"http://{answer.replica}" for answer in answers}
