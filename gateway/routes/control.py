"""The trainer's control routes: the paths, queries and bodies of one vLLM server, for the fleet.

Each route says what its input must look like, which coordinator call it means, and which of
vLLM's fields the answer keeps (vllm/entrypoints/rl/online/api_router.py and serve/dev, 0.32).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse

from fleet.errors import BadInput, MemberFailed, NotAllowed
from fleet.facts.outcome import Outcome
from fleet.facts.replica import Replica
from fleet.facts.state import UNSET_VERSION
from fleet.replicas.replica_client import Call
from fleet.rules.adapters import excused, in_question, wish_of
from fleet.rules.bodies import FinishBody, InitBody, UpdateBody, VersionBody, check_version, decode
from gateway.aborting import abort
from gateway.auth import Right
from gateway.context import Gateway, gateway_of
from gateway.desk import call_of, caller_of
from gateway.routes.answers import field_of, items_of, table_of

router = APIRouter()

Outcomes = Mapping[str, Outcome]


# ---- pausing -----------------------------------------------------------------------------------


@router.post("/pause")
async def pause(request: Request, mode: str = "abort", clear_cache: bool = True) -> Response:
    """Pause every replica; none stays paused alone."""
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        outcomes = await gateway.controls.pause(
            mode, clear_cache=clear_cache, by=caller_of(request)
        )
        return {"status": "paused", **told(outcomes)}

    return await gateway.desk.serve(request, nothing, act)


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Resume every replica whose weights are known."""
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        return {"status": "resumed", **told(await gateway.controls.resume())}

    return await gateway.desk.serve(request, nothing, act)


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    """Say whether new rollouts wait because of a pause or an update."""
    return await _read(request, lambda g: {"is_paused": g.ledger.state.fleet_paused})


@router.post("/abort_requests")
async def abort_requests(request: Request) -> Response:
    """Abort rollouts wherever they are: those named by an id that their client knows, or all."""
    return await _abort(request, all_if_unnamed=True)


@router.post("/inference/v1/abort_requests")
async def abort_inference_requests(request: Request) -> Response:
    """As /abort_requests, for those named."""
    return await _abort(request, all_if_unnamed=False)


async def _abort(request: Request, *, all_if_unnamed: bool) -> Response:
    gateway = gateway_of(request)

    def parse(body: bytearray) -> list[str] | None:
        asked = decode(_required(body), dict[str, Any], "abort_requests")
        ids: Any = asked.get("request_ids")
        if all_if_unnamed and ids in (None, []):
            return None
        if not _is_strings(ids):
            raise BadInput("request_ids must be a list of strings")
        return cast("list[str]", ids)

    async def act(names: list[str] | None) -> dict[str, Any]:
        ended, outcomes = await abort(gateway.rollouts, gateway.controls, gateway.peers, names)
        count = ended if names is None else len(names)
        return {"status": "aborted", "aborted": count, **told(outcomes)}

    return await gateway.desk.serve(request, parse, act)


# ---- a weight update ---------------------------------------------------------------------------


@router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(request: Request) -> Response:
    """Let every replica join the trainer's group, each at its own ranks."""
    gateway = gateway_of(request)

    async def act(body: InitBody) -> dict[str, Any]:
        outcomes = await gateway.coordinator.init(body, call_of(request))
        generation = gateway.ledger.state.generation
        message = "Weight transfer initialized"
        group = gateway.ledger.state.group
        left_out = {"left_out": group.left_out} if group and group.left_out else {}
        return {"message": message, "generation": generation, **left_out, **told(outcomes)}

    return await gateway.desk.serve(request, lambda b: decode(b, InitBody, "init"), act)


@router.post("/shutdown_weight_transfer_engine")
async def shutdown_weight_transfer_engine(request: Request) -> Response:
    """Let every replica leave the trainer's group."""
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        return {
            "message": "Weight transfer shut down",
            **told(await gateway.coordinator.shutdown()),
        }

    return await gateway.desk.serve(request, nothing, act)


