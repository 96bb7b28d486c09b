"""Replicas as GPU nodes want them: devices, memory, caches, arguments, groups over nodes."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.chart.helm import SHAPES, Chart, Manifest, component_of, environment, render

REPLICAS = ("replica", "replica-worker")


def vllm_pods(chart: Chart) -> list[Manifest]:
    """The templates of pods that run vLLM."""
    return [t for t in chart.templates() if component_of(t) in REPLICAS]


RUNNING = [s for s in SHAPES if vllm_pods(render(s))]


def arguments(container: Manifest) -> dict[str, str]:
    """The options of `vllm serve`, by name."""
    found = [word.removeprefix("--").partition("=") for word in container["args"]]
    return {name: value for name, _, value in found}


def test_all_replicas_start_at_once() -> None:
    """Each loads for minutes, and none waits for another one."""
    workload = render().one("StatefulSet", "replica")
    assert workload["spec"]["podManagementPolicy"] == "Parallel"
    service = render().one("Service", "replica")
    assert workload["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize(
    ("shape", "gpus", "parallel"),
    [
        ("default", 1, {}),
        ("eight-replicas-tp2", 2, {"tensor-parallel-size": "2"}),
        ("multi-node", 8, {"tensor-parallel-size": "8", "pipeline-parallel-size": "2"}),
        ("cpu", None, {}),
    ],
)
def test_gpus_are_whole_and_as_many_as_the_model_is_split(
    shape: str, gpus: int | None, parallel: dict[str, str]
) -> None:
    """Requests and limits agree, as the scheduler demands of devices."""
    for template in vllm_pods(render(shape)):
        container = template["spec"]["containers"][0]
        for kind in ("requests", "limits"):
            assert container["resources"].get(kind, {}).get("nvidia.com/gpu") == gpus
        sizes = {k: v for k, v in arguments(container).items() if k.endswith("parallel-size")}
        assert sizes == parallel


def test_another_vendors_gpus_can_be_named() -> None:
    """The resource's name is a value."""
    chart = render("default", 'replicas.gpu.resource="amd.com/gpu"')
    assert chart.container("replica")["resources"]["limits"] == {"amd.com/gpu": 1}


@pytest.mark.parametrize("shape", RUNNING)
def test_shared_memory_is_sized_and_in_memory(shape: str) -> None:
    """The container runtime's own /dev/shm of 64 MiB breaks NCCL and tensor parallelism."""
    for template in vllm_pods(render(shape)):
        volume = mounted(template, "/dev/shm")
        assert volume["emptyDir"]["medium"] == "Memory"
        assert volume["emptyDir"]["sizeLimit"].endswith("Gi")


@pytest.mark.parametrize("shape", SHAPES)
def test_all_that_is_written_lies_on_a_volume(shape: str) -> None:
    """The root is read-only: HOME, caches and /tmp are elsewhere."""
    for template in render(shape).templates():
        container = template["spec"]["containers"][0]
        mounts = [PurePosixPath(m["mountPath"]) for m in container["volumeMounts"]]
        wanted = [v for k, v in environment(container).items() if k in ("HOME", "HF_HOME")]
        if component_of(template) != "redis":
            wanted.append("/tmp")
        for path in map(PurePosixPath, wanted):
            assert any(mount in (path, *path.parents) for mount in mounts), path


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (['replicas.modelCache.kind="emptyDir"'], {"emptyDir": {"sizeLimit": "100Gi"}}),
        (
            ['replicas.modelCache.kind="shared"', 'replicas.modelCache.accessMode="ReadWriteMany"'],
            {"persistentVolumeClaim": {"claimName": "rl-vllm-fleet-gateway-models"}},
        ),
        (
            ['replicas.modelCache.kind="existingClaim"', 'replicas.modelCache.existingClaim="m"'],
            {"persistentVolumeClaim": {"claimName": "m"}},
        ),
    ],
)
def test_the_model_cache_is_where_it_was_asked_for(
    sets: list[str], expected: dict[str, Any]
) -> None:
    """On the node, in one claim for all, or in a claim of the user's."""
    chart = render("default", *sets)
    volume = mounted(chart.template("replica"), "/models")
    assert {k: v for k, v in volume.items() if k != "name"} == expected
    assert len(chart.of_kind("PersistentVolumeClaim")) == ("shared" in sets[0])


def test_a_cache_for_each_replica_is_a_claim_template() -> None:
    """Each pod has its own ReadWriteOnce volume, so it can scale."""
    workload = render("eight-replicas-tp2").one("StatefulSet", "replica")
    (claim,) = workload["spec"]["volumeClaimTemplates"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "200Gi"}},
    }


@pytest.mark.parametrize("shape", RUNNING)
def test_vllm_is_told_all_that_a_round_needs(shape: str) -> None:
    """A backend to transfer weights by, control routes, and time to end what runs."""
    for template in vllm_pods(render(shape)):
        container = template["spec"]["containers"][0]
        options = arguments(container)
        backend = "gloo" if shape == "cpu" else "nccl"
        assert options["weight-transfer-config"] == f'{{"backend":"{backend}"}}'
        assert int(options["shutdown-timeout"]) > 0
        assert environment(container)["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_replicas_token_is_the_one_that_the_gateway_sends() -> None:
    """Both read one key of one Secret; without a token neither has it."""
    chart = render("eight-replicas-tp2")
    here = environment(chart.container("replica"))["VLLM_API_KEY"]
    assert here == environment(chart.container("gateway"))["FLEET_AUTH__REPLICA_TOKEN"]
    assert "VLLM_API_KEY" not in environment(render().container("replica"))


def test_a_group_over_nodes_meets_at_its_leader() -> None:
    """Ranks, size and address come from LeaderWorkerSet; workers serve no HTTP."""
    chart = render("multi-node")
    leader, worker = chart.container("replica"), chart.container("replica-worker")
    meeting = ("nnodes", "master-addr", "master-port", "distributed-executor-backend")
    for name in meeting:
        assert arguments(leader)[name] == arguments(worker)[name]
    assert arguments(leader)["nnodes"] == "2"
    assert arguments(leader)["master-addr"] == "$(LWS_LEADER_ADDRESS)"
    assert arguments(leader)["node-rank"] == "0"
    assert arguments(worker)["node-rank"] == "$(LWS_WORKER_INDEX)"
    assert "headless" in arguments(worker)
    assert "headless" not in arguments(leader)
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & worker.keys()


def mounted(template: Manifest, path: str) -> Manifest:
    """The volume that is mounted at a path."""
    (container,) = template["spec"]["containers"]
    (name,) = [m["name"] for m in container["volumeMounts"] if m["mountPath"] == path]
    (volume,) = [v for v in template["spec"]["volumes"] if v["name"] == name]
    return volume
