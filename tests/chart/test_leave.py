"""The preStop hook of replicas: they leave the fleet between weight updates, not inside one."""

from __future__ import annotations

import asyncio
import runpy
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from fleet.sim import SimFleet
from gateway.settings_model import Auth, Settings
from tests.chart.helm import CHART, environment, render
from tests.chart.kubelet import without_fleet
from tests.gateway.serving import Served, serve
from tests.waiting import wait_until

HOOK = CHART / "files" / "leave.py"
INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}


def hook(gateway: str, replica: str, **variables: str) -> asyncio.Future[Any]:
    """Start the hook for a replica, with the standard library alone, as vLLM's image has it."""
    host, _, port = replica.removeprefix("http://").rpartition(":")
    own = {"LEAVE_GATEWAY": gateway, "LEAVE_HOST": host, "LEAVE_PORT": port}
    limits = {"LEAVE_TIMEOUT_S": "20", "LEAVE_TOKEN_FILE": "/nowhere"}
    return asyncio.ensure_future(_run({**without_fleet(), **limits, **own, **variables}))


async def _run(variables: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(HOOK), env=variables, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said
    return said.decode()


@asynccontextmanager
async def serving(replicas: int, **settings: Any) -> AsyncGenerator[tuple[SimFleet, Served]]:
    """Some replicas and a gateway in front of them."""
    async with (
        SimFleet(replicas=replicas, backend="nccl") as fleet,
        serve(Settings(replicas=tuple(fleet.urls), **settings)) as served,
    ):
        yield fleet, served


@asynccontextmanager
async def in_a_round() -> AsyncGenerator[tuple[SimFleet, Served]]:
    """Two replicas whose weight update is open: started, nothing sent yet."""
    async with serving(2) as (fleet, served):
        for path, body in (
            ("/init_weight_transfer_engine", {"init_info": {**INIT, "world_size": 3}}),
            ("/start_weight_update", None),
        ):
            answer = await served.http.post(path, json=body)
            assert answer.is_success, answer.text
        yield fleet, served


async def test_between_rounds_a_replica_leaves_at_once() -> None:
    """It is draining, and the hook is over."""
    async with serving(2) as (fleet, served):
        await asyncio.wait_for(hook(served.url, fleet.urls[0]), 45)
        states = await served.states()
    assert [states[url.removeprefix("http://")] for url in fleet.urls] == ["draining", "ready"]


async def test_inside_a_round_a_replica_waits_for_its_end() -> None:
    """The round commits with it; only then does its pod get the signal to stop."""
    async with in_a_round() as (fleet, served):
        leaving = hook(served.url, fleet.urls[0])
        replica = fleet.urls[0].removeprefix("http://")

        async def asked() -> bool:
            listed = (await served.http.get("/fleet/replicas")).json()["replicas"]
            return any("operator" in r["reason"] for r in listed if r["id"] == replica)

        await wait_until(asked)
        with pytest.raises(TimeoutError):  # two polls and more
            await asyncio.wait_for(asyncio.shield(leaving), 2.5)
        update = {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}}
        assert (await served.http.post("/update_weights", json=update)).is_success
        assert not leaving.done()
        body = {"weight_version": "step-1"}
        assert (await served.http.post("/finish_weight_update", json=body)).is_success
        await asyncio.wait_for(leaving, 45)
        assert (await served.fleet())["weight_version"] == "step-1"
        states = await served.states()
    assert states[replica] == "draining"


async def test_the_wait_is_bounded() -> None:
    """A trainer that died in a round keeps no pod for ever."""
    async with in_a_round() as (fleet, served):
        began = time.monotonic()
        await asyncio.wait_for(hook(served.url, fleet.urls[0], LEAVE_TIMEOUT_S="2"), 45)
        assert time.monotonic() - began >= 2
        assert (await served.fleet())["phase"] == "started"


async def test_a_replica_that_answers_nothing_is_not_drained() -> None:
    """It may be the liveness probe that ends it: it comes back at the same address, and serves."""
    async with serving(2) as (fleet, served):
        fleet.replicas[0].faults.add("/health", "status", status=503, times=0)
        await asyncio.wait_for(hook(served.url, fleet.urls[0]), 45)
        listed = (await served.http.get("/fleet/replicas")).json()["replicas"]
    assert all(replica["state"] != "draining" for replica in listed)


async def test_without_a_gateway_a_replica_stops_all_the_same() -> None:
    """When the whole release is deleted, nobody answers any more."""
    async with SimFleet(replicas=1) as fleet:
        gone = hook("http://127.0.0.1:1", fleet.urls[0], LEAVE_TIMEOUT_S="2")
        await asyncio.wait_for(gone, 45)


async def test_the_operators_token_is_read_from_its_file(tmp_path: Path) -> None:
    """With it the replica drains; without it the gateway refuses, and the hook is over."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    auth = Auth(operator_token=SecretStr("secret"))
    async with serving(1, auth=auth) as (fleet, served):
        headers = {"Authorization": "Bearer secret"}

        async def state() -> str:
            answer = await served.http.get("/fleet/replicas", headers=headers)
            return answer.json()["replicas"][0]["state"]

        await asyncio.wait_for(hook(served.url, fleet.urls[0]), 45)
        assert await state() == "ready"
        known = hook(served.url, fleet.urls[0], LEAVE_TOKEN_FILE=str(token))
        await asyncio.wait_for(known, 45)
        assert await state() == "draining"


async def test_a_worker_outlives_its_leader() -> None:
    """The leader still answers rollouts for a while, and cannot without its workers."""
    async with serving(1) as (fleet, served):
        worker = hook(served.url, fleet.urls[0], LEAVE_AFTER_LEADER_S="30")

        async def draining() -> bool:
            return list((await served.states()).values()) == ["draining"]

        await wait_until(draining)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(worker), 2)
        await fleet.replicas[0].die()
        await asyncio.wait_for(worker, 45)


@pytest.mark.parametrize(("host", "expected"), [("::1", "[::1]:8000"), ("127.1", "127.0.0.1:8000")])
def test_a_replica_is_named_as_the_gateway_names_it(
    host: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By address, not by name; IPv6 in brackets."""
    monkeypatch.setenv("LEAVE_HOST", host)
    monkeypatch.setenv("LEAVE_PORT", "8000")
    assert runpy.run_path(str(HOOK))["replica_id"]() == expected


@pytest.mark.parametrize("shape", ["eight-replicas-tp2", "multi-node", "cpu"])
def test_the_manifests_give_the_hook_what_it_reads(shape: str) -> None:
    """Its file is mounted where it is called, and the gateway's Service is the one of the chart."""
    chart = render(shape)
    for template in chart.templates():
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        if not component.startswith("replica"):
            continue
        container = template["spec"]["containers"][0]
        called = Path(container["lifecycle"]["preStop"]["exec"]["command"][-1])
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        volume = next(
            v for v in template["spec"]["volumes"] if v["name"] == mounts[str(called.parent)]
        )
        (files,) = [
            m for m in chart.of_kind("ConfigMap")
            if m["metadata"]["name"] == volume["configMap"]["name"]
        ]  # fmt: skip
        assert files["data"][called.name].strip() == HOOK.read_text().strip()
        service = chart.one("Service", "gateway")
        url = httpx.URL(str(environment(container)["LEAVE_GATEWAY"]))
        assert url.host == f"{service['metadata']['name']}.train.svc.cluster.local"
        assert url.port == service["spec"]["ports"][0]["port"]
        leader = "$(LWS_LEADER_ADDRESS)" if component == "replica-worker" else "$(POD_IP)"
        assert environment(container)["LEAVE_HOST"] == leader