@router.post("/start_weight_update")
async def start_weight_update(request: Request) -> Response:
    """Close the gate, pause, and start on every replica."""
    return await _start(request, draft=False, message="Weight update started")


@router.post("/start_draft_weight_update")
async def start_draft_weight_update(request: Request) -> Response:
    """As start_weight_update, for the draft model; changes no version."""
    return await _start(request, draft=True, message="Draft weight update started")


async def _start(request: Request, *, draft: bool, message: str) -> Response:
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        outcomes = await gateway.coordinator.start(call_of(request), draft=draft)
        return {"message": message, **told(outcomes)}

    return await gateway.desk.serve(request, nothing, act)


@router.post("/update_weights")
async def update_weights(request: Request) -> Response:
    """Send the same bytes to every replica, or to each its own slice of a list."""
    gateway = gateway_of(request)

    async def act(body: UpdateBody) -> dict[str, Any]:
        outcomes = await gateway.coordinator.update(body, call_of(request))
        return {"message": "Weights updated", **told(outcomes)}

    limit = gateway.settings.limits.update_body_bytes
    return await gateway.desk.serve(request, UpdateBody, act, limit=limit)


@router.post("/finish_weight_update")
async def finish_weight_update(request: Request) -> Response:
    """Finish on every replica; the version commits when the last one has arrived."""
    gateway = gateway_of(request)

    def parse(body: bytearray) -> FinishBody:
        finish = decode(body, FinishBody, "finish")
        check_version(finish.weight_version)
        return finish

    async def act(body: FinishBody) -> dict[str, Any]:
        outcomes = await gateway.coordinator.finish(body, call_of(request))
        version = gateway.ledger.state.weight_version
        return {"message": "Weight update finished", "weight_version": version, **told(outcomes)}

    return await gateway.desk.serve(request, parse, act)


# ---- labels and numbers ------------------------------------------------------------------------


@router.post("/update_weight_version")
async def update_weight_version(request: Request) -> Response:
    """Give the weights that every replica holds another label."""
    gateway = gateway_of(request)

    def parse(body: bytearray) -> str:
        version: str = decode(body, VersionBody, "update_weight_version").new_version
        check_version(version)
        return version

    async def act(version: str) -> dict[str, Any]:
        outcomes = await gateway.controls.relabel(version)
        return {"success": True, "new_version": version, **told(outcomes)}

    return await gateway.desk.serve(request, parse, act)


@router.get("/weight_info")
async def weight_info(request: Request) -> Response:
    """Return the committed version."""
    return await _read(
        request, lambda g: {"weight_version": g.ledger.state.weight_version or UNSET_VERSION}
    )


@router.get("/get_world_size")
async def get_world_size(request: Request, include_dp: bool = True) -> Response:
    """Return how many workers the next init would find."""
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        return {"world_size": await gateway.controls.count_workers(include_dp=include_dp)}

    return await gateway.desk.serve(request, nothing, act)


class _Checker(msgspec.Struct, frozen=True):
    action: str
    baseline: dict[str, str] | None = None


@router.post("/weight_checker")
async def weight_checker(request: Request) -> Response:
    """Checksum, compare or reset weights; replicas that differ are a failure.

    Those that need not hold the committed version are not compared, only told as skipped.
    """
    gateway = gateway_of(request)

    def parse(body: bytearray) -> tuple[_Checker, bytes]:
        asked: _Checker = decode(body, _Checker, "weight_checker")
        if asked.action not in ("checksum", "reset", "compare"):
            raise BadInput(f"action must be checksum, reset or compare, not {asked.action!r}")
        if asked.action == "compare" and asked.baseline is None:
            raise BadInput("action='compare' requires a 'baseline' object")
        return asked, bytes(body)

    async def act(asked: tuple[_Checker, bytes]) -> dict[str, Any]:
        checker, body = asked
        call = Call("POST", "/weight_checker", body=body)
        if checker.action == "reset":
            outcomes = await gateway.controls.reset_weights(call)
        else:
            outcomes = await gateway.controls.check_weights(call)
        servers = {r: gateway.ledger.state.replicas.get(r) for r in outcomes}
        units = {r: _unit_of(server) or r for r, server in servers.items()}
        return {**_checked(checker.action, outcomes, units), **told(outcomes)}

    return await gateway.desk.serve(request, parse, act)


