"""The order of start, update and finish on one worker, and what breaks it."""

from tests.conformance.server import Server, error_of

EMPTY = {"update_info": {"names": [], "dtype_names": [], "shapes": []}}


def test_start_then_finish_changes_no_weights(server: Server) -> None:
    """A start that others refused can be undone by a finish without update."""
    before = server.checksums()
    server.ok("/start_weight_update")
    server.ok("/finish_weight_update")
    assert server.checksums() == before


def test_second_start_is_refused(server: Server) -> None:
    """A session is open until a finish."""
    server.ok("/start_weight_update")
    assert "already active" in error_of(server.post("/start_weight_update"), 500)


def test_update_before_start_is_refused(server: Server) -> None:
    """No weights are taken outside a session."""
    assert "must be called before" in error_of(server.post("/update_weights", EMPTY), 500)


def test_finish_before_start_is_refused_and_sets_no_version(server: Server) -> None:
    """A finish without a session is harmless, its version is not taken."""
    server.ok("/update_weight_version", {"new_version": "kept"})
    reply = server.post("/finish_weight_update", {"weight_version": "zzz"})
    assert "without a matching start_weight_update" in error_of(reply, 500)
    assert server.value("/weight_info", "weight_version") == "kept"


def test_finish_sets_the_version_it_is_given(server: Server) -> None:
    """The label moves with finish."""
    server.ok("/start_weight_update")
    server.ok("/finish_weight_update", {"weight_version": "v-test"})
    assert server.value("/weight_info", "weight_version") == "v-test"


def test_finish_without_a_version_keeps_the_label(server: Server) -> None:
    """None, an empty object and null all leave the version alone."""
    server.ok("/update_weight_version", {"new_version": "kept"})
    for body in (None, {}, {"weight_version": None}):
        server.ok("/start_weight_update")
        server.ok("/finish_weight_update", body)
    assert server.value("/weight_info", "weight_version") == "kept"


def test_failed_update_closes_the_session(server: Server) -> None:
    """After a failed update finish is refused and start is legal."""
    server.ok("/start_weight_update")
    server.ok("/finish_weight_update")
    server.ok("/shutdown_weight_transfer_engine")
    server.ok("/start_weight_update")
    assert "no group" in error_of(server.post("/update_weights", EMPTY), 500)
    assert "without a matching" in error_of(server.post("/finish_weight_update"), 500)
    server.ok("/start_weight_update")


def test_weights_cannot_be_checked_in_a_session(server: Server) -> None:
    """Between start and finish the tensors are not there to be digested."""
    before = server.checksums()
    server.ok("/start_weight_update")
    reply = server.post("/weight_checker", {"action": "checksum"})
    assert "Cannot copy out of meta tensor" in error_of(reply, 500)
    server.ok("/finish_weight_update")
    assert server.checksums() == before


def test_weights_cannot_be_checked_after_a_failed_update(server: Server) -> None:
    """A failed update leaves them taken apart; a start and a finish put the old ones together."""
    before = server.checksums()
    server.ok("/shutdown_weight_transfer_engine")
    server.ok("/start_weight_update")
    error_of(server.post("/update_weights", EMPTY), 500)
    reply = server.post("/weight_checker", {"action": "checksum"})
    assert "Cannot copy out of meta tensor" in error_of(reply, 500)
    server.ok("/start_weight_update")
    server.ok("/finish_weight_update")
    assert server.checksums() == before


def test_shutdown_is_refused_in_a_session(server: Server) -> None:
    """The trainer's connection is not released in the middle of an update."""
    server.ok("/start_weight_update")
    message = error_of(server.post("/shutdown_weight_transfer_engine"), 500)
    assert "during a weight update" in message


def test_draft_start_without_a_draft_model_is_refused(server: Server) -> None:
    """Draft updates need a draft model; the refusal opens no session."""
    message = error_of(server.post("/start_draft_weight_update"), 500)
    assert "no draft model is configured" in message
    assert "without a matching" in error_of(server.post("/finish_weight_update"), 500)


def test_init_with_a_wrong_body_is_refused_at_once(server: Server) -> None:
    """A body that no engine understands fails in the worker and joins nothing."""
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    error_of(server.post("/init_weight_transfer_engine", {"init_info": {}}), 500)
    odd = {"init_info": {**info, "bogus": 1}}
    assert "bogus" in error_of(server.post("/init_weight_transfer_engine", odd), 500)
    outside = {"init_info": {**info, "rank_offset": 5}}
    message = error_of(server.post("/init_weight_transfer_engine", outside), 500)
    assert "rank 5 is outside a group of 2" in message
