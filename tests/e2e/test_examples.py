"""Every example, run as its reader would run it, against real vLLM servers behind a gateway."""

import re
from pathlib import Path

from tests.e2e.examples import run_example
from tests.e2e.gateway_process import RunningGateway
from tests.e2e.real_vllm import RealFleet


def test_the_asynchronous_example_goes_on_with_new_weights_in_mid_generation(
    gateway: RunningGateway, model_dir: Path
) -> None:
    """It checks the tokens of both sides against transformers itself, and says how many."""
    said = run_example("asynchronous", *for_cpus(gateway, model_dir))
    before, after = (int(n) for n in re.findall(r"^(\d+) tokens", said, re.MULTILINE))
    assert before >= 8
    assert after >= 1
    assert before + after == 240
    assert gateway.version == "after"


def test_the_rl_loop_learns_and_keeps_its_bound_on_staleness(
    gateway: RunningGateway, model_dir: Path, real_fleet: RealFleet
) -> None:
    """Its reward goes up; batches mix versions, none older than two behind the one trained."""
    said = run_example("rl_loop", *for_cpus(gateway, model_dir), "--steps", "32")
    print(said)
    steps = re.findall(r"version (\d+): .*by version \{(.*?)\}", said)
    assert len(steps) == 32
    batches = [[int(v) for v in re.findall(r"(\d+):", versions)] for _, versions in steps]
    assert any(len(batch) > 1 for batch in batches), said
    for (made, _), batch in zip(steps, batches, strict=True):
        assert int(made) - 1 - min(batch) <= 2
    assert gateway.version == "32"
    rounds = gateway.get("/fleet/rounds?limit=40")["rounds"]
    assert [r["result"] for r in rounds] == ["committed"] * 33
    assert real_fleet.alive() == [True, True]


def test_two_sharded_ranks_send_through_the_gateway(
    gateway: RunningGateway, model_dir: Path
) -> None:
    """FSDP2 on CPUs; the gathered model and the replicas' tokens agree after every step."""
    said = run_example("fsdp2", *for_cpus(gateway, model_dir), environment={"RANKS": "2"})
    assert re.findall(r"^(step-\d): .*world_size 3$", said, re.MULTILINE) == [
        "step-0",
        "step-1",
        "step-2",
    ]
    assert gateway.version == "step-2"


def test_the_stock_loop_over_separate_devices(gateway: RunningGateway, model_dir: Path) -> None:
    """vLLM's factory and engine, with a client that knows of fleets."""
    said = run_example("separate_gpus", *for_cpus(gateway, model_dir))
    assert said.count("as transformers") == 3
    assert gateway.version == "step-2"


def test_the_colocated_example_says_that_it_needs_a_gpu(model_dir: Path) -> None:
    """And is no failure where there is none."""
    assert "needs a GPU, not run" in run_example("colocated_ipc", "--model", str(model_dir))


def for_cpus(gateway: RunningGateway, model_dir: Path) -> list[str]:
    """The arguments of an example that runs here."""
    return ["--url", gateway.url, "--model", str(model_dir), "--backend", "gloo"]
