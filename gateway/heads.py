"""HTTP heads on the rollout path: which headers pass, which are ours, as bytes.

Both rollout paths (the bare one and the one behind ASGI) drop and add the same headers; that is
decided here. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that concern one connection only (RFC 9110, 7.6.1)."""

REPLACED_IN_REQUEST = HOP_BY_HOP | {b"host", b"content-length", b"x-request-id", b"expect"}
REPLACED_IN_ANSWER = HOP_BY_HOP | {
    b"x-forwarded-for",  # TRL would take it for the server's own address
    b"x-request-id",
    b"x-weight-version",
    b"x-weight-version-end",
    b"x-weight-version-kv",
    b"x-fleet-replica",
}


def passed_on(headers: Iterable[tuple[bytes, bytes]], replaced: frozenset[bytes]) -> Headers:
    """Return the headers that pass, names in lower case: not ours, not hop by hop, not named by
    Connection."""
    kept: Headers = []
    named: set[bytes] = set()
    for key, value in headers:
        name = key.lower()
        if name not in replaced:
            kept.append((name, value))
        elif name == b"connection":
            named |= {token.strip().lower() for token in value.split(b",")}
    if named - _HARMLESS:
        return [(name, value) for name, value in kept if name not in named]
    return kept


_HARMLESS = frozenset({b"close", b"keep-alive", b""})
