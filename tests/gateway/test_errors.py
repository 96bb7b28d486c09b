"""The one mapping from the error tree to HTTP, class by class."""

from __future__ import annotations

import json
from typing import Any

import pytest

import fleet.store
import gateway.auth
from fleet import errors
from fleet.errors import FleetError, MemberFailed, NoEligibleReplica
from gateway.errors import STATUSES, body_of, headers_of, status_of
from tests.fleets import FAILED, OK

# Written by hand, from the design: 400 malformed; 401/403 rights; 404; 409 wrong moment or number;
# 424 a member failed; 504 a deadline passed; 503 only for what may be retried as it is.
TABLE = {
    "BadInput": 400,
    "BodyTooLarge": 413,
    "Unauthenticated": 401,
    "Forbidden": 403,
    "NotAllowed": 403,
    "UnknownReplica": 404,
    "Refused": 409,
    "WrongPhase": 409,
    "RoundOpen": 409,
    "MembershipChanged": 409,
    "WorldSizeMismatch": 409,
    "LayoutUnsupported": 409,
    "MemberFailed": 424,
    "DeadlinePassed": 504,
    "Unavailable": 503,
    "PauseNotReached": 503,
    "NoEligibleReplica": 503,
    "GateOverflow": 503,
    "StoreUnavailable": 503,
    "LeaseLost": 503,
}


def tree(kind: type[FleetError] = FleetError) -> dict[str, type[FleetError]]:
    """Return every class of the tree by name; the client's twins stand for what it has read."""
    found: dict[str, type[FleetError]] = {}
    ours = (c for c in kind.__subclasses__() if not c.__module__.startswith("fleet.client"))
    for below in ours:
        found |= {below.__name__: below, **tree(below)}
    return {name: found[name] for name in sorted(found)}


def test_the_table_names_every_class_of_the_tree() -> None:
    """A new error must be given its status by hand."""
    ours = {name for name, kind in tree().items() if kind.__module__.split(".")[0] != "tests"}
    transitions = {"IllegalTransition"}
    assert ours - transitions - set(TABLE) == set()
    assert {fleet.store.__name__, gateway.auth.__name__} == {"fleet.store", "gateway.auth"}


@pytest.mark.parametrize(("name", "status"), TABLE.items())
def test_every_error_has_the_status_of_the_design(name: str, status: int) -> None:
    """The nearest class of the table decides."""
    assert status_of(tree()[name]("told")) == status


def test_a_refused_transition_is_409() -> None:
    """It is a WrongPhase that nobody listed."""
    from fleet.rules.rounds import IllegalTransition

    assert status_of(IllegalTransition("told")) == 409
    assert b'"type":"WrongPhase"' in body_of(IllegalTransition("told"))


def test_what_must_not_be_repeated_is_never_500_502_or_503() -> None:
    """Clients retry those by themselves, and a repeated collective hangs everyone."""
    once = {"MemberFailed", "DeadlinePassed", *(n for n, s in TABLE.items() if s == 409)}
    assert {TABLE[name] for name in once} == {409, 424, 504}
    assert {kind.__name__ for kind, status in STATUSES.items() if status in (500, 502)} == {
        "FleetError"
    }


@pytest.mark.parametrize("name", TABLE)
def test_every_error_has_the_one_shape(name: str) -> None:
    """vLLM's inner part, with what every replica answered and what to do next."""
    error = tree()[name]("told", hint="do this", outcomes={"a": OK, "b": FAILED})
    told: dict[str, Any] = json.loads(body_of(error))
    assert told == {
        "error": {"message": "told", "type": name, "code": TABLE[name]},
        "replicas": {
            "a": {"outcome": "ok", "status": 200, "detail": None, "elapsed_s": 0.25},
            "b": {"outcome": "failed", "status": 500, "detail": "engine said no", "elapsed_s": 0.5},
        },
        "hint": "do this",
    }


def test_an_error_without_replicas_or_hint_keeps_the_shape() -> None:
    """A client may read every field without asking whether it is there."""
    assert json.loads(body_of(MemberFailed("told"))) == {
        "error": {"message": "told", "type": "MemberFailed", "code": 424},
        "replicas": {},
        "hint": None,
    }


@pytest.mark.parametrize("name", TABLE)
def test_only_what_may_be_retried_says_when(name: str) -> None:
    """Retry-After is an invitation."""
    assert ("retry-after" in dict(headers_of(tree()[name]("told")))) == (TABLE[name] == 503)


@pytest.mark.parametrize(("seconds", "header"), [(1.0, "1"), (0.2, "1"), (2.5, "3")])
def test_the_time_to_retry_is_rounded_up(seconds: float, header: str) -> None:
    """Too early is a wasted request."""
    error = NoEligibleReplica("told")
    error.retry_after_s = seconds
    assert dict(headers_of(error))["retry-after"] == header


def test_a_stranger_is_told_how_to_authenticate() -> None:
    """401 without WWW-Authenticate is not HTTP."""
    headers = dict(headers_of(gateway.auth.Unauthenticated("told")))
    assert headers["www-authenticate"].startswith("Bearer")


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """What the module says it holds is what it holds."""
    listed = errors.__doc__ or ""
    own = [n for n, kind in tree().items() if kind.__module__ == "fleet.errors"]
    assert [name for name in own if name not in listed] == []
