"""The gloo backend against one real vLLM server, through vLLM's own trainer side."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import requests
import torch
from torch.distributed.distributed_c10d import BroadcastOptions
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.plugins import load_plugins_by_group

from fleet.backends import gloo_plugin
from fleet.backends.gloo_group import GlooError, GlooGroup, join_group
from tests.e2e.real_vllm import RealServer, free_port
from tests.e2e.trainer import BETWEEN_Q_AND_K, at_broadcast, joined_trainer

PROMPTS = [[7, 300, 12, 45], list(range(20, 60)), [400, 3, 3, 3, 99, 250]]
EMPTY = {"names": [], "dtype_names": [], "shapes": []}


def test_the_installed_distribution_announces_gloo_to_vllm() -> None:
    """vLLM finds the entry point by itself, and registering again changes nothing."""
    plugins = load_plugins_by_group("vllm.general_plugins")
    assert plugins["fleet_gloo"] is gloo_plugin.register
    plugins["fleet_gloo"]()
    plugins["fleet_gloo"]()
    worker = WeightTransferEngineFactory._registry["gloo"]()
    trainer = WeightTransferTrainerFactory._registry["gloo"]()
    assert worker.__name__ == "GlooWeightTransferEngine"
    assert trainer.__name__ == "GlooTrainerWeightTransferEngine"


def test_two_rounds_of_the_stock_trainer_move_the_server_to_exactly_its_weights(
    real_server: RealServer,
) -> None:
    """The second round ships no metadata; after each, tokens are those of transformers."""
    with joined_trainer(real_server.url, world_size=2) as trainer:
        sent = spy_on_updates(trainer.engine.client)
        for seed in (11, 12):
            trainer.send(seed)
            for prompt in PROMPTS:
                assert trainer.explains(prompt, real_server.greedy(prompt, 16))
    assert len(sent[0]["names"]) > 0
    assert sent[1] == EMPTY


def test_checksums_change_with_the_weights_and_return_with_them(real_server: RealServer) -> None:
    """Equal weights, equal checksums; what /weight_checker says follows the rounds."""
    with joined_trainer(real_server.url, world_size=2) as trainer:
        seen = []
        for seed in (21, 22, 21):
            trainer.send(seed)
            seen.append(real_server.checksums())
    assert seen[0] == seen[2]
    assert seen[0] != seen[1]


def test_a_new_trainer_takes_over_from_one_that_never_said_goodbye(
    real_server: RealServer,
) -> None:
    """An init on a worker that is still in an older group drops that group."""
    with joined_trainer(real_server.url, world_size=2) as old:
        old.send(31)
        with joined_trainer(real_server.url, world_size=2) as new:
            new.send(32)
            assert new.explains(PROMPTS[0], real_server.greedy(PROMPTS[0], 16))


def test_an_update_without_metadata_is_refused_by_a_worker_that_never_had_any(
    real_server: RealServer,
) -> None:
    """NCCL's engine would answer 200 and load nothing."""
    with joined_trainer(real_server.url, world_size=2):
        real_server.post("/start_weight_update")
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            real_server.post("/update_weights", {"update_info": EMPTY})
    assert refusal.value.response.status_code == 500
    assert "has had none since it joined" in refusal.value.response.text


def test_a_refused_init_ends_the_trainers_wait_with_that_refusal(real_server: RealServer) -> None:
    """The other side says no at once; the rendezvous would otherwise last its full timeout."""
    began = time.monotonic()
    with pytest.raises(requests.HTTPError, match="404"):
        joined_trainer(real_server.url + "/nowhere", world_size=2).__enter__()
    assert time.monotonic() - began < 10


def test_a_refused_update_ends_the_broadcast_with_that_refusal(real_server: RealServer) -> None:
    """A worker that rejects the metadata never enters the collective; the trainer is told why."""
    with joined_trainer(real_server.url, world_size=2) as trainer:
        corrupt_updates(trainer.engine.client)
        began = time.monotonic()
        with pytest.raises(requests.HTTPError, match="500"):
            trainer.send(41)
    assert time.monotonic() - began < 10
    with joined_trainer(real_server.url, world_size=2) as trainer:
        trainer.send(42)
        assert trainer.explains(PROMPTS[1], real_server.greedy(PROMPTS[1], 16))


def test_a_full_update_heals_a_worker_that_failed_in_the_middle_of_a_fused_layer(
    real_server: RealServer,
) -> None:
    """Half of q, k and v, left over from the update that failed, does not count as loaded."""
    real_server.post("/pause?mode=keep")
    with joined_trainer(real_server.url, world_size=2) as trainer:
        group = trainer.engine._group
        at_broadcast(trainer, BETWEEN_Q_AND_K, group.close)
        with pytest.raises((GlooError, requests.HTTPError)):
            trainer.send(43)
    with joined_trainer(real_server.url, world_size=2) as trainer:
        trainer.send(44)
        real_server.post("/resume")
        assert trainer.explains(PROMPTS[1], real_server.greedy(PROMPTS[1], 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("ours_sends", [True, False])
def test_our_group_and_vllms_own_speak_the_same(dtype: torch.dtype, ours_sends: bool) -> None:
    """Either side may use ``stateless_init_torch_distributed_process_group`` of vLLM."""
    port = free_port()
    sent, got = torch.arange(12).reshape(3, 4).to(dtype), torch.zeros(3, 4, dtype=dtype)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(theirs_joins, port, rank=1 if ours_sends else 0)
        with GroupOf(
            join_group("127.0.0.1", port, 0 if ours_sends else 1, 2, timeout_s=20)
        ) as ours:
            other = pool.submit(theirs_broadcasts, theirs.result(), got if ours_sends else sent)
            ours.broadcast(sent if ours_sends else got)
            other.result()
    assert torch.equal(sent, got)


class GroupOf:
    """A group as a context manager, for tests."""

    def __init__(self, group: GlooGroup) -> None:
        self._group = group

    def __enter__(self) -> GlooGroup:
        return self._group

    def __exit__(self, *_: object) -> None:
        self._group.close()


def theirs_joins(port: int, rank: int) -> Any:
    return stateless_init_torch_distributed_process_group("127.0.0.1", port, rank, 2, "gloo")


def theirs_broadcasts(group: Any, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([tensor.view(torch.uint8)], options).wait()


def spy_on_updates(client: HTTPVLLMWeightSyncClient) -> list[dict[str, Any]]:
    """Record the update bodies that pass through a stock client."""
    bodies: list[dict[str, Any]] = []
    send = client.update_weights

    def spy(update_info: Any) -> None:
        bodies.append(update_info)
        send(update_info)

    client.update_weights = spy
    return bodies


def corrupt_updates(client: HTTPVLLMWeightSyncClient) -> None:
    """Make a stock client announce a dtype that does not exist."""
    send = client.update_weights

    def corrupt(update_info: Any) -> None:
        send({**update_info, "dtype_names": ["float7"] * len(update_info["names"])})

    client.update_weights = corrupt