def _unit_of(server: Replica | None) -> str | None:
    return server.topology.deployment if server and server.topology else None


def _checked(action: str, outcomes: Outcomes, units: dict[str, str]) -> dict[str, Any]:
    """Return what vLLM's answer would say if the fleet were one server."""
    answers = {r: o.answer for r, o in outcomes.items() if o.ok}
    if action == "reset":
        return {"status": "reset"}
    if action == "compare":
        bad = _mismatches(answers, units)
        return {"match": not bad, "mismatches": sorted(bad)}
    return {"checksums": _merged(answers, outcomes)}


def _mismatches(answers: dict[str, Any], units: dict[str, str]) -> set[str]:
    """Return what differs anywhere from the baseline.

    A server of a deployment also names what only its siblings have (the prefix tells whose it is,
    vllm/v1/worker/gpu_worker.py, 0.33), so there a name counts if all of them name it.
    """
    found: dict[str, set[str]] = {}
    for replica, answer in answers.items():
        names = {str(name) for name in items_of(answer, "mismatches")}
        found[units[replica]] = found.get(units[replica], names) & names
    return {name for names in found.values() for name in names}


def _merged(answers: dict[str, Any], outcomes: Outcomes) -> dict[str, str]:
    """Return every checksum; MemberFailed if replicas of one shape differ.

    Shards of unequal replicas differ by nature, and so do their names.
    """
    shapes: dict[frozenset[str], dict[str, Any]] = {}
    for replica, answer in answers.items():
        table = table_of(answer, "checksums")
        first = shapes.setdefault(frozenset(table), table)
        if differing := [name for name in table if table[name] != first[name]]:
            raise MemberFailed(
                f"the replicas hold different weights: {differing[0]} of {replica} differs",
                hint="send a full update",
                outcomes=outcomes,
            )
    return {name: digest for table in shapes.values() for name, digest in table.items()}


# ---- sleep and caches --------------------------------------------------------------------------


@router.post("/sleep")
async def sleep(request: Request, level: int = 1, mode: str = "abort") -> Response:
    """Put every replica to sleep."""
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        outcomes = await gateway.controls.sleep(level, mode)
        return {"status": "sleeping", "level": level, **told(outcomes)}

    return await gateway.desk.serve(request, nothing, act)


@router.post("/wake_up")
async def wake_up(request: Request, tags: Annotated[tuple[str, ...], Query()] = ()) -> Response:
    """Wake parts of every replica, or all of it."""
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        outcomes = await gateway.controls.wake_up(tags)
        asleep = any(r.sleep for r in gateway.ledger.state.replicas.values())
        status = "sleeping" if asleep else "awake"
        return {"status": status, "tags": list(tags) or None, **told(outcomes)}

    return await gateway.desk.serve(request, nothing, act)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Say whether any replica is not wholly awake."""
    return await _read(
        request,
        lambda g: {"is_sleeping": any(r.sleep for r in g.ledger.state.replicas.values())},
    )


@router.post("/release_kv_cache_memory")
async def release_kv_cache_memory(request: Request) -> Response:
    """Give the memory of every replica's KV cache back."""
    return await _broadcast(request, {"status": "kv_cache_released"})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Drop every replica's prefix cache; `success` is false if one of them still holds blocks."""
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        call = _same_call(request)
        outcomes = await gateway.controls.broadcast(call, "reset_prefix_cache")
        said = [field_of(o.answer, "success") for o in outcomes.values() if o.ok]
        success = all(word is not False for word in said)
        if success:
            await gateway.controls.caches_cleared()
        return {"success": success, **told(outcomes)}

    return await gateway.desk.serve(request, nothing, act)


