"""The chart, rendered by a real Helm: what every test here starts from."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "helm"
TOOLS: Final = ROOT / ".tools" / "chart"
SHAPES: Final = tuple(sorted(p.name.removesuffix("-values.yaml") for p in CHART.glob("ci/*.yaml")))
"""The shapes that people run, by the names of their values files."""

HELMS: Final = ("helm3", "helm4")
RELEASE: Final = "rl"
NAMESPACE: Final = "train"

Manifest = dict[str, Any]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is


class HelmFailed(Exception):
    """Helm refused; the message is what it wrote."""


def helm(name: str, *arguments: str) -> str:
    """Run a Helm to its end and return what it printed; HelmFailed if it refused."""
    ended = subprocess.run(
        [str(TOOLS / name), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    if ended.returncode != 0:
        raise HelmFailed(ended.stdout + ended.stderr)
    return ended.stdout


@cache
def rendered_text(
    shape: str,
    sets: tuple[str, ...] = (),
    *,
    by: str = "helm4",
    kube_version: str = "1.32",
    chart: Path = CHART,
) -> str:
    """Render a shape; `sets` are `--set-json` arguments on top of its values."""
    arguments = ["template", RELEASE, str(chart), "--namespace", NAMESPACE]
    arguments += ["--kube-version", kube_version]
    arguments += ["--values", str(CHART / "ci" / f"{shape}-values.yaml")]
    for one in sets:
        arguments += ["--set-json", one]
    return helm(by, *arguments)


def render(shape: str = "default", *sets: str, **how: Any) -> Chart:
    """Return the manifests of a shape, fresh ones that a test may change."""
    text = rendered_text(shape, sets, **how)
    return Chart([document for document in yaml.load_all(text, _LOADER) if document])


@dataclass
class Chart:
    """Rendered manifests, and the ways in which tests look at them."""

    manifests: list[Manifest]

    def of_kind(self, *kinds: str) -> list[Manifest]:
        """Return all manifests of these kinds."""
        return [m for m in self.manifests if m["kind"] in kinds]

    def one(self, kind: str, component: str | None = None) -> Manifest:
        """Return the only manifest of this kind and component."""
        found = [m for m in self.of_kind(kind) if component in (None, component_of(m))]
        assert len(found) == 1, f"{len(found)} of {kind} {component}"
        return found[0]

    def workloads(self) -> Iterator[tuple[Manifest, list[Manifest]]]:
        """Yield what makes pods, each with its pod templates."""
        for manifest in self.of_kind("Deployment", "StatefulSet"):
            yield manifest, [manifest["spec"]["template"]]
        for manifest in self.of_kind("LeaderWorkerSet"):
            group = manifest["spec"]["leaderWorkerTemplate"]
            yield manifest, [group["leaderTemplate"], group["workerTemplate"]]

    def templates(self) -> list[Manifest]:
        """Return all pod templates."""
        return [template for _, templates in self.workloads() for template in templates]

    def template(self, component: str) -> Manifest:
        """Return the pod template of a component."""
        found = [t for t in self.templates() if component_of(t) == component]
        assert len(found) == 1, f"{len(found)} pod templates of {component}"
        return found[0]

    def container(self, component: str) -> Manifest:
        """Return the first container of a component's pods."""
        return self.template(component)["spec"]["containers"][0]


def component_of(manifest: Manifest) -> str | None:
    """Return which part of the release a manifest belongs to."""
    return manifest["metadata"].get("labels", {}).get("app.kubernetes.io/component")


def name_of(manifest: Manifest) -> str:
    """Return `Kind/name`, for messages."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def environment(container: Manifest) -> dict[str, Any]:
    """Return a container's variables: a text, or where it comes from."""
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container.get("env", [])}


def run_tool(command: Sequence[str], stdin: object) -> Any:
    """Run a tool that takes JSON and gives JSON."""
    ended = subprocess.run(
        command, input=json.dumps(stdin), capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(ended.stdout)
