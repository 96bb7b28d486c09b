"""The images: what their files say is linted, carried out step by step, and started."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from fleet.sim.trainer import free_port
from tests.chart.dockerfile import Image, in_context, read_stages
from tests.chart.helm import ROOT, TOOLS, render
from tests.waiting import wait_until

GATEWAY = ROOT / "Dockerfile"
REPLICA = ROOT / "docker/replica-cpu.Dockerfile"
ENTRY_POINTS = (
    "from importlib.metadata import entry_points as e; print(e(group='vllm.general_plugins').names)"
)


@pytest.mark.parametrize("path", [GATEWAY, REPLICA], ids=lambda path: path.name)
def test_the_linter_has_nothing_to_say(path: Path) -> None:
    """hadolint, with no rule turned off."""
    linter = [str(TOOLS / "venv/bin/hadolint"), "--no-color", str(path)]
    ended = subprocess.run(linter, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """The gateway's stages, built as its Dockerfile says."""
    folder = tmp_path_factory.mktemp("images")
    built: dict[str, Image] = {}
    for number, stage in enumerate(read_stages(GATEWAY)):
        image = Image(folder / str(number), built)
        image.build(stage)
        built[stage.name] = image
    return built


@pytest.fixture(scope="module")
def image(images: dict[str, Image]) -> Image:
    """The last stage."""
    return images[""]


def test_the_image_has_the_gateway_of_this_checkout(image: Image) -> None:
    """Installed from its wheel, at the pinned versions, and nowhere else."""
    assert image.run(["fleet", "--version"]).strip() == "0.1.0"
    where = image.run(["python", "-c", "import gateway; print(gateway.__file__)"])
    assert where.startswith(image.inside("/opt/fleet/"))
    pins = (ROOT / "constraints.txt").read_text()
    said = image.run(["python", "-c", _VERSIONS])
    found = dict(line.split("==") for line in said.splitlines())
    pinned = {bare(n): v for n, v in re.findall(r"(?m)^([\w.-]+)==(\S+)$", pins)}
    wrong = {n: v for n, v in found.items() if pinned.get(n, v) != v or n not in pinned}
    assert wrong.keys() == {"vllm-fleet-gateway"}, wrong


_VERSIONS = """
import importlib.metadata as m, re
for d in m.distributions():
    print(re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(), d.version, sep="==")
"""


def bare(name: str) -> str:
    """A distribution's normalised name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_nothing_that_builds_is_left(image: Image) -> None:
    """No torch, no vLLM, no pip: neither in the environment nor in the Python below it."""
    for module in ("torch", "vllm", "pip", "setuptools", "hatchling", "pytest"):
        find = f"import importlib.util as u; print(u.find_spec({module!r}))"
        assert image.run(["python", "-c", find]).strip() == "None", module
    below = image.python / "bin/python"
    find = "import importlib.util as u; print(u.find_spec('pip'), u.find_spec('setuptools'))"
    assert image.run([str(below), "-c", find]).strip() == "None None"
    assert not Path(image.inside("/src")).exists()


async def test_the_image_serves_and_says_so(image: Image) -> None:
    """Its entry point and command, until its own health check passes; nothing is written."""
    stage = read_stages(GATEWAY)[-1]
    image.variables |= {"FLEET_PORT": str(free_port()), "FLEET_HOST": "127.0.0.1"}
    command = [*stage.last("ENTRYPOINT").words, *stage.last("CMD").words]
    check: list[str] = json.loads(stage.last("HEALTHCHECK").text.partition("CMD ")[2])
    log = image.folder.parent / "gateway.log"
    before = files_in(image)

    async def healthy() -> bool:
        return await (await started(image, check, log)).wait() == 0

    gateway = await started(image, command, log)
    try:
        await wait_until(healthy, timeout_s=60)
        assert files_in(image) == before
        gateway.terminate()
        assert await asyncio.wait_for(gateway.wait(), 30) in (0, -signal.SIGTERM)
    finally:
        if gateway.returncode is None:
            gateway.kill()
            await gateway.wait()
    assert not await healthy(), "the check passes without a gateway"


async def started(image: Image, command: list[str], log: Path) -> asyncio.subprocess.Process:
    """Start a command in an image."""
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command, env=image.environment(), cwd=image.folder, stdout=output, stderr=output
        )


def files_in(image: Image) -> set[str]:
    """Every file of the image."""
    return {str(path) for path in image.folder.rglob("*")}


def test_what_the_image_declares_fits_the_chart() -> None:
    """Its user, port and command are the ones that the chart expects."""
    stage = read_stages(GATEWAY)[-1]
    template = render().template("gateway")
    container = template["spec"]["containers"][0]
    user, _, group = stage.last("USER").text.partition(":")
    context = template["spec"]["securityContext"]
    assert (int(user), int(group)) == (context["runAsUser"], context["runAsGroup"])
    assert int(stage.last("EXPOSE").text) == container["ports"][0]["containerPort"]
    assert container["command"] == stage.last("ENTRYPOINT").words
    assert container["args"] == stage.last("CMD").words
    assert context["runAsNonRoot"]
    assert int(user) != 0


def test_bases_are_pinned() -> None:
    """The Python image by version and digest, the same one everywhere; vLLM's by its version."""
    bases = {stage.base for path in (GATEWAY, REPLICA) for stage in read_stages(path)}
    python = {base for base in bases if base.startswith("python:")}
    (pinned,) = python
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", pinned)
    (vllm,) = bases - python
    assert re.fullmatch(r"docker\.io/vllm/vllm-openai-cpu:v\d+\.\d+\.\d+", vllm)


def test_nothing_but_the_sources_gets_into_the_build() -> None:
    """Neither environments nor the repository's history travel to the builder."""
    for path in (".git/config", ".venv/bin/python", "tests/conftest.py", ".tools/chart/helm4"):
        assert not in_context(path), path
    assert in_context("gateway/app.py")
    assert in_context("docker/build-constraints.txt")


def test_the_wheel_in_vllms_image_brings_the_gloo_backend(
    images: dict[str, Image], tmp_path: Path
) -> None:
    """The replica's image: unpacked into vLLM's Python, which then finds the plugin."""
    stage = read_stages(REPLICA)[-1]
    replica = Image(tmp_path, {"build": images["build"]})
    assert "fleet_gloo" not in replica.run(["python3", "-c", ENTRY_POINTS])
    replica.build(stage)
    assert "fleet_gloo" in replica.run(["python3", "-c", ENTRY_POINTS])
