"""Pods as the API server tells them, and the endpoints they are. Pure.

Only the fields named here are decoded. Kubernetes API conventions: a resource version is a string;
those of one object are compared as numbers here, which Kubernetes promises since 1.35 (KEP-5504)
and etcd has always given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from fleet.facts.address import url_host
from fleet.facts.endpoint import Endpoint, Origin
from fleet.facts.options import Placement

PREFIX = "fleet.vllm.ai/"
PORT = f"{PREFIX}port"
WORLD_SIZE = f"{PREFIX}world-size"
DATA_PARALLEL_GROUP = f"{PREFIX}data-parallel-group"
EXPERT_PARALLEL = f"{PREFIX}expert-parallel"

OVER = frozenset({"Succeeded", "Failed"})
"""Phases after which a pod runs no more, though its object, and its old address, stay."""


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    """The part of a list's metadata that is needed to go on from it."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str
    resource_version: str
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str
    reason: str | None = None
    message: str | None = None


class _PodStatus(msgspec.Struct, frozen=True):
    phase: str = ""
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: tuple[_Condition, ...] | None = None


class Pod(msgspec.Struct, frozen=True):
    """One pod; a name, a uid and a resource version it must have."""

    metadata: _Meta
    status: _PodStatus = _PodStatus()


class PodList(msgspec.Struct, frozen=True):
    """One page of pods; what has no `items` or is no PodList is no answer."""

    kind: Literal["PodList"]
    metadata: ListMeta
    items: tuple[Pod, ...] | None


class Status(msgspec.Struct, frozen=True):
    """Why the API server says no."""

    code: int = 0
    reason: str = ""
    message: str = ""


class _Bookmark(msgspec.Struct, frozen=True):
    metadata: ListMeta


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Pods(msgspec.Struct, frozen=True):
    """The pods known so far, by name, and the resource version up to which that is true.

    By name, since no two pods have the same one at a time: a new pod tells by itself that the old
    one is gone, even if that event was lost.
    """

    version: str
    by_name: dict[str, Pod]


class WatchFailed(Exception):
    """The watch told an error instead of an event."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"{status.code} {status.reason}: {status.message}")
        self.code = status.code


def after_event(pods: Pods, line: bytes) -> Pods:
    """Return the pods after one line of a watch.

    Raises WatchFailed for an ERROR event, msgspec.MsgspecError for what is no event.
    """
    event = msgspec.json.decode(line, type=WatchEvent)
    if event.type == "ERROR":
        raise WatchFailed(msgspec.json.decode(event.object, type=Status))
    if event.type == "BOOKMARK":
        told = msgspec.json.decode(event.object, type=_Bookmark)
        return Pods(told.metadata.resource_version or pods.version, pods.by_name)
    pod = msgspec.json.decode(event.object, type=Pod)
    name, known = pod.metadata.name, dict(pods.by_name)
    if event.type != "DELETED":
        known[name] = pod
    elif name in known and known[name].metadata.uid == pod.metadata.uid:
        del known[name]
    return Pods(pod.metadata.resource_version, known)


def endpoints_of(pods: Pods, source: str, port: int) -> dict[str, Endpoint]:
    """Return the endpoints of the pods by uid; one without an address or that is over has none."""
    found = (endpoint_of(pod, source, port) for pod in pods.by_name.values())
    return {endpoint.origin.uid: endpoint for endpoint in found if endpoint is not None}


def endpoint_of(pod: Pod, source: str, port: int) -> Endpoint | None:
    """Return one pod's endpoint, or None if it has none (any more)."""
    meta, status = pod.metadata, pod.status
    if not status.pod_ip or status.phase in OVER:
        return None
    told = {**(meta.labels or {}), **(meta.annotations or {})}
    wrong: str | None = None
    placement: Placement | None = None
    try:
        port = _whole_number(told, PORT, most=65535) or port
        placement = placement_of(told)
    except ValueError as error:
        wrong = str(error)
    host = url_host(status.pod_ip)
    origin = Origin(
        source=source,
        uid=f"{meta.uid}@{host}:{port}",
        name=meta.name,
        created=meta.creation_timestamp,
        revision=_revision(meta.resource_version),
        placement=placement,
    )
    return Endpoint(
        url=f"http://{host}:{port}",
        origin=origin,
        unready=wrong or _why_unready(pod),
        leaving="its pod is terminating" if meta.deletion_timestamp else None,
    )


def placement_of(told: Mapping[str, str]) -> Placement | None:
    """Return what labels and annotations say about a pod's ranks; None if they say nothing.

    Raises ValueError, which names the annotation, for what cannot be meant.
    """
    workers = _whole_number(told, WORLD_SIZE)
    group = told.get(DATA_PARALLEL_GROUP) or None
    expert = told.get(EXPERT_PARALLEL, "false")
    if expert not in ("true", "false"):
        raise ValueError(f"{EXPERT_PARALLEL} is true or false, not {expert!r}")
    if expert == "true" and group is None:
        raise ValueError(f"{EXPERT_PARALLEL} needs {DATA_PARALLEL_GROUP}, the servers it spans")
    if workers is None and group is None:
        return None
    return Placement(
        explicit=True,
        workers=workers,
        deployment=f"group {group}" if group else None,
        counts_deployment=expert == "true",
    )


def pod_uid(origin: Origin) -> str:
    """Return the uid of the pod itself."""
    return origin.uid.partition("@")[0]


def _whole_number(told: Mapping[str, str], name: str, most: int = 1_000_000) -> int | None:
    text = told.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= most):
        raise ValueError(f"{name} is a whole number from 1 to {most}, not {text!r}")
    return int(text)


def _why_unready(pod: Pod) -> str | None:
    conditions = pod.status.conditions or ()
    ready = next((c for c in conditions if c.type == "Ready"), None)
    if ready is not None and ready.status == "True":
        return None
    told = ready.message or ready.reason if ready else None
    return f"its pod is not Ready ({told})" if told else "its pod is not Ready"


def _revision(version: str) -> int:
    return int(version) if version.isascii() and version.isdigit() else 0
