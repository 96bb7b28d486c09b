"""Pods to endpoints: addresses, readiness, and what annotations say about ranks."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fleet.discovery.pods import Pod, Pods, WatchFailed, after_event, endpoint_of, pod_uid
from fleet.facts.endpoint import Endpoint
from fleet.facts.options import Placement
from tests.discovery.fake_api import a_pod

PREFIX = "fleet.vllm.ai/"


def endpoint(pod: dict[str, Any], port: int = 8000) -> Endpoint | None:
    """The endpoint of a pod as the API server writes it."""
    pod["metadata"].setdefault("resourceVersion", "7")
    return endpoint_of(msgspec.json.decode(json.dumps(pod), type=Pod), "test", port)


def annotated(**annotations: str) -> Endpoint:
    """The endpoint of a pod with these annotations; names without their prefix."""
    told = {PREFIX + name.replace("_", "-"): text for name, text in annotations.items()}
    found = endpoint(a_pod("a", "10.0.0.1:8000", annotations=told))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.0.0.1", "http://10.0.0.1:9000"), ("fd00::7", "http://[fd00::7]:9000")],
)
def test_an_endpoint_is_the_pods_address_and_the_port(host: str, url: str) -> None:
    """IPv6, too; the uid carries the address, since a pod may get another one."""
    pod = a_pod("a", "x:1")
    pod["status"]["podIP"] = host
    del pod["metadata"]["annotations"]
    found = endpoint(pod, 9000)
    assert found is not None
    assert (found.url, found.unready, found.leaving) == (url, None, None)
    assert found.origin.uid == f"uid-of-a@{url.removeprefix('http://')}"
    assert pod_uid(found.origin) == "uid-of-a"
    assert (found.origin.name, found.origin.revision) == ("a", 7)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_is_over_has_no_endpoint(phase: str) -> None:
    """Its object keeps the address, which may be another pod's by now."""
    assert endpoint(a_pod("a", "10.0.0.1:8000", phase=phase)) is None


@pytest.mark.parametrize("address", [None, ""])
def test_a_pod_without_an_address_has_no_endpoint(address: str | None) -> None:
    """It is not scheduled yet, or its sandbox is gone."""
    pod = a_pod("a", "10.0.0.1:8000")
    pod["status"]["podIP"] = address
    assert endpoint(pod) is None


@pytest.mark.parametrize("conditions", [None, [], [{"type": "Initialized", "status": "True"}]])
def test_a_pod_that_does_not_say_that_it_is_ready_is_not(conditions: Any) -> None:
    """Just created, say."""
    pod = a_pod("a", "10.0.0.1:8000")
    pod["status"]["conditions"] = conditions
    found = endpoint(pod)
    assert found is not None
    assert found.unready == "its pod is not Ready"


def test_the_reason_for_not_being_ready_is_told() -> None:
    """An operator reads it at GET /fleet/replicas."""
    pod = a_pod("a", "10.0.0.1:8000", terminating=True)
    told = "containers with unready status: [vllm]"
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False", "message": told}]
    found = endpoint(pod)
    assert found is not None
    assert found.unready == f"its pod is not Ready ({told})"
    assert found.leaving == "its pod is terminating"


def test_annotations_place_a_server_among_the_ranks() -> None:
    """As the entries of FLEET_TOPOLOGY do."""
    assert annotated().origin.placement is None
    assert annotated(world_size="8").origin.placement == Placement(explicit=True, workers=8)
    shared = annotated(data_parallel_group="dp0", world_size="2").origin.placement
    assert shared == Placement(explicit=True, workers=2, deployment="group dp0")
    spread = annotated(data_parallel_group="ep0", expert_parallel="true").origin.placement
    assert spread == Placement(explicit=True, deployment="group ep0", counts_deployment=True)


def test_labels_say_the_same_and_annotations_win() -> None:
    """A label can be set by a template that has no place for annotations."""
    labels = {f"{PREFIX}world-size": "2", f"{PREFIX}port": "9001"}
    pod = a_pod("a", "10.0.0.1:9002", labels=labels)
    found = endpoint(pod)
    assert found is not None
    assert found.url == "http://10.0.0.1:9002"
    assert found.origin.placement == Placement(explicit=True, workers=2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("world_size", "two"),
        ("world_size", "0"),
        ("world_size", "-1"),
        ("world_size", "²"),
        ("port", "70000"),
        ("port", ""),
        ("expert_parallel", "yes"),
        ("expert_parallel", "true"),
    ],
)
def test_a_pod_whose_annotation_cannot_be_meant_takes_no_part(name: str, text: str) -> None:
    """A wrong guess would hang a whole group; the message names the annotation."""
    found = annotated(**{name: text})
    assert found.unready is not None
    assert PREFIX + name.replace("_", "-") in found.unready


def _line(kind: str, pod: dict[str, Any] | str, version: str = "8") -> bytes:
    if isinstance(pod, dict):
        pod["metadata"]["resourceVersion"] = version
    return json.dumps({"type": kind, "object": pod}).encode()


def test_events_change_the_pods_one_after_another() -> None:
    """Added, modified, deleted; the version follows."""
    pods = after_event(Pods("7", {}), _line("ADDED", a_pod("a", "10.0.0.1:1")))
    assert (pods.version, list(pods.by_name)) == ("8", ["a"])
    pods = after_event(pods, _line("MODIFIED", a_pod("a", "10.0.0.2:1"), "9"))
    assert (pods.version, pods.by_name["a"].status.pod_ip) == ("9", "10.0.0.2")
    bookmark = {"kind": "Pod", "metadata": {"resourceVersion": "20"}}
    pods = after_event(pods, _line("BOOKMARK", bookmark, "20"))
    assert (pods.version, list(pods.by_name)) == ("20", ["a"])
    pods = after_event(pods, _line("DELETED", a_pod("a", "10.0.0.2:1"), "21"))
    assert (pods.version, pods.by_name) == ("21", {})


def test_the_end_of_an_old_pod_does_not_take_the_new_one() -> None:
    """The same name, another uid, and the events out of order."""
    pods = after_event(Pods("7", {}), _line("ADDED", a_pod("a", "10.0.0.1:1", uid="new")))
    pods = after_event(pods, _line("DELETED", a_pod("a", "10.0.0.1:1", uid="old"), "9"))
    assert pods.by_name["a"].metadata.uid == "new"


def test_an_error_instead_of_an_event_is_raised_with_its_code() -> None:
    """410 and others."""
    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
    line = json.dumps({"type": "ERROR", "object": status}).encode()
    with pytest.raises(WatchFailed, match="410 Expired: too old") as caught:
        after_event(Pods("7", {}), line)
    assert caught.value.code == 410


@pytest.mark.parametrize("line", [b"{", b"{}", b"[]", b'{"type":"ADDED","object":{}}'])
def test_what_is_no_event_is_refused(line: bytes) -> None:
    """It is not taken for a pod without a name."""
    with pytest.raises(msgspec.MsgspecError):
        after_event(Pods("7", {}), line)
