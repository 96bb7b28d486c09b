"""TRL's own client, pointed at the gateway.

All of it is TRL's, except what moves the tensors: NCCL needs GPUs, so the two functions that it
imports for that from vLLM are replaced by a gloo group here. Every HTTP call is as TRL makes it.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

from fleet.backends.gloo_group import GlooGroup, join_group
from tests.e2e.gateway_process import RunningGateway
from tests.e2e.real_vllm import MODEL_NAME, RealFleet, free_port
from tests.e2e.tiny_model import build_model, made_by, weights

PROMPTS = [[7, 300, 12, 45], list(range(20, 60))]


class GlooCommunicator:
    """What TRL keeps as its `communicator`: it broadcasts, and TRL drops it by its `group`."""

    def __init__(self, init_info: dict[str, Any]) -> None:
        self.gloo: GlooGroup = join_group(
            init_info["master_address"],
            init_info["master_port"],
            0,
            init_info["world_size"],
            timeout_s=60,
        )
        self.group = SimpleNamespace(store=None, socket=None)


def broadcast_one_by_one(
    iterator: Iterator[Any],
    group: GlooCommunicator,
    src: int,
    post_iter_func: Callable[[Any], torch.Tensor],
) -> None:
    """In place of NCCL's packed broadcast."""
    for item in iterator:
        group.gloo.broadcast(post_iter_func(item).contiguous(), src)


@pytest.fixture
def client(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> VLLMClient:
    """TRL's client, which has found the gateway healthy; its weights would travel over gloo."""
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(vllm_client, "open_trainer_endpoint", GlooCommunicator)
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", broadcast_one_by_one)
    return VLLMClient(base_url=gateway.url, group_port=free_port())


@pytest.fixture
def joined(client: VLLMClient) -> Iterator[VLLMClient]:
    """The same, in a group with all workers of the fleet."""
    client.init_communicator(device="cuda")
    communicator = client.communicator
    yield client
    client.close_communicator()
    communicator.gloo.close()


def test_trl_takes_the_gateway_for_a_server(client: VLLMClient) -> None:
    """Health, model, world size, generation and the prefix cache."""
    assert client.model == MODEL_NAME
    assert client.get_world_size() == 2
    made = client.generate(PROMPTS, n=3, max_tokens=8, generation_kwargs={"ignore_eos": True})
    assert made["prompt_ids"] == PROMPTS
    assert [len(tokens) for tokens in made["completion_ids"]] == [8] * 6
    assert [len(values) for values in made["logprobs"]] == [8] * 6
    client.reset_prefix_cache()


def test_trl_chats_and_scores_through_the_gateway(client: VLLMClient) -> None:
    """Its other ways of asking: conversations, and log-probabilities of given sequences."""
    conversations = [[{"role": "user", "content": text}] for text in ("one two", "three four five")]
    chat = client.chat(conversations, max_tokens=8, generation_kwargs={"ignore_eos": True})
    assert [len(tokens) for tokens in chat["completion_ids"]] == [8, 8]
    scored = client.get_sequence_logprobs([[*PROMPTS[0], 9, 8]], [4], top_logprobs=3)
    assert [len(sequence) for sequence in scored["actual_logprobs"]] == [2]


def test_trl_updates_every_server_with_a_whole_model(
    joined: VLLMClient, gateway: RunningGateway, real_fleet: RealFleet
) -> None:
    """`update_model_params` is one round with one update."""
    model = build_model(101)
    joined.update_model_params(model)
    check(model, joined, gateway, real_fleet, version="1")
    assert newest_round(gateway)["updates"] == 1


def test_trl_updates_every_server_parameter_by_parameter(
    joined: VLLMClient, gateway: RunningGateway, real_fleet: RealFleet
) -> None:
    """`weight_update()` is one round with as many updates as there are parameters."""
    parameters = weights(102)
    with joined.weight_update():
        for name, tensor in parameters.items():
            joined.update_named_param(name, tensor.data)
    check(build_model(102), joined, gateway, real_fleet, version="1")
    assert newest_round(gateway)["updates"] == len(parameters)


def check(
    model: Any, client: VLLMClient, gateway: RunningGateway, real_fleet: RealFleet, version: str
) -> None:
    """The round was a full one, and gateway and servers answer with these weights."""
    assert newest_round(gateway)["full"] is True
    assert gateway.version == version
    answers = client.generate(PROMPTS, temperature=0.0, generation_kwargs={"ignore_eos": True})
    for prompt, tokens in zip(PROMPTS, answers["completion_ids"], strict=True):
        assert made_by(model, prompt, tokens)
    for server in real_fleet.servers:
        assert server.get("/weight_info") == {"weight_version": version}
        assert made_by(model, PROMPTS[0], server.greedy(PROMPTS[0], 16))


def newest_round(gateway: RunningGateway) -> Any:
    """The newest round, which committed."""
    newest = gateway.get("/fleet/rounds")["rounds"][0]
    assert newest["result"] == "committed"
    return newest
