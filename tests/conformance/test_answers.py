"""What a server answers while nothing special goes on: shapes, statuses, bad input."""

import http.client

import pytest

from tests.conformance.server import Server, error_of

POST_ONLY = ("/pause", "/resume", "/update_weights", "/finish_weight_update", "/sleep")
GET_ONLY = ("/weight_info", "/is_paused", "/get_world_size", "/is_sleeping")


def test_health_and_ping_are_empty_and_200(server: Server) -> None:
    """A live server says so without a body."""
    for reply in (server.get("/health"), server.get("/ping"), server.post("/ping")):
        assert (reply.status_code, reply.content) == (200, b"")


@pytest.mark.parametrize("path", POST_ONLY)
def test_get_on_a_post_path_is_405(server: Server, path: str) -> None:
    """A wrong method is FastAPI's own 405."""
    reply = server.get(path)
    assert (reply.status_code, reply.json()) == (405, {"detail": "Method Not Allowed"})
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize("path", GET_ONLY)
def test_post_on_a_get_path_is_405(server: Server, path: str) -> None:
    """A wrong method is FastAPI's own 405."""
    assert server.post(path).status_code == 405


@pytest.mark.parametrize("path", ["/nope", "/v1/nope", "/v1/load_lora_adapter"])
def test_unknown_path_is_404(server: Server, path: str) -> None:
    """An unknown path, or one that is not configured, is FastAPI's own 404."""
    reply = server.post(path, {})
    assert (reply.status_code, reply.json()) == (404, {"detail": "Not Found"})


def test_world_size_counts_the_workers(server: Server) -> None:
    """One server of one worker has world size 1, with and without data parallelism."""
    assert server.value("/get_world_size", "world_size") == 1
    assert server.value("/get_world_size", "world_size", include_dp="false") == 1


def test_bad_query_words_are_400(server: Server) -> None:
    """A query parameter outside its type or set is a validation error that names it."""
    assert "Input should be" in error_of(server.post("/pause", mode="bad"), 400)
    assert "clear_cache" in error_of(server.post("/pause", clear_cache="maybe"), 400)
    assert "include_dp" in error_of(server.get("/get_world_size", include_dp="nope"), 400)
    assert "level" in error_of(server.post("/sleep", level=9), 400)
    assert "config_format" in error_of(server.get("/server_info", config_format="xml"), 400)
    assert server.value("/is_paused", "is_paused") is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/init_weight_transfer_engine", {}),
        ("/init_weight_transfer_engine", {"init_info": 1}),
        ("/update_weights", {}),
        ("/update_weights", {"update_info": "x"}),
        ("/finish_weight_update", {"weight_version": 7}),
        ("/finish_weight_update", [1]),
        ("/update_weight_version", {}),
        ("/update_weight_version", {"new_version": 3}),
        ("/weight_checker", {"action": "nope"}),
        ("/weight_checker", {"action": "compare"}),
        ("/abort_requests", []),
        ("/abort_requests", None),
        ("/collective_rpc", {}),
    ],
)
def test_malformed_body_is_400_in_the_error_shape(server: Server, path: str, body: object) -> None:
    """A body that does not validate is refused before any worker sees it."""
    error_of(server.post(path, body), 400)


@pytest.mark.parametrize("path", ["/update_weights", "/v1/completions", "/finish_weight_update"])
def test_broken_json_is_400(server: Server, path: str) -> None:
    """A body that is not JSON is refused where a body is read."""
    assert "JSON decode error" in error_of(server.post_raw(path, "{bad json"), 400)


def test_start_ignores_its_body(server: Server) -> None:
    """Start takes no body, an empty object, or rubbish alike."""
    server.ok("/start_weight_update", {})
    server.ok("/finish_weight_update")
    assert server.post_raw("/start_weight_update", "{bad").status_code == 200


def test_failing_worker_call_is_500_and_says_why(server: Server) -> None:
    """A worker's exception text reaches the caller inside vLLM's wrapping."""
    message = error_of(server.post("/collective_rpc", {"method": "no_such_method"}), 500)
    assert message.startswith("Call to collective_rpc method failed: ")
    assert "no_such_method" in message


def test_connection_is_closed_behind_a_failed_worker_call(server: Server) -> None:
    """The 500 does not announce it, so a pooled connection must not be trusted after one."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    connection.request("POST", "/finish_weight_update")
    reply = connection.getresponse()
    assert (reply.status, reply.getheader("Connection")) == (500, None)
    reply.read()
    assert connection.sock.recv(1) == b""
    connection.close()


def test_server_info_tells_identity_topology_and_backend(server: Server) -> None:
    """The gateway recognises restarts and lays out ranks from these fields."""
    config = server.value("/server_info", "vllm_config", config_format="json")
    parallel = config["parallel_config"]
    assert isinstance(config["instance_id"], str)
    assert config["weight_transfer_config"]["backend"] == "gloo"
    assert parallel["tensor_parallel_size"] == parallel["pipeline_parallel_size"] == 1
    assert parallel["data_parallel_size"] == parallel["world_size"] == 1
    assert parallel["data_parallel_rank"] == parallel["data_parallel_index"] == 0
    assert parallel["data_parallel_external_lb"] is parallel["enable_expert_parallel"] is False
    again = server.value("/server_info", "vllm_config", config_format="json")
    assert again["instance_id"] == config["instance_id"]


def test_server_info_is_text_unless_asked(server: Server) -> None:
    """Without config_format=json the configuration is one string."""
    assert isinstance(server.value("/server_info", "vllm_config"), str)


def test_metrics_tell_when_the_process_started(server: Server) -> None:
    """The start time is the second way to see a restart."""
    lines = server.get("/metrics").text.splitlines()
    assert any(line.startswith("process_start_time_seconds ") for line in lines)


def test_openapi_lists_the_control_paths(server: Server) -> None:
    """A gateway can find out by asking whether a server takes weights."""
    paths = server.get("/openapi.json").json()["paths"]
    assert {"/start_weight_update", "/update_weights", "/pause", "/health"} <= paths.keys()


def test_models_names_the_served_model(server: Server) -> None:
    """TRL takes the first entry's id for the model's name."""
    assert server.get("/v1/models").json()["data"][0]["id"] == server.model


def test_cache_resets_answer(server: Server) -> None:
    """An idle server can always drop its caches."""
    assert server.ok("/reset_prefix_cache") == {"success": True}
    assert server.ok(
        "/reset_prefix_cache", reset_running_requests="true", reset_external="true"
    ) == {"success": True}
    assert server.ok("/reset_mm_cache") is None
    assert server.ok("/reset_encoder_cache") is None


def test_version_can_be_relabelled(server: Server) -> None:
    """The version is an opaque label that can be set without an update."""
    assert server.ok("/update_weight_version", {"new_version": "abc"}) == {
        "success": True,
        "new_version": "abc",
    }
    assert server.value("/weight_info", "weight_version") == "abc"


def test_release_kv_cache_needs_a_pause(server: Server) -> None:
    """Memory of a cache in use is not given up."""
    assert "requires a completed pause" in error_of(server.post("/release_kv_cache_memory"), 500)
