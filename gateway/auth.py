"""Who may call what: three rights, three tokens, and one pure function that decides.

A right that nobody guards is open; guarding a lower right guards the higher ones as well, because
whoever may not even send rollouts must not move weights:

| tokens set                  | rollout              | trainer             | operator |
| --------------------------- | -------------------- | ------------------- | -------- |
| none                        | open                 | open                | open     |
| operator                    | open                 | open                | O        |
| trainer                     | open                 | T                   | closed   |
| trainer, operator           | open                 | T, O                | O        |
| rollout                     | R                    | closed              | closed   |
| rollout, operator           | R, O                 | O                   | O        |
| rollout, trainer            | R, T                 | T                   | closed   |
| rollout, trainer, operator  | R, T, O              | T, O                | O        |

`closed` means that no token opens it, since the one that would is not set. `probe` is always
open: a liveness probe has no token, and learns nothing. A token may come as
`Authorization: Bearer TOKEN`, or as the password of Basic (the stock clients send what stands in
the URL, `http://user:TOKEN@gateway`; the user is not looked at).

What this does not do: know routes, answer HTTP, or identify people.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from fleet.errors import FleetError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import SecretStr

    from gateway.settings_model import Auth


class Right(IntEnum):
    """What a route demands; a token of a higher right opens the lower ones too."""

    PROBE = 0
    ROLLOUT = 1
    TRAINER = 2
    OPERATOR = 3


class Unauthenticated(FleetError):
    """The call carries no token that this gateway knows."""


class Forbidden(FleetError):
    """The call carries a known token of a lower right, or no token could open this route."""


def authorise(headers: Iterable[tuple[bytes, bytes]], right: Right, auth: Auth) -> None:
    """Return if a request with these ASGI headers has the right, raise otherwise.

    Raises `Unauthenticated` without a known token, `Forbidden` with one of a lower right or where
    the table says closed. Neither message quotes what was sent.
    """
    tokens = _tokens(auth)
    guards = [guarded for guarded, token in tokens.items() if token is not None]
    if not guards or right < min(guards):
        return
    if right > max(guards):
        raise Forbidden(
            f"no token of this gateway gives the {right.name.lower()} right",
            hint=f"set FLEET_AUTH__{right.name}_TOKEN on the gateway",
        )
    held = _right_of(_sent_token(headers), tokens)
    if held is None:
        raise Unauthenticated(
            f"this call needs the {right.name.lower()} right",
            hint="send the token as Authorization: Bearer, or in the URL: http://user:TOKEN@host",
        )
    if held < right:
        raise Forbidden(
            f"this call needs the {right.name.lower()} right, the token has {held.name.lower()}",
            hint=f"use the {_openers(right, guards)} token",
        )


def _tokens(auth: Auth) -> dict[Right, SecretStr | None]:
    return {
        Right.ROLLOUT: auth.rollout_token,
        Right.TRAINER: auth.trainer_token,
        Right.OPERATOR: auth.operator_token,
    }


def _right_of(sent: bytes | None, tokens: dict[Right, SecretStr | None]) -> Right | None:
    """Return the highest right of a token; every comparison is made, in constant time."""
    held: Right | None = None
    for right, token in tokens.items():
        known = b"" if token is None else token.get_secret_value().encode()
        same = hmac.compare_digest(sent or b"", known)
        if same and known:
            held = right
    return held


def _sent_token(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    values = [value for name, value in headers if name.lower() == b"authorization"]
    if len(values) != 1:  # two of them: a proxy and the gateway could read different ones
        return None
    scheme, _, rest = values[0].strip().partition(b" ")
    reader = _SCHEMES.get(scheme.lower())
    return reader(rest.strip()) if reader else None


def _bearer(rest: bytes) -> bytes | None:
    return rest or None


def _basic(rest: bytes) -> bytes | None:
    try:
        _, colon, password = base64.b64decode(rest, validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return password if colon and password else None


_SCHEMES: Final = {b"bearer": _bearer, b"basic": _basic}


def _openers(right: Right, guards: list[Right]) -> str:
    return " or ".join(guarded.name.lower() for guarded in guards if guarded >= right)
