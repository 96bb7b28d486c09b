"""How both clients reach a gateway: its address, the caller's token, and httpx's failures as ours.

A token comes as an argument, or in the URL as the stock clients have it
(``http://trainer:TOKEN@gateway``); it never shows in a message.
"""

from __future__ import annotations

from typing import Any

import httpx

from fleet.client.calls import Call, Timeouts
from fleet.client.errors import AnswerLost, FleetError, Told, Unreachable

_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


def options_of(base_url: str, token: str | None, timeouts: Timeouts) -> dict[str, Any]:
    """Return the arguments of an httpx client for this gateway.

    Proxies of the environment are left out: a transfer outlasts their patience. Raises ValueError
    for what is no URL, which would otherwise be taken for a gateway that is not there yet.
    """
    url = _url(base_url)
    secret = token if token is not None else url.password
    return {
        "base_url": url.copy_with(userinfo=b""),
        "headers": {"authorization": f"Bearer {secret}"} if secret else {},
        "timeout": httpx.Timeout(timeouts.control_s, connect=timeouts.connect_s),
        "trust_env": False,
    }


def _url(base_url: str) -> httpx.URL:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme in ("http", "https") and url.host:
        return url
    bare = base_url.rpartition("@")[2]  # no token in a message
    meant = bare if bare and ":/" not in bare else "gateway:8000"
    raise ValueError(f"{bare!r} is not the URL of a gateway; write http://{meant}")


def request_of(call: Call, timeouts: Timeouts) -> dict[str, Any]:
    """Return the arguments of an httpx request for this call."""
    waits: float = getattr(timeouts, call.waits)
    return {
        "method": call.method,
        "url": call.path,
        "json": call.body,
        "params": list(call.query) or None,
        "timeout": httpx.Timeout(waits, connect=timeouts.connect_s),
    }


def lost(call: str, error: httpx.HTTPError) -> FleetError:
    """Return what it means that httpx has no answer for us."""
    told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, _NOT_SENT):
        return Unreachable(told, Told(call=call))
    hint = "it may have had its effect: look at GET /fleet before you repeat it"
    return AnswerLost(told, Told(call=call, hint=hint))
