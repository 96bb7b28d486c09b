"""What replicas tell about themselves in the three topologies, and what sink backends record."""

from typing import Any

import pytest

from fleet.sim import SimFleet, SimOptions
from tests.sim.conftest import Http


async def test_independent_servers_know_only_themselves(http: Http) -> None:
    """Unequal servers report their own workers and data parallel index 0."""
    async with SimFleet(replicas=3, world_sizes=(1, 2, 4)) as fleet:
        assert [await _size(http, replica) for replica in fleet.replicas] == [1, 2, 4]
        assert [(await _parallel(http, r))["data_parallel_index"] for r in fleet.replicas] == [
            0
        ] * 3


async def test_dense_deployment_keeps_an_index_and_hides_the_rest(http: Http) -> None:
    """With --data-parallel-rank a dense server counts itself alone, under its own index."""
    async with SimFleet(replicas=2, world_size=2, topology="dense_dp") as fleet:
        told = [await _parallel(http, replica) for replica in fleet.replicas]
        assert [parallel["data_parallel_index"] for parallel in told] == [0, 1]
        assert [parallel["data_parallel_size"] for parallel in told] == [1, 1]
        assert [await _size(http, replica) for replica in fleet.replicas] == [2, 2]


async def test_moe_deployment_reports_the_whole_of_it(http: Http) -> None:
    """Each server of an expert-parallel deployment already counts all of them."""
    async with SimFleet(replicas=2, world_size=2, topology="moe_dp") as fleet:
        told = [await _parallel(http, replica) for replica in fleet.replicas]
        assert [parallel["data_parallel_rank"] for parallel in told] == [0, 1]
        assert [await _size(http, replica) for replica in fleet.replicas] == [4, 4]
        assert await http.get(fleet.replicas[0], "/get_world_size?include_dp=false") == (
            200,
            {"world_size": 2},
        )


@pytest.mark.parametrize("backend", ["nccl", "ipc", "sharded_rdt", "nccl_m2n"])
async def test_sink_backend_records_bodies_verbatim(http: Http, backend: Any) -> None:
    """Without a data plane every collective ends at once, and the log has what came."""
    async with SimFleet(backend=backend) as fleet:
        replica = fleet.replicas[0]
        init = {"init_info": {"anything": [1, {"x": None}], "rank_offset": 1}}
        update = {"update_info": [{"names": ["a"]}, {"names": ["b"]}]}
        await http.post(replica, "/init_weight_transfer_engine", init)
        await http.post(replica, "/start_weight_update")
        assert (await http.post(replica, "/update_weights", update))[0] == 200
        await http.post(replica, "/finish_weight_update", {"weight_version": "7"})
        assert replica.log.bodies("/init_weight_transfer_engine") == [init]
        assert replica.log.bodies("/update_weights") == [update]
        assert replica.engine.version == "7"


async def test_log_has_calls_in_order_with_times_and_queries(http: Http) -> None:
    """Tests assert from the replica's own point of view."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        await http.post(replica, "/pause?mode=keep&clear_cache=false")
        await http.post(replica, "/resume")
        status, log = await http.get(replica, "/sim/log")
        first, second = log["control"]
        assert status == 200
        assert replica.log.paths() == ["/pause", "/resume"]
        assert first["query"] == {"mode": ["keep"], "clear_cache": ["false"]}
        assert first["t_start"] < first["t_end"] <= second["t_start"]
        assert first["status"] == 200


async def test_log_says_which_weights_answered_a_rollout(http: Http) -> None:
    """Labels that a gateway puts on answers can be checked against this."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        await http.post(replica, "/update_weight_version", {"new_version": "v1"})
        answer = await http.complete(replica, "x")
        record = replica.log.rollouts[-1]
        assert (record.version, record.checksum) == ("v1", replica.checksum)
        assert answer["sim"]["version"] == "v1"


async def test_server_without_weight_endpoints_has_none(http: Http) -> None:
    """A server outside development mode answers 404 where weights would go."""
    async with SimFleet(weight_endpoints=False) as fleet:
        assert (await http.post(fleet.replicas[0], "/start_weight_update"))[0] == 404
        assert (await http.get(fleet.replicas[0], "/get_world_size"))[0] == 404


async def test_adapters_are_listed_once_loaded(http: Http) -> None:
    """An adapter is a model of its own until it is unloaded."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        adapter = {"lora_name": "a", "lora_path": "/a"}
        assert (await http.post(replica, "/v1/load_lora_adapter", adapter))[0] == 200
        assert (await http.post(replica, "/v1/load_lora_adapter", adapter))[0] == 400
        _, models = await http.get(replica, "/v1/models")
        shown = [(card["id"], card["root"], card["parent"]) for card in models["data"]]
        assert shown == [("sim", "sim", None), ("a", "/a", "sim")]
        again = adapter | {"load_inplace": True}
        assert (await http.post(replica, "/v1/load_lora_adapter", again))[0] == 200
        assert (await http.post(replica, "/v1/unload_lora_adapter", {"lora_name": "a"}))[0] == 200
        assert (await http.post(replica, "/v1/unload_lora_adapter", {"lora_name": "a"}))[0] == 404


@pytest.mark.parametrize(
    "fields", [{"replicas": 0}, {"world_size": 0}, {"replicas": 2, "world_sizes": (1,)}]
)
def test_options_that_make_no_fleet_are_refused(fields: dict[str, Any]) -> None:
    """A fleet has replicas, and a replica has workers."""
    with pytest.raises(ValueError, match=r"replica|size"):
        SimOptions(**fields)


async def _parallel(http: Http, replica: Any) -> Any:
    _, info = await http.get(replica, "/server_info?config_format=json")
    return info["vllm_config"]["parallel_config"]


async def _size(http: Http, replica: Any) -> int:
    _, answer = await http.get(replica, "/get_world_size")
    return answer["world_size"]
