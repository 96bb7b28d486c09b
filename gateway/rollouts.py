"""What all rollouts of this gateway share: the gate, the connections to replicas, the rules.

Built once. It also says which paths are rollouts, and makes the ids of requests that bring none.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from fleet.errors import BodyTooLarge
from gateway.accounts import Accounts
from gateway.auth import Right, authorise
from gateway.gate import RolloutGate
from gateway.heads import REPLACED_IN_REQUEST, Headers
from gateway.metrics import Metrics
from gateway.settings_model import Settings
from gateway.upstream import Upstreams

if TYPE_CHECKING:
    from gateway.exchange import Exchange

log = logging.getLogger(__name__)

SUSPECTED_S = 1.0
"""How long one suspicion of a replica stands for those of all rollouts that break on it."""

PREFIXES = (
    b"/v1/",
    b"/inference/v1/",
    b"/tokenize",
    b"/detokenize",
    b"/pooling",
    b"/score",
    b"/rerank",
    b"/v2/rerank",
    b"/classify",
    b"/generative_scoring",
    b"/invocations",
)

EVERYONES = frozenset(
    {
        b"/v1/models",
        b"/v1/load_lora_adapter",
        b"/v1/unload_lora_adapter",
        b"/inference/v1/abort_requests",
    }
)
"""Paths that look like rollouts but concern every replica."""


def is_rollout(path: bytes) -> bool:
    """Whether a path (without its query) goes to one replica."""
    if not path.startswith(PREFIXES):
        return False
    if b"%" in path or path.endswith(b"/"):  # a server sees the same path behind both
        path = unquote_to_bytes(path).rstrip(b"/")
    return path not in EVERYONES


class Rollouts:
    """The shared side of every exchange between a client and a replica."""

    def __init__(
        self,
        gate: RolloutGate,
        metrics: Metrics,
        settings: Settings,
        look_at: Callable[[str], None],
    ) -> None:
        self.gate = gate
        self.metrics = metrics
        self.accounts = Accounts(metrics, settings.log.access)
        self.upstreams = Upstreams()
        gate.on_lapse = self.recall
        gate.on_bar = self.recall_from
        self._look_at = look_at
        self._suspected: dict[str, float] = {}
        self.running: set[Exchange] = set()
        self._auth = settings.auth
        self._guarded = settings.auth.guards_anything
        self._limit = settings.limits.rollout_body_bytes
        self._boot = secrets.token_hex(8)
        self._numbers = count()
        self.replaced = REPLACED_IN_REQUEST
        self.added: Headers = []
        if self._guarded:  # the token was meant for us; replicas have one of their own
            self.replaced = self.replaced | {b"authorization"}
        if settings.auth.replica_token is not None:
            token = settings.auth.replica_token.get_secret_value()
            self.added.append((b"authorization", f"Bearer {token}".encode("latin-1")))

    def suspect(self, replica: str, reason: str) -> None:
        """Have a replica looked at on which a rollout broke, once for all that break there now."""
        now = monotonic()
        if now < self._suspected.get(replica, 0.0) + SUSPECTED_S:
            return
        self._suspected[replica] = now
        log.warning("rollouts break", extra={"replica": replica, "error": reason})
        self._look_at(replica)

    def recall(self) -> None:
        """Take back every rollout that is not sent whole: this gateway's lease has ended."""
        for exchange in tuple(self.running):
            exchange.recall()

    def recall_from(self, replicas: Collection[str]) -> None:
        """Take back what is not sent whole to these replicas: they may get nothing any more."""
        for exchange in tuple(self.running):
            exchange.recall_from(replicas)

    def authorise(self, headers: Headers) -> None:
        """Raise unless the caller may send rollouts."""
        if self._guarded:
            lowered = [(name.lower(), value) for name, value in headers]
            authorise(lowered, Right.ROLLOUT, self._auth)

    def check_size(self, size: int) -> None:
        """Raise BodyTooLarge for a body over the limit."""
        if size > self._limit:
            raise BodyTooLarge(
                f"the body has {size} bytes or more, a rollout takes at most {self._limit}",
                hint="send less, or raise FLEET_LIMITS__ROLLOUT_BODY_BYTES on the gateway",
            )

    def new_id(self) -> bytes:
        """Return a request id that no other gateway and no other request has."""
        return f"{self._boot}{next(self._numbers):x}".encode()
