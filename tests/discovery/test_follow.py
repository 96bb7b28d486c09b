"""End to end: pods appear and vanish on an API server, and a fleet of simulated servers follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet.discovery.api import ApiServer
from fleet.discovery.base import Tell
from fleet.discovery.dns import NameSource
from fleet.discovery.restart import PodRestart
from fleet.errors import NotAllowed, Refused, Unavailable
from fleet.facts.endpoint import Endpoint, Origin, Snapshot
from fleet.facts.replica import Replica
from fleet.follow import follow
from fleet.owner import task_owner
from fleet.sim import SimFleet, SimReplica
from gateway.settings_model import DiscoveryKind, Kubernetes, Settings
from tests.cases.conftest import UPDATE, Case, check_error, fast, nccl, posts
from tests.discovery.fake_api import FakeApi, Pod, a_pod, fake_api
from tests.discovery.test_dns import HOST, name_server
from tests.fleets import replica as a_replica
from tests.gateway.serving import serve
from tests.gateway.test_serve import run
from tests.redis_server import RedisServer
from tests.waiting import wait_until


def settings_for(api: FakeApi, **more: Any) -> Settings:
    """A gateway that finds its replicas on this API server."""
    found = Kubernetes(namespace=api.namespace, selector="app=vllm", api=api.url)
    chosen: dict[str, Any] = {"discovery": DiscoveryKind.KUBERNETES, "timeouts": fast()} | more
    return Settings(kubernetes=found, **chosen)


def pod_of(replica: SimReplica, **facts: Any) -> Pod:
    """The pod in which a simulated replica runs."""
    return a_pod(f"vllm-{replica.index}", replica.id, **facts)


@dataclass
class Cluster(Case):
    """A fleet whose replicas are pods."""

    api: FakeApi

    async def put(self, index: int, **facts: Any) -> None:
        """Change one replica's pod."""
        await self.api.put(pod_of(self.replicas[index], **facts))

    async def delete(self, index: int) -> None:
        """Take one replica's pod away."""
        await self.api.delete(f"vllm-{index}")

    async def caught_up(self) -> None:
        """Wait until the gateway has seen everything up to now: events come in order."""
        await self.api.put(a_pod("marker", "127.0.0.1:1"))

        async def seen() -> bool:
            return "127.0.0.1:1" in await self.served.states()

        await wait_until(seen)

    async def reason(self, index: int) -> str:
        """Why one replica is in its state."""
        told = (await self.http.get("/fleet/replicas")).json()["replicas"]
        return next(r["reason"] for r in told if r["id"] == self.replicas[index].id)


@asynccontextmanager
async def cluster(replicas: int = 2, pods: int | None = None) -> AsyncGenerator[Cluster]:
    """Replicas as pods, and a gateway that has found the first of them (all by default)."""
    async with fake_api() as api, SimFleet(nccl(replicas)) as sim:
        for replica in sim.replicas[: replicas if pods is None else pods]:
            await api.put(pod_of(replica))
        async with serve(settings_for(api)) as served:
            found = Cluster(sim, served, api)
            await found.await_states(*["ready"] * len(api.pods))
            yield found


async def test_pods_come_and_go_and_the_fleet_follows() -> None:
    """A newcomer serves (nothing is committed yet), one that is gone is forgotten."""
    async with cluster(3, pods=2) as fleet:
        assert (await fleet.complete()).status_code == 200
        await fleet.put(2)
        await fleet.await_states("ready", "ready", "ready")
        await fleet.delete(0)
        await fleet.await_states("ready", "ready")
        assert fleet.replicas[0].id not in await fleet.served.states()
        await fleet.first_sync("1")
        assert [len(posts(replica, UPDATE)) for replica in fleet.replicas] == [0, 1, 1]


