"""The main job: vLLM's own trainer side and OpenAI's client know one URL, real servers behind it.

What only the real thing can show is here: that servers survive updates under load, that what
they answer was made by the weights on the label, that nobody needs to know of the gateway.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.e2e.gateway_process import RunningGateway
from tests.e2e.real_vllm import MODEL_NAME, RealFleet, RealServer
from tests.e2e.rollouts import IN_FLIGHT, Answer, ask, rollouts_through
from tests.e2e.tiny_model import build_model, made_by
from tests.e2e.trainer import TinyTrainer, joined_trainer

PROMPTS = [[7, 300, 12, 45], list(range(20, 60)), [400, 3, 3, 3, 99, 250]]
SEEDS = {"1": 51, "2": 52, "3": 53}  # by the version that the fleet gives them
ENOUGH = 3 * IN_FLIGHT  # that some begin and end under one version, streamed and not


def test_three_versions_reach_every_server_while_rollouts_run_and_none_is_lost(
    gateway: RunningGateway, real_fleet: RealFleet
) -> None:
    """Trainer and rollouts know one URL; weights, labels and answers agree, and no server dies."""
    with (
        joined_trainer(gateway.url, world_size=3) as trainer,
        rollouts_through(gateway.url) as rollouts,
    ):
        for seed in SEEDS.values():
            rollouts.wait_for_more(ENOUGH)
            trainer.send(seed)
        rollouts.wait_for_more(ENOUGH)
    assert real_fleet.alive() == [True, True]
    assert rollouts.lost == []
    assert any(answer.ended != answer.version for answer in rollouts.answers)
    assert {answer.replica for answer in rollouts.answers} == {
        server.url.removeprefix("http://") for server in real_fleet.servers
    }
    check_labels(rollouts.answers)
    check_weights(gateway, real_fleet, trainer, "3")
    check_three_rounds(gateway, real_fleet)


def check_labels(answers: list[Answer]) -> None:
    """What one version alone made, by its label, was made by the weights of that version."""
    models = {version: build_model(seed) for version, seed in SEEDS.items()}
    labelled = [a for a in answers if a.made_by_one_version and a.version in models]
    assert {answer.version for answer in labelled} == set(SEEDS)
    for answer in labelled:
        assert made_by(models[answer.version], answer.prompt, answer.tokens), answer


def check_weights(
    gateway: RunningGateway, real_fleet: RealFleet, trainer: TinyTrainer, version: str
) -> None:
    """Both servers hold what the trainer sent, under its version, as the gateway says too."""
    checksums = gateway.post("/weight_checker", {"action": "checksum"})["checksums"]
    for server in real_fleet.servers:
        assert server.checksums() == checksums
        assert server.get("/weight_info") == {"weight_version": version}
        for prompt in PROMPTS:
            assert trainer.explains(prompt, server.greedy(prompt, 16))
    assert gateway.version == version
    assert gateway.fleet()["weight_version"] == version


def check_three_rounds(gateway: RunningGateway, real_fleet: RealFleet) -> None:
    """The record has every round, newest first, with each server's part in each phase."""
    rounds = gateway.get("/fleet/rounds")["rounds"]
    assert [r["version"] for r in rounds] == ["3", "2", "1"]
    assert {r["result"] for r in rounds} == {"committed"}
    assert [r["full"] for r in rounds] == [True, True, True]
    for phase in (phase for found in rounds for phase in found["phases"]):
        assert len(phase["replicas"]) == len(real_fleet.servers)
        assert {part["outcome"] for part in phase["replicas"].values()} == {"ok"}


def test_the_version_that_a_trainer_gives_shows_everywhere(
    gateway: RunningGateway, real_fleet: RealFleet
) -> None:
    """The stock client's finish takes a label; fleet, servers, rounds and answers carry it."""
    with joined_trainer(gateway.url, world_size=3) as trainer:
        client = trainer.engine.client
        finish = client.finish_weight_update
        client.finish_weight_update = lambda: finish("step-7")
        trainer.send(61)
        check_weights(gateway, real_fleet, trainer, "step-7")
    assert gateway.get("/fleet/rounds")["rounds"][0]["version"] == "step-7"
    replicas = gateway.get("/fleet/replicas")["replicas"]
    assert [r["weight_version"] for r in replicas] == ["step-7", "step-7"]
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        assert ask(http, PROMPTS[0], 4).version == "step-7"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_rollout_that_arrives_during_an_update_is_answered_by_the_new_weights(
    gateway: RunningGateway, real_fleet: RealFleet, streamed: bool
) -> None:
    """Between start and finish it would kill an engine; it waits at the gate instead."""
    with (
        joined_trainer(gateway.url, world_size=3) as trainer,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        client = trainer.engine.client
        start, asked = client.start_weight_update, list[Future[Answer]]()

        def start_and_be_asked() -> None:
            start()
            asked.append(pool.submit(ask, http, PROMPTS[2], 16, streamed=streamed))
            gateway.wait_until(lambda: gateway.fleet()["gate"]["held"] == 1)

        client.start_weight_update = start_and_be_asked
        trainer.send(71)
        answer = asked[0].result(60)
        assert answer.version == answer.ended == "1"
        assert trainer.explains(answer.prompt, answer.tokens)
    assert real_fleet.alive() == [True, True]


def test_openais_client_works_unchanged(gateway: RunningGateway, real_server: RealServer) -> None:
    """Models, a completion and a streamed chat, through nothing but a base URL."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL_NAME]
        completion = client.completions.create(
            model=MODEL_NAME, prompt="the quick brown fox", max_tokens=8, temperature=0
        )
        chunks = list(
            client.chat.completions.create(
                model=MODEL_NAME,
                messages=[{"role": "user", "content": "one two three"}],
                max_tokens=8,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
        )
    assert completion.choices[0].finish_reason in ("length", "stop")
    assert completion.usage is not None
    assert completion.usage.prompt_tokens > 0
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert real_server.alive()
