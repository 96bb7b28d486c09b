"""The one mapping from the fleet's error tree to HTTP: status, JSON shape, headers.

The shape is vLLM's with two additions, so stock clients read it: {"error": {"message", "type",
"code"}, "replicas": {id: outcome}, "hint": …}. Never 500, 502 or 503 for a phase that must not be
repeated: clients retry those by themselves.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fleet.errors import (
    BadInput,
    BodyTooLarge,
    DeadlinePassed,
    FleetError,
    MemberFailed,
    NotAllowed,
    Refused,
    Unavailable,
    UnknownReplica,
)
from gateway.auth import Forbidden, Unauthenticated

TREE = frozenset({"fleet.errors", "gateway.auth"})
"""The modules whose error classes are told by name."""

STATUSES: dict[type[FleetError], int] = {
    BodyTooLarge: 413,
    BadInput: 400,
    Unauthenticated: 401,
    NotAllowed: 403,
    Forbidden: 403,
    UnknownReplica: 404,
    Refused: 409,
    MemberFailed: 424,
    DeadlinePassed: 504,
    Unavailable: 503,
    FleetError: 500,
}
"""The nearest class of an error's method resolution order decides."""


def status_of(error: FleetError) -> int:
    """Return the HTTP status of an error."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def body_of(error: FleetError) -> bytes:
    """Return the JSON body of an error."""
    return msgspec.json.encode(shape(error.message, name_of(error), status_of(error), error))


def name_of(error: FleetError) -> str:
    """Return the error's name in the tree, which is what clients know; a rule's own kind is inner.

    Modules that refine an error for themselves (IllegalTransition in rounds.py) do not show.
    """
    return next(k.__name__ for k in type(error).__mro__ if k.__module__ in TREE)


def shape(message: str, kind: str, code: int, error: FleetError | None = None) -> dict[str, Any]:
    """Return the one shape of every error."""
    outcomes = error.outcomes if error else {}
    return {
        "error": {"message": message, "type": kind, "code": code},
        "replicas": {replica: outcome.public() for replica, outcome in outcomes.items()},
        "hint": error.hint if error else None,
    }


def headers_of(error: FleetError) -> list[tuple[str, str]]:
    """Return the headers of an error: when to come back, and how to authenticate."""
    headers = [("content-type", "application/json")]
    if isinstance(error, Unavailable):
        headers.append(("retry-after", str(math.ceil(error.retry_after_s))))
    if isinstance(error, Unauthenticated):
        headers.append(("www-authenticate", 'Bearer, Basic realm="fleet"'))
    return headers
