"""Rights: the table of gateway/auth.py, cell by cell, and how tokens travel."""

from __future__ import annotations

import base64
import itertools

import pytest
import requests
from pydantic import SecretStr

from gateway.auth import Forbidden, Right, Unauthenticated, authorise
from gateway.settings import Auth

R, T, O = Right.ROLLOUT, Right.TRAINER, Right.OPERATOR  # noqa: E741 (the table's letters)
ALL = frozenset({R, T, O})
OPEN = "open"

# tokens set -> for each right, whose tokens open it; OPEN needs none. Written by hand.
TABLE: dict[frozenset[Right], dict[Right, object]] = {
    frozenset(): {R: OPEN, T: OPEN, O: OPEN},
    frozenset({O}): {R: OPEN, T: OPEN, O: {O}},
    frozenset({T}): {R: OPEN, T: {T}, O: set()},
    frozenset({T, O}): {R: OPEN, T: {T, O}, O: {O}},
    frozenset({R}): {R: {R}, T: set(), O: set()},
    frozenset({R, O}): {R: {R, O}, T: {O}, O: {O}},
    frozenset({R, T}): {R: {R, T}, T: {T}, O: set()},
    frozenset({R, T, O}): {R: {R, T, O}, T: {T, O}, O: {O}},
}


def auth_with(rights: frozenset[Right]) -> Auth:
    """Return settings in which the token of each of these rights is its name and a suffix."""
    return Auth(**{f"{r.name.lower()}_token": SecretStr(token_of(r)) for r in rights})


def token_of(right: Right) -> str:
    """Return the token of a right."""
    return f"{right.name.lower()}-secret"


def bearer(token: str) -> list[tuple[bytes, bytes]]:
    """Return ASGI headers that carry this token."""
    return [(b"host", b"gateway"), (b"authorization", f"Bearer {token}".encode())]


def basic(credentials: bytes) -> list[tuple[bytes, bytes]]:
    """Return ASGI headers that carry these credentials."""
    return [(b"authorization", b"Basic " + base64.b64encode(credentials))]


@pytest.mark.parametrize("right", [R, T, O])
@pytest.mark.parametrize("sent", [None, R, T, O])
@pytest.mark.parametrize("tokens", TABLE)
def test_the_table_holds(tokens: frozenset[Right], right: Right, sent: Right | None) -> None:
    """Every set of configured tokens × every right × every token that may be sent."""
    opens = TABLE[tokens][right]
    headers = [] if sent is None else bearer(token_of(sent))
    if opens is OPEN or (isinstance(opens, set) and sent in opens):
        authorise(headers, right, auth_with(tokens))
        return
    known = sent in tokens
    expected = Forbidden if known or opens == set() else Unauthenticated
    with pytest.raises(expected) as caught:
        authorise(headers, right, auth_with(tokens))
    assert type(caught.value) is expected


def test_the_table_names_every_set_of_tokens() -> None:
    """No combination is left to chance."""
    sets = [frozenset(s) for n in range(4) for s in itertools.combinations(ALL, n)]
    assert set(TABLE) == set(sets)


@pytest.mark.parametrize("headers", [[], bearer("wrong")])
def test_a_probe_needs_no_token(headers: list[tuple[bytes, bytes]]) -> None:
    """A kubelet has none, and a wrong one does no harm."""
    authorise(headers, Right.PROBE, auth_with(ALL))


@pytest.mark.parametrize("user", ["", "user", "a%20b"])
def test_the_stock_client_authenticates_through_the_url(user: str) -> None:
    """`requests` turns URL userinfo into Basic; the user is not looked at."""
    url = f"http://{user}:{token_of(T)}@gateway/start_weight_update"
    sent = str(requests.Request("POST", url).prepare().headers["Authorization"])
    authorise([(b"authorization", sent.encode())], T, auth_with(ALL))


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer"])
def test_the_scheme_is_read_in_any_case(scheme: str) -> None:
    """RFC 9110, 11.1."""
    authorise([(b"Authorization", f"{scheme} {token_of(T)}".encode())], T, auth_with(ALL))


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer("wrong"),
        bearer(token_of(T) + "x"),
        bearer(token_of(T)[:-1]),
        bearer(token_of(T).upper()),
        bearer("\xff"),
        [(b"authorization", token_of(T).encode())],
        [(b"authorization", b"Token " + token_of(T).encode())],
        [(b"x-authorization", b"Bearer " + token_of(T).encode())],
        basic(token_of(T).encode()),
        basic(token_of(T).encode() + b":"),
        basic(b"user:wrong"),
        [(b"authorization", b"Basic not base64")],
        [(b"authorization", b"Basic")],
        [(b"authorization", b"Basic !" + base64.b64encode(b"u:" + token_of(T).encode()))],
        bearer("wrong") + bearer(token_of(T)),
        bearer(token_of(T)) + bearer("wrong"),
    ],
)
def test_anything_but_the_token_is_no_token(headers: list[tuple[bytes, bytes]]) -> None:
    """Nor are two headers, of which a proxy in between may have read the other one."""
    with pytest.raises(Unauthenticated):
        authorise(headers, T, auth_with(ALL))


def test_an_empty_token_is_not_the_missing_one() -> None:
    """What is not set compares equal to nothing."""
    with pytest.raises(Unauthenticated):
        authorise(basic(b"user:"), T, auth_with(frozenset({T})))


def test_a_password_may_hold_a_colon() -> None:
    """Only the first one ends the user (RFC 7617)."""
    auth = Auth(trainer_token=SecretStr("a:b"))
    authorise(basic(b"user:a:b"), T, auth)


def test_one_token_for_two_rights_has_the_higher_one() -> None:
    """Whoever sets the same secret twice means both."""
    auth = Auth(rollout_token=SecretStr("same"), operator_token=SecretStr("same"))
    authorise(bearer("same"), O, auth)
    authorise(bearer("same"), R, auth)


@pytest.mark.parametrize("sent", [token_of(R), "wrong-secret"])
def test_a_refusal_says_what_is_needed_and_not_what_was_sent(sent: str) -> None:
    """The answer may end up in a trainer's log."""
    with pytest.raises((Forbidden, Unauthenticated)) as caught:
        authorise(bearer(sent), T, auth_with(ALL))
    said = f"{caught.value} {caught.value.hint}"
    assert "trainer right" in said
    assert "secret" not in said


def test_a_route_that_no_token_opens_says_which_one_to_set() -> None:
    """Setting only the trainer's token closes the operator's routes; here is how to open them."""
    with pytest.raises(Forbidden) as caught:
        authorise(bearer(token_of(T)), O, auth_with(frozenset({T})))
    assert caught.value.hint == "set FLEET_AUTH__OPERATOR_TOKEN on the gateway"
