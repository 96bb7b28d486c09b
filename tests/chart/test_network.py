"""Who reaches whom, by the NetworkPolicies that are rendered; evaluated as Kubernetes does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.checks import resolve, selects
from tests.chart.helm import NAMESPACE, SHAPES, Chart, Manifest, component_of, render

GUARDED = [s for s in SHAPES if render(s).of_kind("NetworkPolicy")]
WITH_REPLICAS = [s for s in GUARDED if "replica" in map(component_of, render(s).templates())]
WITH_REDIS = [s for s in GUARDED if "redis" in map(component_of, render(s).templates())]
STRANGER = {"app": "stranger"}
TRAINER = {"app": "trainer"}


def reaches(chart: Chart, source: dict[str, str], target: Manifest, port: int) -> bool:
    """Say whether a pod of the release's namespace may open a TCP connection to a pod's port."""
    labels = target["metadata"]["labels"]
    policies = [
        p for p in chart.of_kind("NetworkPolicy") if selects(p["spec"]["podSelector"], labels)
    ]
    if not policies:
        return True
    rules = [rule for p in policies for rule in p["spec"].get("ingress", [])]
    return any(_from(rule, source) and _to(rule, target, port) for rule in rules)


def _from(rule: Manifest, source: dict[str, str]) -> bool:
    peers = rule.get("from")
    return not peers or any(_is_peer(peer, source) for peer in peers)


def _is_peer(peer: Manifest, source: dict[str, str]) -> bool:
    namespace = {"kubernetes.io/metadata.name": NAMESPACE}
    if "namespaceSelector" in peer and not selects(peer["namespaceSelector"], namespace):
        return False
    return selects(peer.get("podSelector", {}), source)


def _to(rule: Manifest, target: Manifest, port: int) -> bool:
    ports = rule.get("ports")
    return not ports or any(_is_port(one, target, port) for one in ports)


def _is_port(one: dict[str, Any], target: Manifest, port: int) -> bool:
    if one.get("protocol", "TCP") != "TCP":
        return False
    if isinstance(one["port"], str):
        return resolve(target, one["port"]) == port
    return one["port"] <= port <= one.get("endPort", one["port"])


def labels_of(chart: Chart, component: str) -> dict[str, str]:
    """The labels of a component's pods."""
    return chart.template(component)["metadata"]["labels"]


@pytest.mark.parametrize("port", [1, 8000, 65535])
@pytest.mark.parametrize("shape", WITH_REPLICAS)
def test_only_the_gateway_reaches_the_replicas_control_port(shape: str, port: int) -> None:
    """vLLM asks nobody for a token there; not the trainer, not Redis, not another replica."""
    chart = render(shape, f"replicas.port={port}")
    replica = chart.template("replica")
    assert reaches(chart, labels_of(chart, "gateway"), replica, port)
    others = [t["metadata"]["labels"] for t in chart.templates() if component_of(t) != "gateway"]
    for source in (*others, STRANGER, TRAINER, {}):
        assert not reaches(chart, source, replica, port), source


@pytest.mark.parametrize("port", [29500, 1, 7999, 8001, 65535])
@pytest.mark.parametrize("shape", WITH_REPLICAS)
def test_weights_travel_between_trainer_and_replicas(shape: str, port: int) -> None:
    """NCCL listens on any port, in replicas and in the workers of one that spans nodes."""
    chart = render(shape)
    for target in chart.templates():
        if component_of(target) in ("replica", "replica-worker"):
            assert reaches(chart, labels_of(chart, "replica"), target, port)
            assert reaches(chart, TRAINER, target, port)


def test_the_data_plane_can_be_kept_to_the_trainer() -> None:
    """With a selector of the trainer, nobody else of the namespace is let in."""
    chart = render("eight-replicas-tp2")
    assert not reaches(chart, STRANGER, chart.template("replica"), 29500)


@pytest.mark.parametrize("shape", WITH_REDIS)
def test_only_gateways_reach_redis(shape: str) -> None:
    """The fleet's state is nobody else's."""
    chart = render(shape)
    redis = chart.template("redis")
    assert reaches(chart, labels_of(chart, "gateway"), redis, 6379)
    others = [t["metadata"]["labels"] for t in chart.templates() if component_of(t) != "gateway"]
    for source in (*others, STRANGER):
        assert not reaches(chart, source, redis, 6379), source


@pytest.mark.parametrize("shape", WITH_REPLICAS)
def test_a_replica_reaches_the_gateway_to_ask_for_leave(shape: str) -> None:
    """Also where the gateway's callers are restricted."""
    chart = render(shape)
    for template in chart.templates():
        if component_of(template) == "replica":
            labels = template["metadata"]["labels"]
            assert reaches(chart, labels, chart.template("gateway"), 8000)
            assert not reaches(chart, labels, chart.template("gateway"), 8001)


def test_the_gateways_callers_can_be_restricted() -> None:
    """A pod of this namespace that no peer names is kept out."""
    chart = render("eight-replicas-tp2")
    assert not reaches(chart, STRANGER, chart.template("gateway"), 8000)
    assert reaches(render(), STRANGER, render().template("gateway"), 8000)
