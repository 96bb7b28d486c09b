"""`fleet.client` beside vLLM's own client, and under its trainer engines."""

import base64
import pickle
import signal
from typing import Any

import pytest
from vllm.distributed.weight_transfer.base import ModuleSource, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.clients import (
    HTTPVLLMWeightSyncClient,
    _json_safe_update_payload,
)

from fleet.client import FleetWeightSyncClient
from fleet.client.calls import update
from fleet.client.elastic import ElasticSession
from tests.e2e.gateway_process import RunningGateway
from tests.e2e.real_vllm import RealFleet, RealServer, free_port
from tests.e2e.tiny_model import build_model, made_by
from tests.e2e.trainer import BETWEEN_Q_AND_K

PROMPTS = [[7, 300, 12, 45], list(range(20, 60))]


class Training:
    """A model and an elastic session that sends it."""

    def __init__(self, client: FleetWeightSyncClient) -> None:
        from fleet.backends.gloo import GlooTrainerInitInfo

        self.model = build_model(0)
        self.session = ElasticSession(
            client,
            lambda size: GlooTrainerInitInfo("127.0.0.1", free_port(), size, timeout_s=60),
            ModuleSource(self.model),
        )

    def send(self, seed: int) -> None:
        """Bring the fleet to the weights of this seed."""
        self.model.load_state_dict(build_model(seed).state_dict())
        self.session.send_weights(weight_version=f"seed-{seed}")

    def check(self, *servers: RealServer) -> None:
        """These servers answer with what was sent last."""
        for server in servers:
            for prompt in PROMPTS:
                assert made_by(self.model, prompt, server.greedy(prompt, 16))


def test_it_is_what_vllms_engines_ask_for() -> None:
    """The protocol is structural, and vLLM's own check agrees; every method is there."""
    client = FleetWeightSyncClient("http://127.0.0.1:1")
    assert isinstance(client, VLLMWeightSyncClient)
    stock = [name for name in dir(HTTPVLLMWeightSyncClient) if not name.startswith("_")]
    assert [name for name in stock if not hasattr(client, name)] == []


@pytest.mark.parametrize("as_list", [False, True])
def test_handles_of_gpu_memory_travel_as_vllms_own_client_sends_them(as_list: bool) -> None:
    """Pickled, in base64, under another name; the rest as it is."""
    info: dict[str, Any] = {"names": ["w"], "ipc_handles": [{"GPU-1": (1, "x", b"y")}]}
    payload: Any = [info, info] if as_list else info
    mine, stock = update(payload).body["update_info"], _json_safe_update_payload(payload)
    pairs = zip(mine, stock, strict=True) if as_list else [(mine, stock)]
    for ours, theirs in pairs:
        handles = [d.pop("ipc_handles_pickled") for d in (ours, theirs)]
        assert ours == theirs == {"names": ["w"]}
        assert len({str(pickle.loads(base64.b64decode(h))) for h in handles}) == 1


def test_an_elastic_session_outlives_a_replica_and_takes_in_a_third_one(
    gateway: RunningGateway, real_fleet: RealFleet, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed between rounds, killed in mid-update, another one added: one trainer throughout."""
    first, second = real_fleet.servers
    third = RealServer(first.model_dir, tmp_path_factory.mktemp("third") / "log", free_port())
    third.start()
    try:
        with FleetWeightSyncClient(gateway.url) as client:
            trainer = Training(client)
            trainer.send(81)
            trainer.check(first, second)
            second.stop()
            trainer.send(82)
            assert trainer.session.world_size == 2
            trainer.check(first)
            third.wait_healthy()
            gateway.post("/fleet/replicas", {"url": third.url})
            trainer.send(83)
            assert trainer.session.world_size == 3
            trainer.check(first, third)
            kill_in_mid_update(trainer, third)
            trainer.send(84)
            assert trainer.session.world_size == 2
            trainer.check(first)
            assert gateway.version == "seed-84"
            trainer.session.close()
    finally:
        third.stop()


def kill_in_mid_update(trainer: Training, server: RealServer) -> None:
    """Let a server die in the next round, between the tensors of a layer that vLLM fuses."""
    group = trainer.session.engine._group  # pyright: ignore[reportOptionalMemberAccess]
    broadcast, count = group.broadcast, iter(range(1_000))

    def eventful(tensor: Any, src: int = 0) -> None:
        if next(count) == BETWEEN_Q_AND_K:
            server.signal(signal.SIGKILL)
        broadcast(tensor, src)

    group.broadcast = eventful
