"""What prefix caches rest on after an update, seen on real servers.

A prompt longer than one KV block leaves its KV in the cache. Whether it is used after an update
shows in log-probabilities: they change when the cache is dropped, or they do not. Each server is
asked directly, so that both numbers come from the same one.
"""

from typing import Any

import httpx
import pytest

from tests.e2e.gateway_process import RunningGateway
from tests.e2e.real_vllm import MODEL_NAME, RealFleet, RealServer
from tests.e2e.trainer import TinyTrainer, joined_trainer

KV_BLOCK = 128  # tokens, on a CPU
LONG_PROMPT = [7 + number % 200 for number in range(KV_BLOCK + 17)]
SAME = 1e-3  # old KV moved them by 0.01 to 0.31


def test_no_token_after_an_update_rests_on_kv_of_the_old_weights(
    gateway: RunningGateway, real_fleet: RealFleet
) -> None:
    """The round's own pause clears the caches: dropping them once more changes nothing."""
    with joined_trainer(gateway.url, world_size=3) as trainer:
        prime(trainer, real_fleet)
        trainer.send(82)
        for server in real_fleet.servers:
            after = first_logprob(server)
            server.post("/reset_prefix_cache")
            assert first_logprob(server) == pytest.approx(after, abs=SAME)
    assert gateway.fleet()["kv"] == "current"
    assert label(gateway) is None


def test_a_trainer_that_keeps_the_caches_gets_mixed_kv_and_is_told_so(
    gateway: RunningGateway, real_fleet: RealFleet
) -> None:
    """Its pause with clear_cache=false stands; fleet, round and answers say mixed until a reset."""
    with joined_trainer(gateway.url, world_size=3) as trainer:
        prime(trainer, real_fleet)
        gateway.post("/pause?mode=keep&clear_cache=false")
        trainer.send(84)
        gateway.post("/resume")
    stale = [first_logprob(server) for server in real_fleet.servers]
    assert gateway.fleet()["kv"] == "mixed"
    assert gateway.get("/fleet/rounds")["rounds"][0]["kv"] == "mixed"
    assert label(gateway) == "mixed"
    assert gateway.post("/reset_prefix_cache")["success"] is True
    assert gateway.fleet()["kv"] == "current"
    assert label(gateway) is None
    for server, before in zip(real_fleet.servers, stale, strict=True):
        assert first_logprob(server) != pytest.approx(before, abs=SAME)


def prime(trainer: TinyTrainer, real_fleet: RealFleet) -> None:
    """Fill every server's prefix cache with KV of known weights."""
    trainer.send(81)
    for server in real_fleet.servers:
        first_logprob(server)


def first_logprob(server: RealServer) -> float:
    """The log-probability of the first token after the long prompt."""
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": LONG_PROMPT,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
    }
    return server.post("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"][0]


def label(gateway: RunningGateway) -> str | None:
    """What an answer's header says about the KV that it may rest on."""
    body = {"model": MODEL_NAME, "prompt": [7, 8, 9], "max_tokens": 1}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
    return answer.raise_for_status().headers.get("X-Weight-Version-Kv")
