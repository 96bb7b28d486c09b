"""Real tensors over a real gloo group: what arrives, what is reused, what a failure leaves."""

from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from fleet.sim.trainer import SimTrainer, TrainerError, describe, free_port
from tests.conformance.server import ANSWER_S, LONG, Server, error_of
from tests.conformance.subjects import Subject

SILENCE_S = 0.5  # an idle server answers in milliseconds
LONG_PROMPT = [7 + number % 200 for number in range(145)]  # more than one KV block of 128


def test_sync_changes_the_weights_and_the_version(
    server: Server, trainer: SimTrainer, subject: Subject
) -> None:
    """After a round the server holds other weights, under the label it was given."""
    before = server.checksums()
    trainer.send_weights(subject.weights(11), "v11")
    assert server.checksums() != before
    assert server.value("/weight_info", "weight_version") == "v11"


def test_equal_weights_have_equal_checksums(
    server: Server, trainer: SimTrainer, subject: Subject
) -> None:
    """The second round's metadata is empty, and the same tensors give the same checksums."""
    trainer.send_weights(subject.weights(12))
    first = server.checksums()
    trainer.send_weights(subject.weights(13))
    assert server.checksums() != first
    trainer.send_weights(subject.weights(12))
    assert server.checksums() == first
    assert server.ok("/weight_checker", {"action": "compare", "baseline": first})["match"]


def test_compare_names_what_differs(server: Server) -> None:
    """A baseline of other weights does not match."""
    baseline = server.checksums()
    name = min(baseline)
    checked = server.ok(
        "/weight_checker", {"action": "compare", "baseline": baseline | {name: "0"}}
    )
    assert checked == {"match": False, "mismatches": [name]}


def test_empty_metadata_without_a_round_before_is_an_error(
    server: Server, trainer: SimTrainer
) -> None:
    """A worker that missed the previous round says so, instead of loading nothing."""
    server.ok("/start_weight_update")
    empty = {"update_info": {"names": [], "dtype_names": [], "shapes": []}}
    assert "has had none" in error_of(server.post("/update_weights", empty), 500)
    assert trainer.world_size == 2


def test_trainer_that_leaves_fails_the_update(
    server: Server, trainer: SimTrainer, subject: Subject
) -> None:
    """The update answers 500, the session is closed, and a new group with a full round heals."""
    weights = subject.weights(14)
    trainer.send_weights(weights)
    healthy = server.checksums()
    server.ok("/pause", mode="keep")
    server.ok("/start_weight_update")
    update = server.in_background(
        lambda: server.post("/update_weights", {"update_info": describe(weights)})
    )
    trainer.group.broadcast(next(iter(weights.values())))
    trainer.close()
    error_of(update.result(ANSWER_S), 500)
    assert "without a matching" in error_of(server.post("/finish_weight_update"), 500)
    successor = SimTrainer(subject.url, timeout_s=30.0)
    successor.init()
    successor.send_weights(weights)
    successor.close()
    assert server.checksums() == healthy


def test_control_calls_queue_behind_an_update_and_health_does_not(
    server: Server, trainer: SimTrainer, subject: Subject
) -> None:
    """A worker inside a collective answers nothing else; the process is alive all the same."""
    weights = subject.weights(15)
    server.ok("/pause", mode="keep")
    server.ok("/start_weight_update")
    update = server.in_background(
        lambda: server.post("/update_weights", {"update_info": describe(weights)})
    )
    asked = _first_unanswered(server)
    assert server.get("/health").status_code == 200
    assert not update.done()
    assert not asked.done()
    for tensor in weights.values():
        trainer.group.broadcast(tensor)
    assert update.result(ANSWER_S).status_code == 200
    assert asked.result(ANSWER_S) is True
    server.ok("/finish_weight_update")


def _first_unanswered(server: Server) -> Future[Any]:
    """Ask until a question is not answered: by then the update is inside the collective."""
    for _ in range(100):
        asked = server.in_background(lambda: server.value("/is_paused", "is_paused"))
        try:
            asked.result(SILENCE_S)
        except TimeoutError:
            return asked
    raise AssertionError("the server answers everything during an update")


def test_cleared_caches_leave_no_old_kv(
    server: Server, trainer: SimTrainer, subject: Subject
) -> None:
    """After a round in a default pause an old prompt is answered by the new weights alone."""
    _prime_then_sync(server, trainer, subject, clear_cache="true")
    after = server.logprobs(LONG_PROMPT)
    server.ok("/reset_prefix_cache")
    assert server.logprobs(LONG_PROMPT) == pytest.approx(after, abs=1e-3)


def test_kept_caches_answer_from_old_kv(
    server: Server, trainer: SimTrainer, subject: Subject
) -> None:
    """With clear_cache=false a prompt asked before reuses KV of the old weights, until a reset."""
    _prime_then_sync(server, trainer, subject, clear_cache="false")
    stale = server.logprobs(LONG_PROMPT)
    server.ok("/reset_prefix_cache")
    assert server.logprobs(LONG_PROMPT) != pytest.approx(stale, abs=1e-3)


def _prime_then_sync(
    server: Server, trainer: SimTrainer, subject: Subject, *, clear_cache: str
) -> None:
    trainer.send_weights(subject.weights(16))
    server.ok("/reset_prefix_cache")
    server.logprobs(LONG_PROMPT)
    server.ok("/pause", mode="keep", clear_cache=clear_cache)
    trainer.send_weights(subject.weights(17))
    server.ok("/resume")


def test_request_frozen_over_a_round_is_finished_by_the_new_weights(
    server: Server, trainer: SimTrainer, subject: Subject
) -> None:
    """A kept request loses no token over an update."""
    with server.stream() as stream:
        server.ok("/pause", mode="keep")
        trainer.send_weights(subject.weights(18))
        server.ok("/resume")
        stream.end()
    assert (stream.tokens, stream.finish_reason) == (LONG, "length")


def test_lonely_init_silences_the_server_until_it_ends(server: Server) -> None:
    """A server that waits for its group is wedged, not dead: silent, then back."""
    info = {
        "master_address": "127.0.0.1",
        "master_port": free_port(),
        "rank_offset": 1,
        "world_size": 2,
        "timeout_s": 6,
    }
    init = server.in_background(
        lambda: server.post("/init_weight_transfer_engine", {"init_info": info})
    )
    _wait_until_silent(server)
    assert not init.done()
    assert "not all ranks came" in error_of(init.result(ANSWER_S), 500)
    assert server.get("/health").status_code == 200


def _wait_until_silent(server: Server) -> None:
    for _ in range(1000):
        try:
            server.get("/is_paused", timeout_s=0.5)
        except httpx.ReadTimeout:
            return
    raise AssertionError("the server went on answering")


def test_init_fails_when_the_group_never_meets(subject: Subject, server: Server) -> None:
    """A trainer that expects more workers than there are gets an error, in its time."""
    del server
    rank0 = SimTrainer(subject.url, timeout_s=2.0)
    with pytest.raises((TrainerError, RuntimeError)):
        rank0.init(world_size=3)
    rank0.close()
