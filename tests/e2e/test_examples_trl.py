"""TRL's GRPOTrainer against the gateway: the example, with CPUs in place of CUDA.

TRL is unmodified, and so is every HTTP call. What is replaced is what moves tensors, as in
test_trl.py, and the name of the device, which TRL insists on.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

from tests.e2e.examples import EXAMPLES
from tests.e2e.gateway_process import RunningGateway
from tests.e2e.real_vllm import RealFleet, free_port
from tests.e2e.test_trl import GlooCommunicator, broadcast_one_by_one

STEPS = 10


@pytest.fixture
def _on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    init = VLLMClient.init_communicator

    def init_as_if_on_cuda(self: VLLMClient, device: Any = 0) -> None:
        self.group_port = free_port()
        init(self, device="cuda")

    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(VLLMClient, "init_communicator", init_as_if_on_cuda)
    monkeypatch.setattr(vllm_client, "open_trainer_endpoint", GlooCommunicator)
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", broadcast_one_by_one)


@pytest.mark.usefixtures("_on_cpus")
def test_trl_trains_a_fleet_by_its_one_url(
    gateway: RunningGateway,
    real_fleet: RealFleet,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ten steps of GRPO; every step's weights reached every replica, as versions 1 to 10 or so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    arguments = ["--url", gateway.url, "--model", str(model_dir), "--steps", str(STEPS)]
    monkeypatch.setattr(sys, "argv", ["trl_grpo.py", *arguments])
    runpy.run_path(str(EXAMPLES / "trl_grpo.py"), run_name="__main__")
    assert f"{STEPS} steps, reward by step" in capsys.readouterr().out
    rounds = gateway.get("/fleet/rounds")["rounds"]
    assert {r["result"] for r in rounds} == {"committed"}
    assert int(gateway.version) >= STEPS - 1
    checksums = [server.checksums() for server in real_fleet.servers]
    assert checksums[0] == checksums[1]
    assert real_fleet.alive() == [True, True]
