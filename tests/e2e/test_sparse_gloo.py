"""Sparse patches through the gateway to real vLLM servers, held against dense updates.

The servers here have a weight-transfer backend of their own, so they are their own pair.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from fleet.backends.gloo import GlooTrainerInitInfo
from fleet.backends.sparse_gloo import SparseGlooTrainerInitInfo, sparse_patches
from fleet.client import FleetWeightSyncClient
from fleet.client.elastic import ElasticSession
from tests.e2e.examples import EXAMPLES, run_example
from tests.e2e.gateway_process import RunningGateway, running_gateway
from tests.e2e.real_vllm import RealFleet, RealServer, free_port
from tests.e2e.tiny_model import build_model, made_by

PROMPTS = [[7, 300, 12, 45], list(range(20, 60)), [400, 3, 3, 3, 99, 250]]
SPARSE = ("--weight-transfer-config", '{"backend":"sparse_gloo"}')
PORTION = 0.02  # of all entries, that a step changes


@pytest.fixture(scope="module")
def sparse_fleet(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    """Two servers that take patches, booted from seed 0."""
    logs = tmp_path_factory.mktemp("sparse-logs")
    servers = tuple(
        RealServer(model_dir, logs / f"vllm-{n}.log", free_port(), SPARSE) for n in range(2)
    )
    fleet = RealFleet(servers)
    try:
        fleet.revive()
        yield fleet
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def sparse_gateway(sparse_fleet: RealFleet, tmp_path: Path) -> Iterator[RunningGateway]:
    """A gateway in front of both."""
    with running_gateway(sparse_fleet.urls, tmp_path / "sparse-gateway.log", {}) as running:
        yield running


@pytest.fixture(scope="module")
def held() -> Any:
    """The model that the servers of `sparse_fleet` hold: what they booted with, and all since."""
    return build_model(0)


def test_the_sparse_example_sends_little_and_everybody_has_it(
    sparse_gateway: RunningGateway, model_dir: Path, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must be the first to patch these servers: it starts from the weights they booted with."""
    arguments = ("--url", sparse_gateway.url, "--model", str(model_dir), "--backend", "gloo")
    said = run_example("sparse", *arguments)
    for sent, entries in re.findall(r"(\d+) of (\d+) entries", said):
        assert int(sent) < 0.05 * int(entries)
    assert sparse_gateway.version == "step-2"
    monkeypatch.syspath_prepend(str(EXAMPLES))
    shake = importlib.import_module("common").shake
    for number in range(3):
        shake(held, number, 0.02)


def step(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Change a few entries of every parameter; return what they all were before."""
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            chosen = torch.rand(tensor.shape, generator=noise) < PORTION
            fresh = torch.randn(tensor.shape, generator=noise) * 0.3
            tensor.copy_(torch.where(chosen, fresh.to(tensor.dtype), tensor))
    return before


def test_patches_bring_every_server_to_the_weights_of_a_dense_update(
    sparse_gateway: RunningGateway, sparse_fleet: RealFleet, real_server: RealServer, held: Any
) -> None:
    """Two rounds of patches; then checksums and tokens are those of a server that got it all."""
    model = held
    with FleetWeightSyncClient(sparse_gateway.url) as client:
        session = ElasticSession(
            client,
            lambda size: SparseGlooTrainerInitInfo("127.0.0.1", free_port(), size, timeout_s=60),
        )
        for seed in (1, 2):
            before = step(model, seed)
            patches = sparse_patches(before, dict(model.named_parameters()))
            sent = sum(patch.values.numel() for patch in patches)
            assert 0 < sent < 2 * PORTION * sum(t.numel() for t in model.parameters())
            session.send_weights(patches, weight_version=f"step-{seed}")
        session.close()
        held = client.checksums()
    send_densely(model, real_server)
    assert held == real_server.checksums()
    for server in sparse_fleet.servers:
        assert server.checksums() == held
        assert server.get("/weight_info") == {"weight_version": "step-2"}
        for prompt in PROMPTS:
            tokens = server.greedy(prompt, 16)
            assert made_by(model, prompt, tokens)
            assert not made_by(build_model(0), prompt, tokens)
    rounds = sparse_gateway.get("/fleet/rounds")["rounds"]
    assert [(r["version"], r["full"]) for r in rounds] == [("step-2", False), ("step-1", False)]


def test_a_patch_that_does_not_fit_is_refused_and_leaves_the_weights_as_they_were(
    sparse_fleet: RealFleet,
) -> None:
    """The worker knows its checkpoint; a round that broke is forgotten whole."""
    server = sparse_fleet.servers[0]
    before = server.checksums()
    engine = WeightTransferTrainerFactory.trainer_init(
        SparseGlooTrainerInitInfo("127.0.0.1", free_port(), 2, timeout_s=60),
        client=FleetWeightSyncClient(server.url),
    )
    server.post("/start_weight_update")
    body = {"names": ["nobody"], "dtype_names": ["bfloat16"], "shapes": [[1]]}
    with pytest.raises(httpx.HTTPStatusError) as refusal:
        server.post("/update_weights", {"update_info": {**body, "num_updates_list": [1]}})
    assert "the checkpoint that this worker booted from has no such" in refusal.value.response.text
    engine.shutdown()
    assert server.checksums() == before
    server.settle()


def send_densely(model: torch.nn.Module, server: RealServer) -> None:
    """Give one server with the dense backend all of it, behind no gateway."""
    engine = WeightTransferTrainerFactory.trainer_init(
        GlooTrainerInitInfo("127.0.0.1", free_port(), 2, timeout_s=60),
        client=FleetWeightSyncClient(server.url),
        source=ModuleSource(model),
    )
    engine.send_weights()
    engine.shutdown()
