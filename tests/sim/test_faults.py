"""Scripted faults: each does what it says, when it says, as often as it says."""

import asyncio
from typing import Any

import aiohttp
import pytest

from fleet.sim import SimFleet, SimReplica
from tests.ports import free_port
from tests.sim.conftest import Http
from tests.waiting import wait_until

GONE = (aiohttp.ClientError, ConnectionError)


async def test_status_fault_answers_in_the_calls_place(http: Http) -> None:
    """The call has no effect, and the next one goes through."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        replica.faults.add("/pause", "status", status=503, body={"error": "busy"})
        assert await http.post(replica, "/pause") == (503, {"error": "busy"})
        assert replica.engine.paused is None
        assert await http.post(replica, "/pause") == (200, {"status": "paused"})


async def test_a_probe_for_a_route_uses_up_no_fault_that_is_meant_for_the_call(http: Http) -> None:
    """Gateways ask for control routes with GET, at moments that no test knows."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        replica.faults.add("/pause", "status")
        assert (await http.get(replica, "/pause"))[0] == 405
        assert (await http.post(replica, "/pause"))[0] == 500


async def test_lie_is_a_200_that_says_error(http: Http) -> None:
    """A success by its status, a failure by its body."""
    async with SimFleet() as fleet:
        fleet.replicas[0].faults.add("/start_weight_update", "lie")
        status, body = await http.post(fleet.replicas[0], "/start_weight_update")
        assert (status, body["error"]["message"]) == (200, "scripted fault")


async def test_drop_after_loses_the_answer_and_keeps_the_effect(http: Http) -> None:
    """What a lost answer looks like: the connection breaks, the call was carried out."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        replica.faults.add("/start_weight_update", "drop", when="after")
        with pytest.raises(GONE):
            await http.post(replica, "/start_weight_update")
        assert replica.engine.session == "model"


async def test_drop_before_has_no_effect(http: Http) -> None:
    """The connection breaks and nothing was carried out."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        replica.faults.add("/start_weight_update", "drop")
        with pytest.raises(GONE):
            await http.post(replica, "/start_weight_update")
        assert replica.engine.session is None


async def test_hang_never_answers_and_others_do(http: Http) -> None:
    """Only the call that matched hangs."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        replica.faults.add("/pause", "hang")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await http.post(replica, "/pause")
        assert (await http.get(replica, "/health"))[0] == 200


async def test_delay_goes_on_afterwards(http: Http) -> None:
    """The call is late, not lost."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        replica.faults.add("/resume", "delay", seconds=0.2)
        began = asyncio.get_running_loop().time()
        assert await http.post(replica, "/resume") == (200, {"status": "resumed"})
        assert asyncio.get_running_loop().time() - began >= 0.2


async def test_times_zero_is_always_and_prefixes_match(http: Http) -> None:
    """A rule that is not counted down holds until it is removed."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        replica.faults.add("/v1/*", "status", status=500, times=0)
        for _ in range(3):
            assert (await http.get(replica, "/v1/models"))[0] == 500
        replica.faults.clear()
        assert (await http.get(replica, "/v1/models"))[0] == 200


async def test_death_breaks_every_connection_and_stops_listening(http: Http) -> None:
    """As SIGKILL would: the call, its neighbours and later connections all fail."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        replica.faults.add("/sleep", "hang")
        replica.faults.add("/pause", "die")
        async with asyncio.TaskGroup() as group:
            neighbour = group.create_task(_breaks(http, replica, "/sleep"))
            group.create_task(_breaks(http, replica, "/pause"))
        assert neighbour.result()
        assert not replica.alive
        assert await _breaks(http, replica, "/resume")


async def test_restarted_replica_is_a_new_one_at_the_old_address(http: Http) -> None:
    """Same port, new instance id, initial weights, version default, nothing paused."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        url, instance = replica.url, await _instance(http, replica)
        await http.post(replica, "/pause")
        await http.post(replica, "/update_weight_version", {"new_version": "v9"})
        replica.faults.add("/resume", "restart", seconds=0.05)
        assert await _breaks(http, replica, "/resume")
        await wait_until(lambda: _is_alive(replica))
        assert replica.url == url
        assert await _instance(http, replica) != instance
        assert await http.get(replica, "/weight_info") == (200, {"weight_version": "default"})
        assert await http.get(replica, "/is_paused") == (200, {"is_paused": False})


async def test_stream_dies_after_so_many_tokens(http: Http) -> None:
    """A stream can be broken in its middle."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        replica.faults.add("/v1/completions", "drop", when="during", tokens=3)
        events: list[bytes] = []
        with pytest.raises(aiohttp.ClientPayloadError):
            await _read_stream(http, replica, events)
        assert len(events) == 3


