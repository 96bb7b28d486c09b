"""The checks themselves: a manifest that is broken in one place is a problem to the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.chart import checks
from tests.chart.helm import Chart, render

Break = Callable[[Chart], None]


def _gateway(chart: Chart) -> Any:
    return chart.one("Deployment")


def _selector(chart: Chart) -> None:
    _gateway(chart)["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] = "gate"


def _budget(chart: Chart) -> None:
    chart.one("PodDisruptionBudget", "replica")["spec"]["selector"] = {"matchLabels": {"a": "b"}}


def _monitor(chart: Chart) -> None:
    chart.one("ServiceMonitor")["spec"]["selector"] = {"matchLabels": {"a": "b"}}


def _wide_service(chart: Chart) -> None:
    del chart.one("Service", "gateway")["spec"]["selector"]["app.kubernetes.io/component"]


def _version(chart: Chart) -> None:
    labels = chart.template("replica")["metadata"]["labels"]
    labels["helm.sh/chart"] = "vllm-fleet-gateway-0.1.0"


def _service_port(chart: Chart) -> None:
    chart.one("Service", "replica")["spec"]["ports"][0]["targetPort"] = "metrics"


def _no_port(chart: Chart) -> None:
    del chart.container("gateway")["ports"]


def _probe_port(chart: Chart) -> None:
    chart.container("redis")["livenessProbe"]["tcpSocket"]["port"] = 6380


def _route(chart: Chart) -> None:
    chart.one("HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]["port"] = 80


def _ingress(chart: Chart) -> None:
    rule = chart.one("Ingress")["spec"]["rules"][0]
    rule["http"]["paths"][0]["backend"]["service"]["name"] = "gateway"


def _monitored_port(chart: Chart) -> None:
    chart.one("ServiceMonitor")["spec"]["endpoints"][0]["port"] = "metrics"


def _high_port(chart: Chart) -> None:
    chart.container("gateway")["ports"][0]["containerPort"] = 700000


def _quantity(chart: Chart) -> None:
    chart.container("gateway")["resources"]["limits"]["memory"] = "3 GiB"


def _half_gpu(chart: Chart) -> None:
    chart.container("replica")["resources"]["limits"]["nvidia.com/gpu"] = 0.5


def _uneven_gpus(chart: Chart) -> None:
    chart.container("replica")["resources"]["requests"]["nvidia.com/gpu"] = 1


def _name(chart: Chart) -> None:
    chart.one("Service", "redis")["metadata"]["name"] = "x" * 64


def _namespace(chart: Chart) -> None:
    chart.one("Service", "redis")["metadata"]["namespace"] = "default"


def _config_map(chart: Chart) -> None:
    chart.manifests.remove(chart.one("ConfigMap", "replica"))


def _mount(chart: Chart) -> None:
    chart.container("gateway")["volumeMounts"][0]["name"] = "temporary"


def _order(chart: Chart) -> None:
    chart.container("gateway")["env"].reverse()


def _twice(chart: Chart) -> None:
    chart.container("gateway")["env"] += [{"name": "FLEET_PORT", "value": "1"}]


def _latest(chart: Chart) -> None:
    chart.container("replica")["image"] = "vllm/vllm-openai:latest"


def _no_tag(chart: Chart) -> None:
    chart.container("replica")["image"] = "vllm/vllm-openai"


def _links(chart: Chart) -> None:
    chart.template("replica")["spec"]["enableServiceLinks"] = True


def _token(chart: Chart) -> None:
    del chart.template("redis")["spec"]["automountServiceAccountToken"]


def _root(chart: Chart) -> None:
    chart.template("gateway")["spec"]["securityContext"]["runAsNonRoot"] = False


def _writable(chart: Chart) -> None:
    chart.container("gateway")["securityContext"]["readOnlyRootFilesystem"] = False


def _impatient(chart: Chart) -> None:
    chart.container("replica")["startupProbe"]["failureThreshold"] = 60


def _deadly(chart: Chart) -> None:
    chart.container("replica")["livenessProbe"]["failureThreshold"] = 3


def _leaving(chart: Chart) -> None:
    probe = {"httpGet": {"path": "/health", "port": "http"}}
    chart.container("replica")["readinessProbe"] = probe


def _grace(chart: Chart) -> None:
    chart.template("replica")["spec"]["terminationGracePeriodSeconds"] = 30


def _gateway_grace(chart: Chart) -> None:
    chart.template("gateway")["spec"]["terminationGracePeriodSeconds"] = 300


BROKEN: list[tuple[Break, Any]] = [
    (_selector, checks.selectors_match),
    (_budget, checks.selectors_match),
    (_monitor, checks.selectors_match),
    (_wide_service, checks.selectors_are_apart),
    (_version, checks.selectors_are_stable),
    (_service_port, checks.ports_meet),
    (_no_port, checks.ports_meet),
    (_probe_port, checks.ports_meet),
    (_route, checks.backends_meet),
    (_ingress, checks.backends_meet),
    (_monitored_port, checks.backends_meet),
    (_high_port, checks.numbers_hold),
    (_quantity, checks.numbers_hold),
    (_half_gpu, checks.numbers_hold),
    (_uneven_gpus, checks.numbers_hold),
    (_name, checks.names_hold),
    (_namespace, checks.names_hold),
    (_config_map, checks.references_resolve),
    (_mount, checks.references_resolve),
    (_order, checks.references_resolve),
    (_twice, checks.references_resolve),
    (_latest, checks.images_are_pinned),
    (_no_tag, checks.images_are_pinned),
    (_links, checks.pods_are_confined),
    (_token, checks.pods_are_confined),
    (_root, checks.pods_are_confined),
    (_writable, checks.pods_are_confined),
    (_impatient, checks.loading_has_time),
    (_deadly, checks.collectives_have_time),
    (_leaving, checks.collectives_have_time),
    (_grace, checks.stops_have_time),
    (_gateway_grace, checks.stops_have_time),
]


@pytest.mark.parametrize(("broken", "check"), BROKEN, ids=lambda f: f.__name__.strip("_"))
def test_a_broken_manifest_is_seen(broken: Break, check: Any) -> None:
    """Each check finds what it is there for, and found nothing before."""
    chart = render("eight-replicas-tp2")
    assert list(check(chart)) == []
    broken(chart)
    assert list(check(chart)) != []


def test_every_check_is_tried() -> None:
    """A new check needs a manifest that breaks it."""
    assert {check for _, check in BROKEN} == set(checks.ALL)
