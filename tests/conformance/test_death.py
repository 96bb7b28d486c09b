"""How a server dies of a request in the wrong moment; each test has a server of its own."""

import time

import httpx

from tests.conformance.server import Server, error_of

GONE_S = 60.0


def test_request_between_start_and_finish_kills_the_engine(disposable: Server) -> None:
    """Not paused, the request gets 500, so does every later one, and then the server exits."""
    disposable.ok("/start_weight_update")
    reply = disposable.post("/v1/completions", disposable.completion_body("hello", 4))
    assert "EngineCore encountered an issue" in error_of(reply, 500)
    assert _refuses_and_goes(disposable)


def test_request_after_a_failed_update_kills_the_engine(disposable: Server) -> None:
    """The session is closed by then, and the weights are in pieces all the same."""
    disposable.ok("/start_weight_update")
    empty = {"update_info": {"names": [], "dtype_names": [], "shapes": []}}
    error_of(disposable.post("/update_weights", empty), 500)
    reply = disposable.post("/v1/completions", disposable.completion_body("hello", 4))
    assert "EngineCore encountered an issue" in error_of(reply, 500)
    assert _refuses_and_goes(disposable)


def _refuses_and_goes(server: Server) -> bool:
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline:
        try:
            assert server.get("/health").status_code == 503
        except httpx.TransportError:
            return True
    return False