@router.post("/reset_mm_cache")
async def reset_mm_cache(request: Request) -> Response:
    """Drop every replica's multi-modal cache."""
    return await _broadcast(request, {})


@router.post("/reset_encoder_cache")
async def reset_encoder_cache(request: Request) -> Response:
    """Drop every replica's encoder cache."""
    return await _broadcast(request, {})


# ---- adapters and remote calls -----------------------------------------------------------------


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter on every replica, not on one."""
    return await _adapter(request)


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """Unload an adapter on every replica."""
    return await _adapter(request)


async def _adapter(request: Request) -> Response:
    gateway = gateway_of(request)

    async def act(body: bytes) -> Any:
        call = Call("POST", request.url.path, request.url.query, body=body)
        outcomes = await _adapted(gateway, call, body)
        first: Any = next((o.answer for o in outcomes.values() if o.answer is not None), "")
        if isinstance(first, dict):
            return {**first, **told(outcomes)}
        return PlainTextResponse(first if isinstance(first, str) else "")

    return await gateway.desk.serve(request, _json_object, act)


async def _adapted(gateway: Gateway, call: Call, body: bytes) -> Outcomes:
    """Make the call everywhere; who has refused it and has what was asked for has done it."""
    try:
        return await gateway.controls.broadcast(call, call.path)
    except MemberFailed as error:
        wish = wish_of(call.path, body)
        if wish is None or not in_question(error.outcomes):
            raise
        models = await gateway.controls.ask_everyone(Call("GET", "/v1/models"))
        outcomes = excused(error.outcomes, models, wish)
        if in_question(outcomes):
            raise
        return outcomes


@router.post("/collective_rpc")
async def collective_rpc(request: Request) -> Response:
    """Run a method in every worker; refused unless an operator has turned it on."""
    gateway = gateway_of(request)

    async def act(body: bytes) -> dict[str, Any]:
        if not gateway.settings.allow_collective_rpc:
            raise NotAllowed(
                "/collective_rpc runs any method in the workers and is turned off",
                hint="an operator can set FLEET_ALLOW_COLLECTIVE_RPC=true",
            )
        call = Call("POST", "/collective_rpc", body=body)
        outcomes = await gateway.controls.broadcast(call, "collective_rpc")
        results = [r for o in outcomes.values() if o.ok for r in items_of(o.answer, "results")]
        return {"results": results, **told(outcomes)}

    return await gateway.desk.serve(request, _json_object, act, right=Right.OPERATOR)


# ---- pieces ------------------------------------------------------------------------------------


def told(outcomes: Outcomes) -> dict[str, Any]:
    """Return what every answer adds: each replica's outcome."""
    return {"replicas": {replica: o.public() for replica, o in outcomes.items()}}


async def _read(request: Request, answer: Any) -> Response:
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        return answer(gateway)

    return await gateway.desk.serve(request, nothing, act)


async def _broadcast(request: Request, answer: dict[str, Any]) -> Response:
    gateway = gateway_of(request)

    async def act(_: None) -> dict[str, Any]:
        outcomes = await gateway.controls.broadcast(_same_call(request), request.url.path)
        return {**answer, **told(outcomes)}

    return await gateway.desk.serve(request, nothing, act)


def _same_call(request: Request) -> Call:
    return Call("POST", request.url.path, request.url.query)


def nothing(body: bytearray) -> None:
    """The call takes no body; clients send none, or an empty object."""
    if body:
        decode(body, dict[str, Any], "this call")


def _json_object(body: bytearray) -> bytes:
    decode(_required(body), dict[str, Any], "this call")
    return bytes(body)


def _required(body: bytearray) -> bytearray:
    if not body:
        raise BadInput("a JSON object is needed as the body, {} at least")
    return body


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in cast("list[Any]", value))
