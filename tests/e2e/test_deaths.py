"""Real servers and gateways killed in the middle of an update by a stock trainer."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import requests

from fleet.sim.trainer import TrainerError
from tests.e2e.gateway_process import RunningGateway, running_gateway
from tests.e2e.real_vllm import RealFleet
from tests.e2e.rollouts import ask
from tests.e2e.trainer import BETWEEN_Q_AND_K, at_broadcast, joined_trainer

PROMPTS = [[7, 300, 12, 45]]
QUICK = {"FLEET_TIMEOUTS__LEASE_S": "2", "FLEET_TIMEOUTS__LEASE_RENEW_S": "0.4"}


def test_a_server_killed_in_the_middle_of_an_update_is_named_and_the_rest_is_healed_later(
    gateway: RunningGateway, real_fleet: RealFleet
) -> None:
    """Promises 2 and 5: an error at once, no mixed weights, and the next full update heals."""
    dead, survivor = real_fleet.servers[1], real_fleet.servers[0]
    with joined_trainer(gateway.url, world_size=3, timeout_s=20) as trainer:
        trainer.send(71)
        before = gateway.version
        trainer.take(72)
        at_broadcast(trainer, BETWEEN_Q_AND_K, lambda: dead.signal(signal.SIGKILL))
        with pytest.raises((requests.HTTPError, TrainerError, RuntimeError)) as caught:
            trainer.engine.send_weights()
    newest = gateway.get("/fleet/rounds")["rounds"][0]
    assert newest["result"] == "failed", caught.value
    assert dead.url.removeprefix("http://") in newest["reason"]
    assert gateway.version == before
    assert gateway.states()[survivor.url] in ("fenced", "wedged")
    gateway.wait_until(lambda: gateway.states()[dead.url] == "gone")
    real_fleet.revive()
    gateway.wait_for_states("fenced", "stale")
    with joined_trainer(gateway.url, world_size=3) as trainer:
        trainer.send(73)
        checksums = gateway.post("/weight_checker", {"action": "checksum"})["checksums"]
        for server in real_fleet.servers:
            assert server.checksums() == checksums
            assert trainer.explains(PROMPTS[0], server.greedy(PROMPTS[0], 16))
    gateway.wait_for_states("ready", "ready")


def test_a_gateway_killed_between_update_and_finish_is_replaced_by_another(
    real_fleet: RealFleet, redis_url: str, tmp_path: Path
) -> None:
    """Case 28: the held rollout is answered by the new weights once the other one has finished."""
    settings = {"FLEET_STORE": redis_url, **QUICK}
    with (
        running_gateway(real_fleet.urls, tmp_path / "one.log", settings) as one,
        running_gateway(real_fleet.urls, tmp_path / "two.log", settings) as two,
        joined_trainer(one.url, world_size=3) as trainer,
        httpx.Client(base_url=two.url, timeout=60) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        trainer.send(81)
        client, held = trainer.engine.client, threading.Event()

        def finish() -> None:
            answer = pool.submit(ask, http, PROMPTS[0], 4)
            two.wait_until(lambda: two.fleet()["gate"]["held"] == 1)
            one.kill()
            assert two.fleet()["phase"] == "started"
            two.post("/finish_weight_update", {"weight_version": "after"})
            assert answer.result().version == "after"
            held.set()

        client.finish_weight_update = finish
        trainer.send(82)
        assert held.is_set()
        assert two.version == "after"
        two.wait_for_states("ready", "ready")
        for server in real_fleet.servers:
            assert trainer.explains(PROMPTS[0], server.greedy(PROMPTS[0], 16))