@pytest.mark.parametrize("facts", [{"ready": False}, {"terminating": True}])
async def test_a_pod_that_leaves_gets_no_rollout_but_ends_those_it_has(
    facts: dict[str, Any],
) -> None:
    """Terminating and not Ready: at once, and what runs is not broken."""
    async with cluster(2) as fleet:
        running = [asyncio.ensure_future(fleet.complete(f"p{n}", 400)) for n in range(2)]

        async def both_run() -> bool:
            return [r.stats()["running"] for r in fleet.replicas] == [1, 1]

        await wait_until(both_run)
        await fleet.put(0, **facts)
        await fleet.await_states("draining", "ready")
        assert "its pod is " in await fleet.reason(0)
        for number in range(6):
            answer = await fleet.complete(f"q{number}")
            assert answer.headers["X-Fleet-Replica"] == fleet.replicas[1].id
        assert [(await answer).status_code for answer in running] == [200, 200]
        await fleet.put(0)
        await fleet.await_states("ready", "ready")


async def _hold_update(fleet: Cluster, index: int, seconds: float) -> asyncio.Task[httpx.Response]:
    """Let an update begin that this replica holds up; return the trainer's call."""
    assert (await fleet.start()).status_code == 200
    fleet.replicas[index].faults.add(UPDATE, "delay", seconds=seconds)
    call = asyncio.ensure_future(fleet.update())

    async def inside() -> bool:
        return (await fleet.fleet())["phase"] == "updating"

    await wait_until(inside)
    return call


async def test_a_member_that_is_not_ready_because_it_is_busy_stays_in_its_round() -> None:
    """The update arrives everywhere, commits, and everyone serves again at once."""
    async with cluster(2) as fleet:
        assert (await fleet.init()).status_code == 200
        call = await _hold_update(fleet, 0, 2.0)
        for index in range(2):
            await fleet.put(index, ready=False)
        await fleet.caught_up()
        answer = await call
        assert answer.status_code == 200
        assert "X-Fleet-Membership" not in answer.headers
        assert (await fleet.finish("1")).status_code == 200
        assert await fleet.states() == ["ready", "ready"]
        assert (await fleet.complete()).headers["X-Weight-Version"] == "1"
        for index in range(2):
            await fleet.put(index)
        await fleet.sync("2")
        assert await fleet.states() == ["ready", "ready"]


async def test_a_member_that_terminates_ends_its_round_and_is_left_out_of_the_next() -> None:
    """Rolling updates happen between rounds; this one came inside, and costs nobody the round."""
    async with cluster(2) as fleet:
        assert (await fleet.init()).status_code == 200
        call = await _hold_update(fleet, 0, 2.0)
        await fleet.put(0, terminating=True)
        await fleet.await_states("draining", "updating")
        answer = await call
        assert answer.status_code == 200
        assert answer.headers["X-Fleet-Membership"] == "changed; world_size=2"
        assert (await fleet.finish("1")).status_code == 200
        assert await fleet.states() == ["draining", "ready"]
        await fleet.delete(0)
        await fleet.await_states("ready")
        assert (await fleet.init(2)).status_code == 200
        await fleet.sync("2")


async def test_a_member_whose_pod_dies_fails_its_round_and_the_next_goes_without_it() -> None:
    """Named, fenced where weights may be mixed, forgotten only when the round is over."""
    async with cluster(2) as fleet:
        assert (await fleet.init()).status_code == 200
        call = await _hold_update(fleet, 0, 30.0)
        await fleet.delete(0)
        await fleet.await_states("gone", "updating")
        await fleet.replicas[0].die()
        check_error(await call, 424, fleet.replicas[0].id)
        await fleet.await_states("fenced")
        assert (await fleet.init(2)).status_code == 200
        await fleet.sync("2")
        assert await fleet.states() == ["ready"]


async def test_a_pod_that_comes_in_a_round_waits_for_the_next() -> None:
    """Stale until an init takes it in; the trainer is told."""
    async with cluster(2, pods=1) as fleet:
        await fleet.first_sync("1")
        call = await _hold_update(fleet, 0, 2.0)
        await fleet.put(1)
        await fleet.await_states("updating", "stale")
        assert (await call).headers["X-Fleet-Membership"] == "changed; world_size=3"
        assert (await fleet.finish("2")).status_code == 200
        assert await fleet.states() == ["ready", "stale"]
        await fleet.first_sync("3")
        assert await fleet.states() == ["ready", "ready"]


