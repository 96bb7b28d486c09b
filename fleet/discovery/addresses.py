"""Which addresses a name has had lately, out of one answer after another. Pure.

A name server's answer is weaker than the API server's: it is cached, it may be cut short, and an
address that is missing may belong to a pod that is not Ready as well as to one that is gone. So an
address counts as missing when two answers in a row lack it, is told as not Ready then, and is
dropped only after FORGET_S.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from fleet.facts.address import url_host
from fleet.facts.endpoint import Endpoint, Origin

FORGET_S = 600.0
"""How long a missing address may come back as the same replica."""
MISSING = "its name lists it no more"


class _Address(msgspec.Struct, frozen=True):
    """How many answers in a row lacked it, and since when (epoch) it is listed or missing."""

    missed: int
    since: float

    @property
    def is_missing(self) -> bool:
        return self.missed > 1


Addresses = dict[str, _Address]


def after_answer(known: Addresses, answer: Collection[str], now: float) -> Addresses:
    """Return what is known after one more answer; an error is none."""
    listed = {address: _listed(known.get(address), now) for address in answer}
    lacking = {a: _lacked(facts, now) for a, facts in known.items() if a not in listed}
    young = {a: f for a, f in lacking.items() if not f.is_missing or now - f.since < FORGET_S}
    return listed | young


def endpoints_of(known: Addresses, source: str, port: int) -> dict[str, Endpoint]:
    """Return the endpoints by uid, which is `host:port` here."""
    found = (_endpoint(address, facts, source, port) for address, facts in known.items())
    return {endpoint.origin.uid: endpoint for endpoint in found}


def _listed(before: _Address | None, now: float) -> _Address:
    if before is None or before.is_missing:
        return _Address(0, now)
    return _Address(0, before.since)


def _lacked(before: _Address, now: float) -> _Address:
    has_just_left = before.missed == 1
    return _Address(before.missed + 1, now if has_just_left else before.since)


def _endpoint(address: str, facts: _Address, source: str, port: int) -> Endpoint:
    host = url_host(address)
    # The clock orders what gateways with different caches have seen: the last change wins.
    origin = Origin(source=source, uid=f"{host}:{port}", revision=int(facts.since * 1000))
    return Endpoint(
        url=f"http://{host}:{port}",
        origin=origin,
        unready=MISSING if facts.is_missing else None,
    )
