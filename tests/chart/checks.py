"""What no validator sees in manifests: each check returns the problems it finds, in words.

Pure: manifests in, problems out. `test_checks.py` breaks good manifests and looks whether the
checks notice; `test_manifests.py` holds every shape to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from tests.chart.helm import Chart, Manifest, component_of, name_of

Problems = Iterator[str]
_QUANTITY: Final = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?")
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_TAG: Final = re.compile(r".+(:[\w][\w.-]*|@sha256:[0-9a-f]{64})")
_OWN_REFERENCE: Final = re.compile(r"\$\(([A-Za-z_]\w*)\)")
_GIVEN_BY_LWS: Final = {"LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE"}
_LOADING_S: Final = 1800
_PORTS: Final = ("containerPort", "port", "targetPort", "endPort")
_AMOUNTS: Final = ("cpu", "memory", "storage", "sizeLimit")


def selectors_match(chart: Chart) -> Problems:
    """A workload selects its own pods, and everything else that selects finds some."""
    for workload, templates in chart.workloads():
        selector = workload["spec"].get("selector")
        if selector and not selects(selector, templates[0]["metadata"]["labels"]):
            yield f"{name_of(workload)} does not select its own pods"
    labels = [t["metadata"]["labels"] for t in chart.templates()]
    for manifest in chart.of_kind("Service", "PodDisruptionBudget", "NetworkPolicy"):
        selector = _selector(manifest)
        if not any(selects(selector, some) for some in labels):
            yield f"{name_of(manifest)} selects no pod of this release"
    services = [s["metadata"]["labels"] for s in chart.of_kind("Service")]
    for monitor in chart.of_kind("ServiceMonitor"):
        if not any(selects(monitor["spec"]["selector"], some) for some in services):
            yield f"{name_of(monitor)} selects no Service"


def selectors_are_apart(chart: Chart) -> Problems:
    """No workload, Service or budget selects pods of two components."""
    for manifest in chart.of_kind("Service", "Deployment", "StatefulSet", "PodDisruptionBudget"):
        found = {
            component_of(t)
            for t in chart.templates()
            if selects(_selector(manifest), t["metadata"]["labels"])
        }
        if len(found) > 1:
            yield f"{name_of(manifest)} selects pods of {sorted(map(str, found))}"


def selectors_are_stable(chart: Chart) -> Problems:
    """What cannot be changed after the install, or restarts pods, carries no version."""
    for workload, templates in chart.workloads():
        stable = [workload["spec"].get("selector", {}), *(t["metadata"] for t in templates)]
        stable += [c["metadata"] for c in workload["spec"].get("volumeClaimTemplates", [])]
        if re.search(r"helm\.sh/chart|kubernetes\.io/version", str(stable)):
            yield f"{name_of(workload)} has the chart's version where it must not change"


def ports_meet(chart: Chart) -> Problems:
    """Ports lead from a Service, a probe or a policy to a port that a container has."""
    for service in chart.of_kind("Service"):
        targets = _pods(chart, _selector(service))
        for port in service["spec"]["ports"]:
            for template in targets:
                if resolve(template, port["targetPort"]) is None:
                    yield f"{name_of(service)}: {port['targetPort']} is no port of its pods"
    for template in chart.templates():
        for container in template["spec"]["containers"]:
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(name, {})
                action = probe.get("httpGet") or probe.get("tcpSocket")
                if action and resolve(template, action["port"]) is None:
                    yield f"{container['name']}: {name} asks port {action['port']}"


def backends_meet(chart: Chart) -> Problems:
    """Ingress, route and monitor lead to a port that a Service has."""
    services = {s["metadata"]["name"]: s["spec"]["ports"] for s in chart.of_kind("Service")}
    for manifest, name, key, port in _backends(chart):
        if port not in [p[key] for p in services.get(name, [])]:
            yield f"{name_of(manifest)} leads to {port} of {name}"


def _backends(chart: Chart) -> Iterator[tuple[Manifest, str, str, str | int]]:
    """Yield who leads where: the manifest, the Service, and its port by name or number."""
    for ingress in chart.of_kind("Ingress"):
        paths = [path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
        for backend in (path["backend"]["service"] for path in paths):
            yield ingress, backend["name"], "name", backend["port"]["name"]
    for route in chart.of_kind("HTTPRoute"):
        for backend in (one for rule in route["spec"]["rules"] for one in rule["backendRefs"]):
            yield route, backend["name"], "port", backend["port"]
    for monitor in chart.of_kind("ServiceMonitor"):
        for service in _monitored(chart, monitor):
            for endpoint in monitor["spec"]["endpoints"]:
                yield monitor, service, "name", endpoint["port"]


def _monitored(chart: Chart, monitor: Manifest) -> list[str]:
    selector = monitor["spec"]["selector"]
    found = [s["metadata"] for s in chart.of_kind("Service")]
    return [meta["name"] for meta in found if selects(selector, meta["labels"])]


def numbers_hold(chart: Chart) -> Problems:
    """Ports are ports, quantities are quantities, GPUs are whole and as many asked as allowed."""
    for path, value in walk(chart.manifests):
        if path[-1] in _PORTS and isinstance(value, int) and not 1 <= value <= 65535:
            yield f"{path}: port {value}"
        if path[-1] in _AMOUNTS and not _QUANTITY.fullmatch(str(value)):
            yield f"{path}: {value!r} is no quantity"
    for template in chart.templates():
        for container in template["spec"]["containers"]:
            yield from _devices_hold(container)


def _devices_hold(container: Manifest) -> Problems:
    resources = container.get("resources", {})
    for name, amount in resources.get("limits", {}).items():
        asked = resources.get("requests", {}).get(name, amount)
        if "/" in name and (not isinstance(amount, int) or amount != asked):
            yield f"{container['name']}: {name} {asked!r} of {amount!r}"


def names_hold(chart: Chart) -> Problems:
    """Names are DNS labels, appear once, and name no namespace but that of a foreign fleet."""
    seen = [name_of(m) for m in chart.manifests]
    yield from (f"{name} appears twice" for name in sorted({n for n in seen if seen.count(n) > 1}))
    for manifest in chart.manifests:
        if not _DNS_LABEL.fullmatch(manifest["metadata"]["name"]):
            yield f"{name_of(manifest)} is no DNS label"
        if "namespace" in manifest["metadata"] and manifest["kind"] not in ("Role", "RoleBinding"):
            yield f"{name_of(manifest)} names its namespace"


def references_resolve(chart: Chart) -> Problems:
    """What a pod mounts or reads is in the release or was named by the user."""
    there = {(m["kind"], m["metadata"]["name"]) for m in chart.manifests}
    for template in chart.templates():
        spec = template["spec"]
        claims = {"models", "data"}  # of volumeClaimTemplates
        volumes = {v["name"] for v in spec.get("volumes", [])} | claims
        for volume in spec.get("volumes", []):
            name = volume.get("configMap", {}).get("name")
            if name and ("ConfigMap", name) not in there:
                yield f"volume {volume['name']}: there is no ConfigMap {name}"
        for container in spec["containers"]:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"{container['name']} mounts {mount['name']}, which is no volume"
            yield from _environment_resolves(container)


def _environment_resolves(container: Manifest) -> Problems:
    """Each variable is set once, and what refers to another one comes after it."""
    known = set(_GIVEN_BY_LWS)
    for variable in container.get("env", []):
        if variable["name"] in known:
            yield f"{container['name']}: {variable['name']} is set twice"
        missing = set(_OWN_REFERENCE.findall(variable.get("value") or "")) - known
        yield from (f"{container['name']}: {variable['name']} needs {m} first" for m in missing)
        known.add(variable["name"])
    for text in [*container.get("command", []), *container.get("args", [])]:
        missing = set(_OWN_REFERENCE.findall(text)) - known
        yield from (f"{container['name']}: argument {text} needs {m}" for m in missing)


def images_are_pinned(chart: Chart) -> Problems:
    """Every image has a tag or a digest, and the tag is not `latest`."""
    for template in chart.templates():
        for container in template["spec"]["containers"]:
            image = container["image"]
            if not _TAG.fullmatch(image) or image.endswith(":latest"):
                yield f"{container['name']}: image {image}"


def pods_are_confined(chart: Chart) -> Problems:
    """Pods run as nobody, on a read-only root, without rights, tokens or injected variables."""
    for template in chart.templates():
        spec, component = template["spec"], component_of(template)
        if spec.get("enableServiceLinks") is not False:
            yield f"{component}: enableServiceLinks"
        if component != "gateway" and spec.get("automountServiceAccountToken") is not False:
            yield f"{component}: mounts a token"
        if not spec["securityContext"].get("runAsNonRoot"):
            yield f"{component}: may run as root"
        if spec["securityContext"].get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{component}: no seccomp profile"
        for container in spec["containers"]:
            context = container["securityContext"]
            if context.get("allowPrivilegeEscalation") is not False:
                yield f"{component}: may gain rights"
            if not context.get("readOnlyRootFilesystem"):
                yield f"{component}: writable root"
            if context.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{component}: keeps capabilities"


def loading_has_time(chart: Chart) -> Problems:
    """A replica has half an hour or more to load its model, and only then counts as dead."""
    for container in _servers(chart):
        probe = container.get("startupProbe")
        if not probe or probe["periodSeconds"] * probe["failureThreshold"] < _LOADING_S:
            yield f"{container['name']}: startupProbe {probe}"


def collectives_have_time(chart: Chart) -> Problems:
    """No probe ends or takes away a server that is silent inside a collective."""
    limits = _timeouts(chart)
    for container in _servers(chart):
        liveness = container["livenessProbe"]
        patience = liveness["periodSeconds"] * liveness["failureThreshold"]
        if "httpGet" in liveness and patience <= max(limits):
            yield f"{container['name']}: killed after {patience} s, a collective takes {limits}"
        if "httpGet" in container["readinessProbe"]:
            yield f"{container['name']}: not ready while it answers nothing"


def stops_have_time(chart: Chart) -> Problems:
    """The grace period of a pod is longer than all that happens before its end."""
    for container in _servers(chart):
        template = next(t for t in chart.templates() if container in t["spec"]["containers"])
        variables = {e["name"]: e.get("value") for e in container["env"]}
        shutdown = next(a for a in container["args"] if a.startswith("--shutdown-timeout="))
        needed = int(shutdown.partition("=")[2]) + int(variables.get("LEAVE_TIMEOUT_S") or 0)
        if template["spec"].get("terminationGracePeriodSeconds", 30) <= needed:
            yield f"{container['name']}: stops need {needed} s"
    gateway = chart.template("gateway")["spec"]
    container = gateway["containers"][0]
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])
    needed = float(hook[-1]) + _setting(container, "FLEET_TIMEOUTS__DRAIN_S", 30)
    if gateway["terminationGracePeriodSeconds"] <= needed:
        yield f"gateway: stops need {needed} s"


ALL: Final[tuple[Callable[[Chart], Problems], ...]] = (
    selectors_match,
    selectors_are_apart,
    selectors_are_stable,
    ports_meet,
    backends_meet,
    numbers_hold,
    names_hold,
    references_resolve,
    images_are_pinned,
    pods_are_confined,
    loading_has_time,
    collectives_have_time,
    stops_have_time,
)


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Say whether a label selector selects a pod with these labels."""
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In", f"not evaluated here: {rule}"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def resolve(template: Manifest, port: str | int) -> int | None:
    """Return the number of a pod's port, given by name or number; None if it has none such."""
    for container in template["spec"]["containers"]:
        for declared in container.get("ports", []):
            if port in (declared["name"], declared["containerPort"]):
                return declared["containerPort"]
    return None


def walk(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every leaf with the keys that lead to it."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from walk(value, (*path, str(key)))
    elif isinstance(node, list):
        for value in node:
            yield from walk(value, path)
    else:
        yield path, node


def _selector(manifest: Manifest) -> Manifest:
    spec = manifest["spec"]
    if manifest["kind"] == "Service":
        return {"matchLabels": spec["selector"]}
    return spec["podSelector"] if manifest["kind"] == "NetworkPolicy" else spec["selector"]


def _pods(chart: Chart, selector: Manifest) -> list[Manifest]:
    return [t for t in chart.templates() if selects(selector, t["metadata"]["labels"])]


def _servers(chart: Chart) -> list[Manifest]:
    return [
        template["spec"]["containers"][0]
        for template in chart.templates()
        if component_of(template) == "replica"
    ]


def _timeouts(chart: Chart) -> tuple[float, float]:
    gateway = chart.container("gateway")
    return (
        _setting(gateway, "FLEET_TIMEOUTS__INIT_S", 300),
        _setting(gateway, "FLEET_TIMEOUTS__UPDATE_S", 1800),
    )


def _setting(container: Manifest, name: str, default: float) -> float:
    found = [e["value"] for e in container["env"] if e["name"] == name]
    return float(found[0]) if found else default