async def test_a_pod_made_again_at_the_same_address_must_be_caught_up() -> None:
    """It serves nothing until an update has reached it, though its address is well known."""
    async with cluster(2) as fleet:
        await fleet.first_sync("1")
        await fleet.replicas[0].restart()
        anew = pod_of(fleet.replicas[0], uid="another", created="2026-01-02T00:00:00Z")
        await fleet.api.replace(anew)
        await fleet.await_states("stale", "ready")
        check_error(await fleet.start(), 409, fleet.replicas[0].id)
        await fleet.first_sync("2")
        assert await fleet.states() == ["ready", "ready"]


async def test_annotations_lay_out_the_ranks() -> None:
    """Two servers of one deployment that each report all of it are counted once."""
    told = {"fleet.vllm.ai/data-parallel-group": "ep", "fleet.vllm.ai/expert-parallel": "true"}
    told["fleet.vllm.ai/world-size"] = "4"
    async with fake_api() as api, SimFleet(nccl(3)) as sim:
        for replica in sim.replicas[:2]:
            port = {"fleet.vllm.ai/port": str(replica.port)}
            await api.put(pod_of(replica, annotations=told | port))
        await api.put(pod_of(sim.replicas[2]))
        async with serve(settings_for(api)) as served:
            fleet = Cluster(sim, served, api)
            await fleet.await_states("ready", "ready", "ready")
            assert (await fleet.http.get("/get_world_size")).json()["world_size"] == 5


async def test_a_gateway_whose_api_server_is_away_keeps_its_fleet_and_undoes_nothing(
    redis_url: str,
) -> None:
    """Two gateways on one Redis, each with an API server of its own; one of them is broken."""
    async with fake_api() as one, fake_api() as other, SimFleet(nccl(2)) as sim:
        for api in (one, other):
            await api.put(pod_of(sim.replicas[0]))
        async with (
            serve(settings_for(one, store=redis_url)) as first,
            serve(settings_for(other, store=redis_url)) as second,
        ):
            sound, broken = Cluster(sim, first, one), Cluster(sim, second, other)
            await sound.await_states("ready")
            await broken.await_states("ready")
            await other.go_away()
            await sound.put(1)
            await sound.await_states("ready", "ready")
            await broken.await_states("ready", "ready")
            await sound.put(0, ready=False)
            await broken.await_states("draining", "ready")
            await sound.delete(0)
            await sound.await_states("ready")
            await broken.await_states("ready")
            other.pods.clear()
            await other.come_back()  # knows nothing: neither is that believed at once
            await asyncio.sleep(1.0)
            await sound.await_states("ready")


async def test_the_gateway_starts_without_an_api_server_and_finds_pods_later() -> None:
    """It says so in its log, serves its routes, and does not die of it."""
    async with fake_api() as api, SimFleet(nccl(1)) as sim:
        await api.put(pod_of(sim.replicas[0]))
        await api.go_away()
        async with serve(settings_for(api)) as served:
            assert (await served.http.get("/livez")).status_code == 200
            assert await served.states() == {}
            await api.come_back()
            await Cluster(sim, served, api).await_states("ready", timeout_s=40)


async def test_a_gateway_without_a_store_learns_the_version_from_all_pods_at_once() -> None:
    """Restarted over memory://: nobody is stale only because somebody else was looked at first."""
    async with fake_api() as api, SimFleet(nccl(12)) as sim, httpx.AsyncClient() as http:
        for replica in sim.replicas:
            await api.put(pod_of(replica))
            label = {"new_version": "7"}
            await http.post(f"{replica.url}/update_weight_version", json=label)
        async with serve(settings_for(api)) as served:
            fleet = Cluster(sim, served, api)
            assert await fleet.states() == ["ready"] * 12
            assert await fleet.version() == "7"


async def test_addresses_of_a_name_come_and_go() -> None:
    """The same with DNS: one that is listed no more takes no rollouts, and may come back."""
    async with name_server("127.0.0.1") as server, SimFleet(nccl(1)) as sim:
        source = NameSource(HOST, sim.replicas[0].port, 0.05, server.resolver)
        async with serve(Settings(timeouts=fast())) as served, task_owner() as owner:
            owner.create_task(follow(source, served.gateway.ledger))
            fleet = Case(sim, served)
            await fleet.await_states("ready")
            await fleet.ok("/update_weight_version", {"new_version": "1"})
            server.addresses = []
            await fleet.await_states("draining")
            server.addresses = ["127.0.0.1"]
            await fleet.await_states("ready")
            assert (await fleet.complete()).headers["X-Weight-Version"] == "1"


