"""The operator's routes: look at the fleet, change its membership, get it out of a dead end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from fleet.errors import BadInput, NotAllowed, WrongPhase
from fleet.facts.state import FleetState
from fleet.rules.bodies import decode
from fleet.rules.membership import in_open_round, marked
from gateway.auth import Right, authorise
from gateway.context import Gateway, gateway_of
from gateway.desk import call_of, caller_of
from gateway.responses import json_response
from gateway.routes.control import nothing, told
from gateway.views import fleet_view, layout_view, replicas_view, round_view

router = APIRouter(prefix="/fleet")


@router.get("")
async def fleet(request: Request) -> Response:
    """Summarise the fleet: version, phase, gate, membership, open round, replicas by state."""
    return await _shown(request, _summary)


@router.get("/replicas")
async def replicas(request: Request) -> Response:
    """List every replica with its state and the reason for it."""
    return await _shown(request, lambda g: {"replicas": replicas_view(g.ledger.state, g.load())})


@router.get("/layout")
async def layout(request: Request) -> Response:
    """Show which ranks each replica has in the current group."""
    return await _shown(request, lambda g: layout_view(g.ledger.state))


@router.get("/rounds")
async def rounds(request: Request, limit: int = Query(50, ge=1, le=200)) -> Response:
    """List weight updates, newest first, with the times of every phase and replica."""
    gateway = _guarded(request)
    found = await gateway.ledger.rounds(limit)
    return json_response({"rounds": [round_view(record) for record in found]})


@router.get("/events")
async def events(request: Request) -> Response:
    """Follow what happens to the fleet as server-sent events (WHATWG HTML, 9.2).

    `Last-Event-ID` goes on where a follower was cut off; without it, from now on.
    """
    gateway = _guarded(request)
    after = request.headers.get("last-event-id")
    return StreamingResponse(_server_sent(gateway, after), media_type="text/event-stream")


async def _server_sent(gateway: Gateway, after: str | None) -> AsyncGenerator[bytes]:
    yield b": the fleet's events follow\n\n"
    async for record in gateway.journal.follow(after):
        body = record.fields["event"]
        name = msgspec.json.decode(body)["event"]
        yield f"id: {record.id}\nevent: {name}\ndata: ".encode() + body + b"\n\n"


class _NewReplica(msgspec.Struct, frozen=True):
    url: str


@router.post("/replicas")
async def add_replica(request: Request) -> Response:
    """Add a replica by URL; it joins once a probe has seen it.

    409 if it is a server that the fleet has under another name.
    """
    gateway = gateway_of(request)

    def parse(body: bytearray) -> str:
        return decode(body, _NewReplica, "a new replica").url

    async def act(url: str) -> dict[str, Any]:
        try:
            added = await gateway.registry.admit(url)
        except ValueError as error:
            raise BadInput(str(error)) from error
        return _one(gateway, added)

    return await gateway.desk.serve(request, parse, act, right=Right.OPERATOR)


@router.delete("/replicas/{replica}")
async def remove_replica(request: Request, replica: str) -> Response:
    """Forget a replica; refused while it is a member of an open round."""
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        gateway.registry.find(replica)
        hint = "drain it now and remove it after the round"
        _refuse_member(gateway.ledger.state, replica, hint)
        await gateway.registry.remove(replica)
        return {"removed": replica}

    return await gateway.desk.serve(request, nothing, act, right=Right.OPERATOR)


@router.post("/replicas/{replica}/drain")
async def drain(request: Request, replica: str) -> Response:
    """Route no more rollouts to a replica and leave it out of the next group."""
    return await _mark(request, replica, draining=True)


@router.post("/replicas/{replica}/readmit")
async def readmit(request: Request, replica: str) -> Response:
    """Take a draining replica back; a fence is lifted only by a full update."""
    return await _mark(request, replica, draining=False)


@router.post("/replicas/{replica}/fence")
async def fence(request: Request, replica: str) -> Response:
    """Bar a replica from rollouts until a full update."""
    why = f"an operator asked for it ({caller_of(request)})"
    return await _mark(request, replica, fence=why, holds=None)


@router.post("/replicas/{replica}/restart")
async def restart(request: Request, replica: str) -> Response:
    """Have a replica restarted by whatever is configured for that."""
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        gateway.registry.find(replica)
        hook = gateway.restart
        if hook is None:
            raise NotAllowed(
                "no way to restart replicas is configured",
                hint="set FLEET_RESTART__COMMAND, FLEET_RESTART__WEBHOOK or, for pods, "
                "FLEET_KUBERNETES__RESTART, or restart it by hand",
            )
        _refuse_member(gateway.ledger.state, replica, "restart it after the round, or reset first")
        await gateway.registry.restart(replica, hook)
        return _one(gateway, replica)

    return await gateway.desk.serve(request, nothing, act, right=Right.OPERATOR)


@router.post("/rounds/{round_id}/commit")
async def commit(request: Request, round_id: int) -> Response:
    """Commit a failed finish for the members that completed it; the others stay fenced."""
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        outcomes = await gateway.coordinator.commit(round_id, call_of(request))
        state = gateway.ledger.state
        fenced = {r.id: r.fence for r in state.replicas.values() if r.fence}
        return {"weight_version": state.weight_version, "fenced": fenced, **told(outcomes)}

    return await gateway.desk.serve(request, nothing, act, right=Right.OPERATOR)


@router.post("/reset")
async def reset(request: Request, new_model: bool = False) -> Response:
    """Abandon whatever is open, and say what stays fenced.

    `?new_model=true` forgets which tensors a full update has: the next round sets that anew.
    """
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        outcomes = await gateway.coordinator.reset(caller_of(request), new_model=new_model)
        state = gateway.ledger.state
        fenced = {r.id: r.barred for r in state.replicas.values() if r.barred}
        wedged = {r.id: r.wedged for r in state.replicas.values() if r.wedged}
        return {
            "fenced": fenced,
            "wedged": wedged,
            "fleet": _summary(gateway),
            **told(outcomes),
        }

    return await gateway.desk.serve(request, nothing, act, right=Right.OPERATOR)


async def _mark(request: Request, replica: str, **facts: Any) -> Response:
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        gateway.registry.find(replica)

        def change(state: FleetState) -> FleetState:
            return marked(state, [replica], **facts)

        await gateway.ledger.amend(change)
        return _one(gateway, replica)

    return await gateway.desk.serve(request, nothing, act, right=Right.OPERATOR)


def _refuse_member(state: FleetState, replica: str, hint: str) -> None:
    if in_open_round(state, replica):
        raise WrongPhase(f"{replica} is a member of the open round", hint=hint)


def _one(gateway: Gateway, replica: str) -> dict[str, Any]:
    """Return what is told of one replica; UnknownReplica if it was removed meanwhile."""
    gateway.registry.find(replica)
    views = replicas_view(gateway.ledger.state, gateway.load())
    return next(view for view in views if view["id"] == replica)


def _summary(gateway: Gateway) -> dict[str, Any]:
    gate, outage = gateway.gate, gateway.peers.outage
    return fleet_view(gateway.ledger.state, gateway.load(), gate.closed_since, outage)


async def _shown(request: Request, view: Callable[[Gateway], dict[str, Any]]) -> Response:
    gateway = _guarded(request)
    await gateway.desk.catch_up(request)
    return json_response(view(gateway))


def _guarded(request: Request) -> Gateway:
    gateway = gateway_of(request)
    authorise(request.scope["headers"], Right.OPERATOR, gateway.settings.auth)
    return gateway
