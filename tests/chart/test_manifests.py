"""Every shape that people run, by Helm 3 and 4, validated for three versions of Kubernetes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.chart import checks
from tests.chart.helm import CHART, HELMS, SHAPES, TOOLS, Chart, Manifest, helm, render, run_tool

KUBERNETES: Final = ("1.28", "1.32", "1.36")
CUSTOM: Final = ("HTTPRoute", "ScaledObject", "ServiceMonitor", "LeaderWorkerSet")


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_helm_has_nothing_to_say_against_the_chart(name: str, shape: str) -> None:
    """`lint --strict` passes with the values of every shape."""
    helm(name, "lint", "--strict", str(CHART), "--values", str(CHART / f"ci/{shape}-values.yaml"))


@pytest.mark.parametrize("kube_version", KUBERNETES)
@pytest.mark.parametrize("name", HELMS)
def test_kubernetes_knows_every_field(name: str, kube_version: str, tmp_path: Path) -> None:
    """Strict validation: unknown fields, wrong types and removed APIs are found in no shape."""
    files: list[str] = []
    for shape in SHAPES:
        chart = render(shape, by=name, kube_version=kube_version)
        path = tmp_path / f"{shape}.yaml"
        path.write_text(yaml.safe_dump_all(builtin_of(chart)))
        files.append(str(path))
    assert validate(kube_version, *files) == ""


def test_a_field_that_kubernetes_does_not_know_is_found(tmp_path: Path) -> None:
    """The validator is strict, and looks into the pods of a LeaderWorkerSet too."""
    chart = render("multi-node")
    group = chart.one("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    group["workerTemplate"]["spec"]["containers"][0]["commands"] = ["x"]
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump_all(builtin_of(chart)))
    assert "commands" in validate("1.32", str(path))


def builtin_of(chart: Chart) -> list[Manifest]:
    """Everything that Kubernetes itself knows; the pods inside a LeaderWorkerSet as templates."""
    found = [m for m in chart.manifests if m["kind"] not in CUSTOM]
    for workload in chart.of_kind("LeaderWorkerSet"):
        group = workload["spec"]["leaderWorkerTemplate"]
        for name in ("leaderTemplate", "workerTemplate"):
            meta = {"name": name.lower()}
            template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": meta}
            found.append({**template, "template": group[name]})
    return found


def validate(kube_version: str, *files: str) -> str:
    """Return what the validator has to say; nothing means that all is well."""
    command = [str(TOOLS / "venv/bin/kubernetes-validate"), "--quiet", "--strict"]
    ended = subprocess.run(
        [*command, "-k", kube_version, *files],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("shape", SHAPES)
def test_custom_resources_are_what_their_operators_take(shape: str) -> None:
    """Prometheus Operator's, Gateway API's and KEDA's models accept what is rendered."""
    assert custom_problems(render(shape).of_kind(*CUSTOM[:3])) == []


def test_custom_resources_are_all_rendered_somewhere() -> None:
    """No check of a custom resource is empty because no shape has one."""
    found = {m["kind"] for shape in SHAPES for m in render(shape).of_kind(*CUSTOM)}
    assert found == set(CUSTOM)


def test_a_wrong_custom_resource_is_found() -> None:
    """A wrong type, a missing field and a wrong version each are a problem."""
    chart = render("eight-replicas-tp2")
    monitor, route = chart.one("ServiceMonitor"), chart.one("HTTPRoute")
    monitor["spec"]["endpoints"][0]["port"] = 8000
    route["spec"]["rules"][0]["backendRefs"] = [{"port": 1}]
    scaled = render("keda").one("ScaledObject") | {"apiVersion": "keda.sh/v2"}
    assert len(custom_problems([monitor, route, scaled])) == 3


FIELDS: Final = {
    "ServiceMonitor": {
        "selector.matchLabels.app.kubernetes.io/name",
        "selector.matchLabels.app.kubernetes.io/instance",
        "selector.matchLabels.app.kubernetes.io/component",
        "endpoints.port",
        "endpoints.path",
        "endpoints.interval",
        "endpoints.scrapeTimeout",
    },
    "HTTPRoute": {
        "parentRefs.name",
        "parentRefs.namespace",
        "hostnames",
        "rules.matches.path.type",
        "rules.matches.path.value",
        "rules.timeouts.request",
        "rules.backendRefs.name",
        "rules.backendRefs.port",
    },
    "ScaledObject": {
        "scaleTargetRef.apiVersion",
        "scaleTargetRef.kind",
        "scaleTargetRef.name",
        "minReplicaCount",
        "maxReplicaCount",
        "cooldownPeriod",
        "triggers.type",
        "triggers.metadata.serverAddress",
        "triggers.metadata.query",
        "triggers.metadata.threshold",
    },
}
"""All that is set in them: the models let unknown fields pass, so a misspelt one goes unseen."""


@pytest.mark.parametrize("kind", FIELDS)
def test_custom_resources_have_the_fields_of_their_api(kind: str) -> None:
    """A new field is looked up in the operator's API before it is written down here."""
    found = [m["spec"] for shape in SHAPES for m in render(shape).of_kind(kind)]
    paths = {".".join(path) for spec in found for path, _ in checks.walk(spec)}
    assert paths == FIELDS[kind]


def custom_problems(manifests: list[Manifest]) -> Any:
    """Ask the models of the operators."""
    return run_tool(["node", str(TOOLS / "check_custom.mjs")], manifests)


def test_a_replica_over_nodes_is_a_group_of_leader_and_workers() -> None:
    """No model of LeaderWorkerSet is to be had, so its few fields are held to its API (v1) here."""
    workload = render("multi-node").one("LeaderWorkerSet")
    assert workload["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    spec = workload["spec"]
    known = {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy"}
    assert set(spec) == known
    assert spec["startupPolicy"] in ("LeaderCreated", "LeaderReady")
    rolling = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert spec["rolloutStrategy"]["type"] == "RollingUpdate"
    assert rolling == {"maxUnavailable": 1, "maxSurge": 0}, "no GPUs are spare for a surge"
    group = spec["leaderWorkerTemplate"]
    assert set(group) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert group["size"] == 2


@pytest.mark.parametrize("check", checks.ALL, ids=lambda check: check.__name__)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_validators_miss_holds(shape: str, check: Any) -> None:
    """Selectors, ports, quantities, names, references, images, rights, probes, grace periods."""
    assert list(check(render(shape))) == []


@pytest.mark.parametrize("shape", SHAPES)
def test_both_helms_render_the_same(shape: str) -> None:
    """Helm 3 and Helm 4 agree, but for passwords that are made at the install."""
    assert without_secrets(render(shape, by="helm3")) == without_secrets(render(shape, by="helm4"))


def without_secrets(chart: Chart) -> list[Manifest]:
    """All manifests in one order, without the data of Secrets."""
    found = [{**m, "data": {}} if m["kind"] == "Secret" else m for m in chart.manifests]
    return sorted(found, key=lambda m: (m["kind"], m["metadata"]["name"]))


def test_the_packaged_chart_renders_the_same(tmp_path: Path) -> None:
    """Nothing that templates need is left out of the package, and no example is in it."""
    helm("helm4", "package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("*.tgz")
    shape = "eight-replicas-tp2"
    assert without_secrets(render(shape, chart=package)) == without_secrets(render(shape))
