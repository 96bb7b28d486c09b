"""Pauses, aborts and sleep: what happens to requests that run and to those that come."""

from tests.conformance.server import ANSWER_S, LONG, Server


def test_pause_and_resume_are_idempotent(server: Server) -> None:
    """Either may be repeated, and a pause may change its mode."""
    for mode in ("abort", "keep", "wait", "wait"):
        assert server.ok("/pause", mode=mode) == {"status": "paused"}
        assert server.value("/is_paused", "is_paused") is True
    for _ in range(2):
        assert server.ok("/resume") == {"status": "resumed"}
        assert server.value("/is_paused", "is_paused") is False


def test_keep_freezes_a_running_request_and_resume_continues_it(server: Server) -> None:
    """No token is made in the pause, and none is lost by it."""
    with server.stream() as stream:
        server.ok("/pause", mode="keep")
        server.some_time_passes()
        frozen_at = stream.tokens
        server.some_time_passes()
        assert stream.tokens == frozen_at < LONG
        server.ok("/resume")
        stream.end()
    assert (stream.tokens, stream.finish_reason) == (LONG, "length")


def test_abort_pause_ends_running_requests(server: Server) -> None:
    """An aborted request keeps the tokens it has and says that it was aborted."""
    with server.stream() as stream:
        server.ok("/pause", mode="abort")
        stream.end()
    assert (stream.finish_reason, stream.tokens < LONG) == ("abort", True)


def test_wait_pause_lets_running_requests_finish(server: Server) -> None:
    """The pause is reached only when nothing runs."""
    with server.stream() as stream:
        server.ok("/pause", mode="wait")
        stream.end()
    assert (stream.tokens, stream.finish_reason) == (LONG, "length")


def test_requests_that_come_in_a_pause_wait_for_resume(server: Server) -> None:
    """Whatever the mode, vLLM 0.32 queues them silently."""
    for mode in ("abort", "wait", "keep"):
        server.ok("/pause", mode=mode)
        queued = server.in_background(lambda: server.complete("hello"))
        server.some_time_passes()
        assert not queued.done()
        server.ok("/resume")
        assert queued.result(ANSWER_S)["choices"][0]["finish_reason"] == "length"


def test_only_internal_ids_abort_a_request(server: Server) -> None:
    """The client's own id counts as aborted and aborts nothing; cmpl-<id>-0 does."""
    with server.stream("rid-7") as stream:
        server.ok("/pause", mode="keep")
        for name in ("rid-7", "cmpl-rid-7"):
            assert server.ok("/abort_requests", {"request_ids": [name]})["aborted"] == 1
        server.some_time_passes()
        assert not stream.done.done()
        server.ok("/abort_requests", {"request_ids": ["cmpl-rid-7-0"]})
        server.ok("/resume")
        stream.end()
    assert stream.finish_reason == "abort"


def test_abort_without_ids_aborts_everything(server: Server) -> None:
    """An empty object means all that runs."""
    with server.stream() as stream:
        assert server.ok("/abort_requests", {})["aborted"] >= 1
        stream.end()
    assert stream.finish_reason == "abort"


def test_prefix_cache_is_not_reset_under_a_running_request(server: Server) -> None:
    """The call succeeds and says success false, unless running requests may be preempted."""
    with server.stream() as stream:
        assert server.ok("/reset_prefix_cache") == {"success": False}
        assert server.ok("/reset_prefix_cache", reset_running_requests="true") == {"success": True}
        stream.end()
    assert (stream.tokens, stream.finish_reason) == (LONG, "length")


def test_woken_by_weights_alone_it_still_sleeps(server: Server) -> None:
    """A server is awake when every part is, and then it is resumed."""
    assert server.ok("/sleep", level=1) == {"status": "sleeping", "level": 1}
    assert server.value("/is_sleeping", "is_sleeping") is True
    assert server.ok("/wake_up", tags="weights") == {"status": "sleeping", "tags": ["weights"]}
    assert server.value("/is_sleeping", "is_sleeping") is True
    assert server.ok("/wake_up", tags="kv_cache") == {"status": "awake", "tags": ["kv_cache"]}
    assert server.value("/is_sleeping", "is_sleeping") is False
    assert server.value("/is_paused", "is_paused") is False


def test_level_zero_sleep_is_a_pause(server: Server) -> None:
    """Nothing is given up at level 0, requests only wait."""
    assert server.ok("/sleep", level=0)["level"] == 0
    assert server.value("/is_paused", "is_paused") is True
    assert server.ok("/wake_up")["status"] == "awake"
    assert server.value("/is_paused", "is_paused") is False