async def test_faults_are_scripted_over_http_too(http: Http) -> None:
    """The same rules, for tests in another process; a bad rule is refused."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        rule = {"path": "/pause", "action": "status", "status": 418}
        status, rules = await http.post(replica, "/sim/faults", rule)
        assert (status, rules[0]["status"]) == (200, 418)
        assert (await http.post(replica, "/pause"))[0] == 418
        assert await http.get(replica, "/sim/faults") == (200, [])
        assert (await http.post(replica, "/sim/faults", {"path": "/x", "action": "no"}))[0] == 400
        await http.post(replica, "/sim/faults", {"path": "now", "action": "die"})
        await wait_until(lambda: _is_alive(replica, wanted=False))


TYPES = ["application/x-www-form-urlencoded", "text/plain", "application/json"]


@pytest.mark.parametrize("content_type", TYPES)
async def test_a_script_is_taken_whatever_its_content_type(http: Http, content_type: str) -> None:
    """`curl -d` declares a form; what counts is that the body is JSON."""
    async with SimFleet(control_port=0) as fleet:
        replica = fleet.replicas[0]
        headers, body = {"Content-Type": content_type}, b'{"path": "/pause", "action": "hang"}'
        for url in (f"{replica.url}/sim/faults", f"{fleet.control_url}/replicas/0/faults"):
            async with http.session.post(url, data=body, headers=headers) as reply:
                assert (await reply.json())[-1]["path"] == "/pause"
        assert len(replica.faults.as_json()) == 2
        restart = f"{fleet.control_url}/replicas/0/restart"
        async with http.session.post(restart, data=b'{"seconds": 0}', headers=headers) as reply:
            assert (await reply.json())["boots"] == 2


@pytest.mark.parametrize("body", [b"path=/pause&action=hang", b'{"path": ', b'["/pause"]', b"\xff"])
async def test_a_script_that_is_no_json_object_is_told_what_to_send(
    http: Http, body: bytes
) -> None:
    """At either door, and no fault is added."""
    async with SimFleet(control_port=0) as fleet:
        replica = fleet.replicas[0]
        for url in (f"{replica.url}/sim/faults", f"{fleet.control_url}/replicas/0/faults"):
            async with http.session.post(url, data=body) as reply:
                assert reply.status == 400
                told = (await reply.json())["detail"]
                assert told.endswith('such as {"path": "/update_weights", "action": "die"}')
        assert replica.faults.as_json() == []
        async with http.session.post(f"{replica.url}/sim/restart", data=body) as reply:
            assert (reply.status, replica.alive) == (400, True)


async def test_control_port_revives_the_dead(http: Http) -> None:
    """A dead replica cannot be asked over its own socket."""
    async with SimFleet(replicas=2, control_port=0) as fleet:
        base = f"{fleet.control_url}/replicas"
        async with http.session.post(f"{base}/1/die") as reply:
            assert (await reply.json())["alive"] is False
        async with http.session.post(f"{base}/1/start") as reply:
            assert (await reply.json())["boots"] == 2
        async with http.session.get(base) as reply:
            assert [r["alive"] for r in (await reply.json())["replicas"]] == [True, True]


async def test_control_port_says_that_a_replica_is_up_and_restarts_one_that_is_wedged(
    http: Http,
) -> None:
    """A start that would do nothing is no success; what ends a lonely collective is named."""
    async with SimFleet(replicas=1, control_port=0) as fleet:
        replica, base = fleet.replicas[0], f"{fleet.control_url}/replicas"
        lonely = {"master_address": "127.0.0.1", "master_port": free_port()}
        body = {"init_info": {**lonely, "rank_offset": 1, "world_size": 2}}
        init = asyncio.create_task(http.post(replica, "/init_weight_transfer_engine", body))

        async def wedged() -> bool:
            return replica.engine.wedged

        await wait_until(wedged)
        async with http.session.post(f"{base}/0/start") as reply:
            assert reply.status == 409
            assert "POST /replicas/0/restart" in (await reply.json())["detail"]
        assert replica.engine.wedged
        async with http.session.post(f"{base}/0/restart") as reply:
            assert (reply.status, (await reply.json())["boots"]) == (200, 2)
        assert not replica.engine.wedged
        with pytest.raises(GONE):
            await init
        assert (await http.get(replica, "/health"))[0] == 200


async def _read_stream(http: Http, replica: SimReplica, events: list[bytes]) -> None:
    body = {"prompt": "x", "max_tokens": 10, "stream": True}
    async with http.session.post(replica.url + "/v1/completions", json=body) as reply:
        async for line in reply.content:
            events += [line] if line.strip() else []


async def _breaks(http: Http, replica: SimReplica, path: str) -> bool:
    try:
        await http.post(replica, path)
    except GONE:
        return True
    return False


async def _instance(http: Http, replica: SimReplica) -> Any:
    _, info = await http.get(replica, "/server_info?config_format=json")
    return info["vllm_config"]["instance_id"]


async def _is_alive(replica: SimReplica, *, wanted: bool = True) -> bool:
    return replica.alive is wanted
