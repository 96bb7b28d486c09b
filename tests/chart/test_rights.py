"""RBAC: the calls that the gateway makes to the Kubernetes API, and nothing more."""

from __future__ import annotations

import pytest

from fleet.discovery.api import ApiServer
from fleet.discovery.restart import PodRestart
from fleet.facts.endpoint import Origin
from tests.chart.helm import NAMESPACE, SHAPES, Chart, render
from tests.discovery.fake_api import a_pod, fake_api
from tests.fleets import replica

WATCHING = {("", "pods", "list"), ("", "pods", "watch")}
"""What discovery by `kubernetes` does: list the pods, then watch them."""

RESTARTING = {("", "pods", "delete")}
"""What it does in addition to restart a replica."""


def granted(chart: Chart) -> set[tuple[str, str, str]]:
    """Every right that a role of the release gives."""
    return {
        (group, resource, verb)
        for role in chart.of_kind("Role", "ClusterRole")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def needed(chart: Chart) -> set[tuple[str, str, str]]:
    """Every right that the gateway uses, by the settings that it is started with."""
    settings = {e["name"]: e.get("value") for e in chart.container("gateway")["env"]}
    if settings["FLEET_DISCOVERY"] != "kubernetes":
        return set()
    restarting = settings["FLEET_KUBERNETES__RESTART"] == "true"
    return WATCHING | (RESTARTING if restarting else set())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gateway_has_the_rights_it_uses_and_no_other(shape: str) -> None:
    """Exactly, in every shape; nothing for the whole cluster."""
    chart = render(shape)
    assert granted(chart) == needed(chart)
    assert chart.of_kind("ClusterRole", "ClusterRoleBinding") == []


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_is_mounted_only_where_it_is_used(shape: str) -> None:
    """A gateway that asks no API server carries no token for one."""
    chart = render(shape)
    spec = chart.template("gateway")["spec"]
    assert spec["automountServiceAccountToken"] is bool(needed(chart))


@pytest.mark.parametrize("shape", ["default", "external-fleet-selector"])
def test_the_binding_is_where_the_pods_are_and_names_the_gateways_account(shape: str) -> None:
    """Rights over a fleet in another namespace are given there, to the account here."""
    chart = render(shape)
    account = chart.template("gateway")["spec"]["serviceAccountName"]
    role, binding = chart.one("Role"), chart.one("RoleBinding")
    watched = "rollouts" if shape != "default" else NAMESPACE
    for manifest in (role, binding):
        assert manifest["metadata"].get("namespace", NAMESPACE) == watched
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    subject = {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
    assert binding["subjects"] == [subject]
    assert chart.one("ServiceAccount")["metadata"]["name"] == account


def test_rights_can_be_left_to_others() -> None:
    """rbac.create and serviceAccount.create are apart."""
    without_role = render("default", "rbac.create=false")
    assert without_role.of_kind("Role", "RoleBinding") == []
    assert len(without_role.of_kind("ServiceAccount")) == 1
    own = render("default", "serviceAccount.create=false", 'serviceAccount.name="mine"')
    assert own.of_kind("ServiceAccount") == []
    assert own.template("gateway")["spec"]["serviceAccountName"] == "mine"
    assert own.one("RoleBinding")["subjects"][0]["name"] == "mine"


async def test_a_restart_needs_the_right_to_delete_and_no_other() -> None:
    """What the code asks of an API server when a replica is restarted; lists: test_runs.py."""
    async with fake_api(namespace=NAMESPACE) as api:
        pod = await api.put(a_pod("replicas-0", "127.0.0.1:9"))
        origin = Origin(source="pods", uid=pod["metadata"]["uid"], name="replicas-0")
        restart = PodRestart(ApiServer(url=api.url), NAMESPACE)
        await restart.restart(replica("127.0.0.1:9", origin=origin))
        assert {("", "pods", asked.verb) for asked in api.asked} == RESTARTING
