"""The client's error tree is the fleet's."""

from __future__ import annotations

import pickle

import pytest

from fleet import client, errors
from fleet.client import errors as mine
from fleet.client.answers import error_of, membership_of
from fleet.client.errors import BY_NAME, MembershipChanged, Refused, Told
from fleet.facts.outcome import Outcome, Result
from gateway import auth
from gateway.errors import body_of, headers_of, status_of


def family(kind: type) -> list[type]:
    return [kind, *(found for child in kind.__subclasses__() for found in family(child))]


OURS = [k for k in family(errors.FleetError) if k.__module__ in ("fleet.errors", "gateway.auth")]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_that_a_gateway_can_answer_with_is_the_same_error_at_the_client(
    kind: type[errors.FleetError],
) -> None:
    """Name, message, hint and outcomes come through HTTP; `except` means the same on both sides."""
    outcome = Outcome(outcome=Result.WEDGED, detail="silent", elapsed_s=1.5)
    sent = kind("what happened", hint="what to do", outcomes={"a:1": outcome})
    headers = dict(headers_of(sent))
    got = error_of("POST /pause", status_of(sent), headers, body_of(sent))
    assert type(got) is BY_NAME[kind.__name__]
    if kind.__module__ != auth.__name__:
        assert isinstance(got, kind)
    assert isinstance(got, client.FleetError)
    assert (got.message, got.hint) == ("what happened", "what to do")
    assert got.outcomes == {"a:1": outcome}
    assert (got.status, got.type, got.call) == (status_of(sent), kind.__name__, "POST /pause")
    assert ("retry-after" in headers) == isinstance(got, errors.Unavailable)


def test_an_error_survives_a_pickle_and_tells_everything_in_one_line() -> None:
    """Trainers raise across processes, and print no more than str()."""
    told = Told(call="POST /start_weight_update", status=409, hint="re-init with world_size=3")
    again = pickle.loads(pickle.dumps(MembershipChanged("a:1 restarted", told)))
    assert str(again) == (
        "POST /start_weight_update: 409 MembershipChanged: a:1 restarted "
        "(next: re-init with world_size=3)"
    )
    assert again.world_size == 3


@pytest.mark.parametrize(
    ("hint", "size"),
    [
        ("init again with world_size=17 (GET /get_world_size gives the workers)", 17),
        ("init again with world_size=3 once a:1 answered (world_size=2 without)", 3),
        ("re-init with the world_size of a repaired fleet (now half a deployment)", None),
    ],
)
def test_a_refusal_gives_the_new_world_size_as_a_number(hint: str, size: int | None) -> None:
    """If there is one."""
    assert Refused("no", Told(hint=hint)).world_size == size


def test_words_of_others_are_errors_too() -> None:
    """A proxy's page, a model server's refusal, and an outcome that only a later gateway knows."""
    page = error_of("POST /x", 502, {}, b"<html>Bad Gateway</html>")
    assert type(page) is mine.FleetError
    assert (page.status, page.type, page.message) == (502, "HTTPError", "<html>Bad Gateway</html>")
    vllm = b'{"error":{"message":"no such model","type":"NotFoundError","code":404}}'
    refusal = error_of("POST /x", 404, {}, vllm)
    assert type(refusal) is mine.FleetError
    assert (refusal.type, refusal.message) == ("NotFoundError", "no such model")
    later = b'{"error":{"type":"MemberBored","message":"m"},"replicas":{"a":{"outcome":"bored"}}}'
    failed = error_of("POST /x", 424, {}, later)
    assert type(failed) is mine.MemberFailed
    assert failed.type == "MemberBored"
    assert failed.outcomes["a"].outcome is Result.FAILED
    assert error_of("POST /x", 204, {}, b"") is None


def test_the_membership_header_is_read_with_and_without_a_number() -> None:
    """X-Fleet-Membership, as the gateway writes it."""
    assert not membership_of({}).changed
    changed = membership_of({"x-fleet-membership": "changed; world_size=4"})
    assert (changed.changed, changed.world_size) == (True, 4)
    unsure = membership_of({"x-fleet-membership": "changed"})
    assert (unsure.changed, unsure.world_size) == (True, None)
