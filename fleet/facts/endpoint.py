"""What discovery tells about replicas: where they are, whose they are, if they may serve. Pure.

A snapshot is everything that a source (the API server, a name server) lists now. What it means
for the fleet is decided in `roster.py`; who asks is in `discovery/`.
"""

from __future__ import annotations

import msgspec

from fleet.facts.options import Placement


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where discovery found a replica.

    `source` names the question that was asked, `uid` the thing found: an address, for a pod with
    its own uid before it (`uid@host:port`), since a pod made again is another replica, and so is
    one with a new address. `name` is the pod's. `created` is when the pod was made
    (RFC 3339, so it sorts as text), empty for what is known by its address alone. `revision` orders
    what gateways have seen of one uid: the larger is the newer, whoever saw it. `placement` is what
    the pod's annotations say about ranks.
    """

    source: str
    uid: str
    name: str = ""
    created: str = ""
    revision: int = 0
    placement: Placement | None = None


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One server as a source lists it.

    `unready` is why it should take no rollouts for now, `leaving` why it never will again.
    """

    url: str
    origin: Origin
    unready: str | None = None
    leaving: str | None = None

    @property
    def meaning(self) -> tuple[str | None, ...]:
        """What the fleet cares about: two revisions that mean the same are no news."""
        return (self.url, self.origin.uid, self.unready, self.leaving)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a source lists, by uid.

    `asked_at` (seconds of the loop's clock) is set if it is the answer to a question that was
    asked then, and has whatever there was at that time; None for news on top of such an answer.
    """

    source: str
    endpoints: dict[str, Endpoint]
    asked_at: float | None = None
