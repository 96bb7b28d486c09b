"""The desk: what every control call has in common before and after its own work.

In this order: form (400), rights (401/403), then the call itself (409, 424, 504). A call that is
repeated while it is on its way, or because its answer was lost, meets the first one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, TypeVar

from fastapi import Request, Response

from fleet.errors import DeadlinePassed, FleetError, StoreUnavailable
from fleet.facts.calls import CallId
from fleet.facts.state import FleetState
from fleet.ledger import Ledger
from fleet.rules.membership import membership
from gateway.asgi import ClientGone, header, read_body
from gateway.auth import Right, authorise
from gateway.errors import status_of
from gateway.metrics import Metrics
from gateway.responses import json_response
from gateway.settings_model import Settings
from gateway.single_flight import ControlCall, SingleFlight

T = TypeVar("T")
Parse = Callable[[bytearray], T]
CLIENT_CLOSED = 499
"""What is written down for a caller that left; nobody reads it."""

REPEATABLE = frozenset(
    {"/abort_requests", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"}
)
"""Calls that must reach the replicas each time: what came in since the last one counts."""


class Desk:
    """Takes control calls in and hands their answers out."""

    def __init__(
        self, settings: Settings, ledger: Ledger, flights: SingleFlight, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._flights = flights
        self._metrics = metrics
        self._resets = ledger.state.resets

    async def serve(
        self,
        request: Request,
        parse: Parse[T],
        act: Callable[[T], Awaitable[Any]],
        *,
        right: Right = Right.TRAINER,
        limit: int | None = None,
    ) -> Response:
        """Read, check and carry out one control call; `act` returns JSON or a Response."""
        started = perf_counter()
        try:
            value, body = await self._read(request, parse, right, limit)
            await self.catch_up(request)
            answer = await self._carry_out(request, body, lambda: act(value))
            response = self._answer(answer)
        except FleetError as error:
            self._count(request, status_of(error), started)
            raise
        except ClientGone:
            response = Response(status_code=CLIENT_CLOSED)
        self._count(request, response.status_code, started)
        return response

    @property
    def is_busy(self) -> bool:
        """Whether a call that changes something is on its way here."""
        return self._flights.are_any

    def give_up(self) -> None:
        """Answer every call that is still on its way: this gateway ends before they do."""
        state = self._ledger.state
        holder = f"; {state.holder.what} was on its way" if state.holder else ""
        self._flights.give_up(
            DeadlinePassed(
                f"outcome unknown: this gateway stops{holder}",
                hint="ask GET /fleet at another gateway, or at this one when it is back, what "
                "became of it",
            )
        )

    def follow(self, state: FleetState) -> None:
        """Let no later call meet one that is on its way, if an operator has abandoned its round.

        A call that hangs must not swallow the next round's equal one.
        """
        if state.resets != self._resets:
            self._resets = state.resets
            self._flights.forget()

    async def catch_up(self, request: Request) -> None:
        """See first what other gateways have done; who only looks or aborts need not see it."""
        if len(self._ledger.state.gateways) < 2:
            return
        try:
            await self._ledger.refresh()
        except StoreUnavailable:
            if request.method != "GET" and request.url.path not in REPEATABLE:
                raise

    async def _carry_out(
        self, request: Request, body: bytearray, work: Callable[[], Awaitable[Any]]
    ) -> Any:
        if request.method == "GET" or request.url.path in REPEATABLE:
            return await work()
        call = ControlCall(
            path=request.url.path,
            query=request.scope["query_string"],
            body=body,
            idempotency_key=request.headers.get("idempotency-key"),
        )
        request.state.call = CallId(by=caller_of(request), name=call.name, key=call.idempotency_key)
        return await self._flights.run(call, work, request.receive)

    async def _read(
        self, request: Request, parse: Parse[T], right: Right, limit: int | None
    ) -> tuple[T, bytearray]:
        """Check the form, then the rights; a large body of a stranger is not even read."""
        small = self._settings.limits.control_body_bytes
        limit = small if limit is None else limit
        stranger: FleetError | None = None
        try:
            authorise(request.scope["headers"], right, self._settings.auth)
        except FleetError as error:
            stranger = error
            length = header(request.scope, b"content-length") or "0"
            if not length.isdigit() or int(length) > small:
                raise
            limit = min(limit, small)
        body = await read_body(request.scope, request.receive, limit, request.url.path)
        value = parse(body)
        if stranger is not None:
            raise stranger
        return value, body

    def _answer(self, answer: Any) -> Response:
        response = answer if isinstance(answer, Response) else json_response(answer)
        now = membership(self._ledger.state)
        if now.changed:
            number = "" if now.obstacle else f"; world_size={now.world_size}"
            response.headers["X-Fleet-Membership"] = f"changed{number}"
        return response

    def _count(self, request: Request, status: int, started: float) -> None:
        path = request.scope["route"].path
        self._metrics.control_s.labels(path, status).observe(perf_counter() - started)


def position_of(state: FleetState) -> object:
    """Return what every control call that changes anything changes a part of."""
    current = state.round
    return (
        state.generation,
        state.phase,
        (current.id, current.updates) if current else None,
        (state.commit_index, state.weight_version),
        state.pause,
        [(r.id, r.sleep, r.draining, r.fence, r.restarted_at) for r in state.replicas.values()],
    )


def call_of(request: Request) -> CallId:
    """Return what tells the control call that a route carries out from others."""
    return request.state.call


def caller_of(request: Request) -> str:
    """Return who is calling, as far as a connection tells."""
    host = f"{request.client.host}:{request.client.port}" if request.client else "unknown"
    agent = request.headers.get("user-agent")
    return f"{host} ({agent})" if agent else host