class _Broken:
    """A source with a bug that goes away."""

    name = "broken"

    def __init__(self, replica: SimReplica) -> None:
        self._url = replica.url
        self.runs = 0

    async def run(self, tell: Tell) -> None:
        """Fail once, then tell one endpoint."""
        self.runs += 1
        if self.runs == 1:
            raise ZeroDivisionError
        origin = Origin(source=self.name, uid="a")
        tell(Snapshot(source=self.name, endpoints={"a": Endpoint(url=self._url, origin=origin)}))
        await asyncio.Event().wait()


async def test_a_bug_in_a_source_ends_neither_the_gateway_nor_discovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged with its stack, and tried again."""
    async with SimFleet(nccl(1)) as sim:
        source = _Broken(sim.replicas[0])
        async with serve(Settings(timeouts=fast())) as served, task_owner() as owner:
            owner.create_task(follow(source, served.gateway.ledger))
            await Case(sim, served).await_states("ready")
    assert "bug in discovery" in caplog.messages


async def test_what_is_found_while_the_store_is_away_is_written_when_it_is_back(
    tmp_path: Path,
) -> None:
    """Nothing is forgotten for want of Redis."""
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        async with fake_api() as api, SimFleet(nccl(2)) as sim:
            await api.put(pod_of(sim.replicas[0]))
            async with serve(settings_for(api, store=redis.url)) as served:
                fleet = Cluster(sim, served, api)
                await fleet.await_states("ready")
                redis.kill()
                await fleet.put(1)
                await asyncio.sleep(0.5)  # it must have tried, and failed
                redis.start()
                await fleet.await_states("ready", "ready", timeout_s=20)
    finally:
        redis.kill()


# ---- restarts -----------------------------------------------------------------------------------


def _a_pod_replica(uid: str) -> Replica:
    origin = Origin(source="kubernetes rl app=vllm", uid=f"{uid}@10.0.0.1:8000", name="a")
    return a_replica("10.0.0.1:8000", origin=origin)


async def test_a_restart_deletes_the_very_pod(tmp_path: Path) -> None:
    """Not the one that has its name by now; that one is the restarted replica already."""
    async with fake_api() as api:
        await api.put(a_pod("a", "10.0.0.1:8000", uid="two"))
        pods = PodRestart(ApiServer(url=api.url, account=tmp_path), api.namespace)
        await pods.restart(_a_pod_replica("one"))
        assert list(api.pods) == ["a"]
        await pods.restart(_a_pod_replica("two"))
        assert not api.pods
        await pods.restart(_a_pod_replica("two"))


async def test_a_restart_that_cannot_be_done_says_why(tmp_path: Path) -> None:
    """No pod, no right, no API server: three answers, and only the last may be retried."""
    async with fake_api(forbidden={"delete"}) as api:
        await api.put(a_pod("a", "10.0.0.1:8000", uid="one"))
        pods = PodRestart(ApiServer(url=api.url, account=tmp_path), api.namespace)
        with pytest.raises(Refused, match="is no pod"):
            await pods.restart(a_replica("10.0.0.1:8000"))
        with pytest.raises(NotAllowed, match="may not delete"):
            await pods.restart(_a_pod_replica("one"))
        await api.go_away()
        with pytest.raises(Unavailable, match="was not deleted: ConnectError"):
            await pods.restart(_a_pod_replica("one"))


def test_a_gateway_outside_of_a_cluster_says_what_it_lacks() -> None:
    """One line, and no stack trace."""
    chosen = {"FLEET_DISCOVERY": "kubernetes", "FLEET_KUBERNETES__SELECTOR": "app=vllm"}
    clean = {"KUBERNETES_SERVICE_HOST": "", "KUBERNETES_SERVICE_PORT": ""}
    ended = run("serve", "--port", "0", **chosen, **clean)
    assert ended.returncode != 0
    assert "FLEET_KUBERNETES__API must name the API server" in ended.stderr
    ended = run("serve", "--port", "0", FLEET_KUBERNETES__API="http://127.0.0.1:1", **chosen)
    assert "FLEET_KUBERNETES__NAMESPACE must be set" in ended.stderr
    assert "Traceback" not in ended.stderr
