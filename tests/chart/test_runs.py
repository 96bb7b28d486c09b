"""Rendered manifests run: the gateway's and Redis' own command, arguments and environment.

Started as processes, against simulated replicas; what differs from a cluster is the names of hosts
and the folder of Redis' volume.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from fleet.sim import SimFleet
from fleet.sim.trainer import SimTrainer, free_port
from fleet.sim.weights import build_state_dict
from tests.chart.helm import NAMESPACE, Chart, Manifest, render
from tests.chart.kubelet import Node
from tests.discovery.fake_api import a_pod, fake_api
from tests.waiting import wait_until

TOKENS = ("operator", "trainer", "rollout")


@dataclass
class Running:
    """A rendered gateway that is ready."""

    process: asyncio.subprocess.Process
    url: str

    def http(self, who: str) -> httpx.AsyncClient:
        """A client with somebody's token."""
        headers = {"Authorization": f"Bearer {who}-secret"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30, trust_env=False)

    async def stop(self) -> None:
        """End it as a kubelet does; it goes by itself."""
        self.process.send_signal(signal.SIGTERM)
        status = await asyncio.wait_for(self.process.wait(), 30)
        assert status in (0, -signal.SIGTERM)


@asynccontextmanager
async def redis_running(chart: Chart, folder: Path) -> AsyncGenerator[int]:
    """Run the chart's Redis, with its volume in a folder; yields its port."""
    port = free_port()
    container = chart.container("redis")
    (mount,) = container["volumeMounts"]
    node = Node(chart, folder / "redis.log", {mount["mountPath"]: str(folder)})
    container["args"] += ["--port", str(port), "--bind", "127.0.0.1"]
    async with node.running(container) as process:

        async def listens() -> bool:
            assert process.returncode is None, node.log.read_text()
            return "Ready to accept connections" in node.log.read_text()

        await wait_until(listens, timeout_s=20)
        yield port


@asynccontextmanager
async def gateway_running(
    chart: Chart, log: Path, redis_port: int, extra: list[Manifest] | None = None
) -> AsyncGenerator[Running]:
    """Run the chart's gateway until its probes pass, against a Redis on this port."""
    host = chart.one("Service", "redis")["metadata"]["name"]
    node = Node(chart, log, {f"@{host}:6379": f"@127.0.0.1:{redis_port}"})
    container = chart.container("gateway")
    container["env"] += extra or []
    async with node.running(container) as process:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            await node.passes(container, probe)
        (port,) = container["ports"]
        yield Running(process, f"http://127.0.0.1:{port['containerPort']}")


def outside_fleet(urls: list[str]) -> Chart:
    """The default release in front of a fleet that is there, with all tokens set."""
    listed = ",".join(f'"{url}"' for url in urls)
    tokens = ",".join(f'"{who}Token": "{who}-secret"' for who in TOKENS)
    return render(
        "default",
        "replicas.enabled=false",
        f'discovery={{"kind": "static", "urls": [{listed}]}}',
        f"auth={{{tokens}}}",
        f"gateway.port={free_port()}",
        "gateway.drainSeconds=5",
    )


@pytest.mark.timeout(180)
async def test_a_rendered_gateway_does_the_main_job(tmp_path: Path) -> None:
    """A weight update and rollouts through it; a second gateway on the same Redis remembers."""
    async with SimFleet(replicas=2, backend="gloo") as fleet:
        chart = outside_fleet(fleet.urls)
        async with redis_running(chart, tmp_path) as redis_port:
            async with gateway_running(chart, tmp_path / "first.log", redis_port) as first:
                await do_one_round(first)
                await pause_and_resume(first)
                await first.stop()
            again = outside_fleet(fleet.urls)
            again.manifests = [m for m in again.manifests if m["kind"] != "Secret"]
            again.manifests += chart.of_kind("Secret")  # as an upgrade keeps the password
            async with gateway_running(again, tmp_path / "second.log", redis_port) as second:
                async with second.http("operator") as http:
                    assert (await http.get("/fleet")).json()["weight_version"] == "step-1"
                await second.stop()


async def do_one_round(gateway: Running) -> None:
    """Send weights with a stock trainer's protocol; a rollout before and after it is served."""
    async with gateway.http("rollout") as http:
        body = {"model": "sim", "prompt": "x", "max_tokens": 2}
        before = await http.post("/v1/completions", json=body)
        assert (before.status_code, before.headers["x-weight-version"]) == (200, "default")
        await asyncio.to_thread(send_weights, gateway.url)
        after = await http.post("/v1/completions", json=body)
        assert (after.status_code, after.headers["x-weight-version"]) == (200, "step-1")
        assert (await http.post("/pause")).status_code == 403, "a rollout token pauses nothing"


def send_weights(url: str) -> None:
    """One round, with the token in the URL as stock clients carry it."""
    trainer = SimTrainer(url.replace("http://", "http://trainer:trainer-secret@"))
    try:
        trainer.init()
        trainer.send_weights(build_state_dict(1), "step-1")
    finally:
        trainer.close()


async def pause_and_resume(gateway: Running) -> None:
    """A rollout that comes in a pause is held and then served."""
    async with gateway.http("operator") as http:
        assert (await http.post("/pause?mode=keep")).status_code == 200
        body = {"model": "sim", "prompt": "x", "max_tokens": 2}
        async with asyncio.TaskGroup() as group:
            held = group.create_task(http.post("/v1/completions", json=body))

            async def waits() -> bool:
                return (await http.get("/fleet")).json()["gate"]["held"] == 1

            await wait_until(waits)
            assert (await http.post("/resume")).status_code == 200
        assert held.result().status_code == 200


@pytest.mark.timeout(120)
async def test_a_rendered_gateway_finds_the_rendered_replicas(tmp_path: Path) -> None:
    """Discovery by pods: the labels of the StatefulSet's pods, the rights of the Role."""
    chart = render("default", f"gateway.port={free_port()}", "gateway.drainSeconds=5")
    labels = chart.template("replica")["metadata"]["labels"]
    async with SimFleet(replicas=2) as fleet, fake_api(namespace=NAMESPACE) as api:
        for number, url in enumerate(fleet.urls):
            address = url.removeprefix("http://")
            await api.put(a_pod(f"replicas-{number}", address, labels=labels))
        await api.put(a_pod("stranger", "127.0.0.1:1"))
        there = {"name": "FLEET_KUBERNETES__API", "value": api.url}
        async with (
            redis_running(chart, tmp_path) as redis_port,
            gateway_running(chart, tmp_path / "gateway.log", redis_port, [there]) as gateway,
            gateway.http("nobody") as http,
        ):

            async def found() -> bool:
                listed = (await http.get("/fleet/replicas")).json()["replicas"]
                ready = {replica["url"] for replica in listed if replica["state"] == "ready"}
                return ready == set(fleet.urls) and len(listed) == len(fleet.urls)

            await wait_until(found, timeout_s=20)
        (rule,) = chart.one("Role")["rules"]
        assert {asked.verb for asked in api.asked} == set(rule["verbs"])
