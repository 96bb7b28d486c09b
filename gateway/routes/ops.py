"""Probes, metrics and the merged model list.

/health is vLLM's: 200 while rollouts can be served or held. /livez depends on nothing but the
event loop: a paused, sleeping or updating fleet is alive. /readyz depends on the store.
"""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, Request, Response

from fleet.errors import FleetError, NoEligibleReplica
from fleet.facts.outcome import Outcome
from fleet.replicas.replica_client import Call
from gateway.auth import Right, authorise
from gateway.context import gateway_of
from gateway.responses import json_response
from gateway.routes.answers import items_of
from gateway.version import gateway_version

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """Answer 200 while a replica is there to serve rollouts now or after the gate opens."""
    alive = [
        r for r in gateway_of(request).ledger.state.replicas.values() if r.known and not r.lost
    ]
    return Response(status_code=200 if alive else 503)


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """As /health."""
    return await health(request)


@router.get("/livez")
async def livez() -> Response:
    """Answer 200 while the event loop turns."""
    return Response(status_code=200)


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Answer 200 when the store answers and every replica has been looked at once."""
    gateway = gateway_of(request)
    try:
        await gateway.store.ping()
    except FleetError as error:
        return json_response({"ready": False, "reason": error.message}, 503)
    if gateway.gate.lease_lapsed:
        why = "this gateway has lost its lease: it has not seen the fleet for too long, or was "
        return json_response({"ready": False, "reason": why + "expelled; its gate is closed"}, 503)
    if not gateway.registry.swept.is_set():
        return json_response(
            {"ready": False, "reason": "the replicas have not been probed yet"}, 503
        )
    return json_response({"ready": True})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    body = gateway_of(request).metrics.render()
    return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/version")
async def version() -> Response:
    """Return this program's version."""
    return json_response({"version": gateway_version(), "server": "vllm-fleet-gateway"})


@router.get("/load")
async def load(request: Request) -> Response:
    """Return how many rollouts are being answered or held here."""
    gate = gateway_of(request).gate
    return json_response({"server_load": sum(gate.inflight.values()) + gate.held})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """Merge the model lists of all replicas that answer, each model once."""
    gateway = gateway_of(request)
    authorise(request.scope["headers"], Right.ROLLOUT, gateway.settings.auth)
    outcomes = await gateway.controls.ask_everyone(Call("GET", "/v1/models"))
    merged = _merge(outcomes)
    if not merged:
        raise NoEligibleReplica("no replica lists its models", outcomes=outcomes)
    return json_response({"object": "list", "data": merged})


def _merge(outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for outcome in outcomes.values():
        for model in items_of(outcome.answer, "data"):
            if isinstance(model, dict):
                entry = cast("dict[str, Any]", model)
                merged.setdefault(str(entry.get("id")), entry)
    return list(merged.values())
