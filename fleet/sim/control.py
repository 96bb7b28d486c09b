"""The control routes of a replica: weight transfer, pauses, sleep, caches, adapters.

Paths, queries, bodies and answers are those of vLLM 0.32's ``entrypoints/rl/online/api_router.py``
and ``entrypoints/serve/dev``. They run to their end even if the caller hangs up, as there; the
server sees to that.
"""

import json
from typing import Any

from aiohttp import web

from fleet.sim.engine import PauseMode, SimEngine
from fleet.sim.errors import WorkerFailed
from fleet.sim.http import (
    Handler,
    Routes,
    answer,
    body_object,
    choice,
    empty,
    field,
    flag,
    invalid,
    number,
    phrase_error,
)

_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
_HARMLESS = ("check_health", "synchronize_device")


class ControlRoutes:
    """The control routes of one engine."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    def routes(self) -> Routes:
        """Path to method to handler."""
        table: Routes = {
            **_post("/pause", self.pause),
            **_post("/resume", self.resume),
            **_get("/is_paused", self.is_paused),
            **_post("/abort_requests", self.abort_requests),
            **_post("/inference/v1/abort_requests", self.abort_requests_by_id),
            **_post("/sleep", self.sleep),
            **_post("/wake_up", self.wake_up),
            **_get("/is_sleeping", self.is_sleeping),
            **_post("/release_kv_cache_memory", self.release_kv_cache),
            **_post("/reset_prefix_cache", self.reset_prefix_cache),
            **_post("/reset_mm_cache", self.reset_nothing),
            **_post("/reset_encoder_cache", self.reset_nothing),
            **_post("/collective_rpc", self.collective_rpc),
        }
        return table | (self._weight_routes() if self._engine.options.weight_endpoints else {})

    def _weight_routes(self) -> Routes:
        return {
            **_post("/init_weight_transfer_engine", self.init),
            **_post("/shutdown_weight_transfer_engine", self.shutdown),
            **_post("/start_weight_update", self.start),
            **_post("/start_draft_weight_update", self.start_draft),
            **_post("/update_weights", self.update),
            **_post("/finish_weight_update", self.finish),
            **_post("/update_weight_version", self.update_version),
            **_get("/weight_info", self.weight_info),
            **_post("/weight_checker", self.weight_checker),
            **_get("/get_world_size", self.world_size),
        }

    async def pause(self, request: web.BaseRequest) -> web.Response:
        """POST /pause?mode=&clear_cache=."""
        mode: PauseMode = choice(request, "mode", _MODES, "abort")
        clear = flag(request, "clear_cache", default=True)
        await self._engine.pause(mode, clear_cache=clear)
        return answer({"status": "paused"})

    async def resume(self, _request: web.BaseRequest) -> web.Response:
        """POST /resume."""
        await self._engine.resume()
        return answer({"status": "resumed"})

    async def is_paused(self, _request: web.BaseRequest) -> web.Response:
        """GET /is_paused."""
        return answer({"is_paused": await self._engine.is_paused()})

    async def abort_requests(self, request: web.BaseRequest) -> web.Response:
        """POST /abort_requests, on vLLM's internal ids; none given means all."""
        try:
            body = json.loads(await request.read())
        except ValueError:
            return phrase_error("Invalid JSON format", 400)
        if not isinstance(body, dict):
            return phrase_error("Request body must be a JSON object", 400)
        aborted = await self._engine.abort(body.get("request_ids"))
        return answer({"status": "aborted", "aborted": aborted})

    async def abort_requests_by_id(self, request: web.BaseRequest) -> web.Response:
        """POST /inference/v1/abort_requests."""
        body = await body_object(request)
        if body.get("request_ids") is None:
            return phrase_error("Missing 'request_ids' in request body", 400)
        if body["request_ids"]:
            await self._engine.abort(body["request_ids"])
        return empty()

    async def init(self, request: web.BaseRequest) -> web.Response:
        """POST /init_weight_transfer_engine; blocks until the group has met."""
        info = field(await body_object(request), "init_info", dict)
        await self._engine.init_transfer(info)
        return answer({"message": "Weight transfer initialized"})

    async def shutdown(self, _request: web.BaseRequest) -> web.Response:
        """POST /shutdown_weight_transfer_engine."""
        await self._engine.shutdown_transfer()
        return answer({"message": "Weight transfer shut down"})

    async def start(self, _request: web.BaseRequest) -> web.Response:
        """POST /start_weight_update."""
        await self._engine.start_update("model")
        return answer({"message": "Weight update started"})

    async def start_draft(self, _request: web.BaseRequest) -> web.Response:
        """POST /start_draft_weight_update."""
        await self._engine.start_update("draft")
        return answer({"message": "Draft weight update started"})

    async def update(self, request: web.BaseRequest) -> web.Response:
        """POST /update_weights; blocks for the transfer."""
        info = field(await body_object(request), "update_info", (dict, list))
        await self._engine.update(info)
        return answer({"message": "Weights updated"})

    async def finish(self, request: web.BaseRequest) -> web.Response:
        """POST /finish_weight_update, with or without a version."""
        version = (await body_object(request, lacking="weight_version")).get("weight_version")
        if version is not None and not isinstance(version, str):
            raise invalid(
                "string_type", ["body", "weight_version"], "Input should be a valid string"
            )
        await self._engine.finish_update(version)
        return answer({"message": "Weight update finished"})

    async def update_version(self, request: web.BaseRequest) -> web.Response:
        """POST /update_weight_version."""
        version = field(await body_object(request), "new_version", str)
        await self._engine.set_version(version)
        return answer({"success": True, "new_version": version})

    async def weight_info(self, _request: web.BaseRequest) -> web.Response:
        """GET /weight_info."""
        return answer({"weight_version": await self._engine.get_version()})

    async def weight_checker(self, request: web.BaseRequest) -> web.Response:
        """POST /weight_checker: checksum, reset or compare."""
        body = await body_object(request)
        action = field(body, "action", str)
        if action not in ("checksum", "reset", "compare"):
            message = "Input should be 'checksum', 'reset' or 'compare'"
            raise invalid("literal_error", ["body", "action"], message)
        if action == "reset":
            await self._engine.reset_weights()
            return answer({"status": "reset"})
        baseline = body.get("baseline")
        if action == "compare" and baseline is None:
            return phrase_error("action='compare' requires a 'baseline' object", 400)
        return answer(_checked(action, await self._engine.checksums(), baseline))

    async def world_size(self, request: web.BaseRequest) -> web.Response:
        """GET /get_world_size?include_dp=."""
        size = self._engine.options.workers_of(self._engine.index)
        if flag(request, "include_dp", default=True):
            size *= self._engine.options.data_parallel_size()
        return answer({"world_size": size})

    async def sleep(self, request: web.BaseRequest) -> web.Response:
        """POST /sleep?level=&mode=."""
        level = number(request, "level", 1, 0, 2)
        await self._engine.sleep(level, choice(request, "mode", _MODES, "abort"))
        return answer({"status": "sleeping", "level": level})

    async def wake_up(self, request: web.BaseRequest) -> web.Response:
        """POST /wake_up?tags=&tags=."""
        tags = request.query.getall("tags", []) or None
        awake = await self._engine.wake_up(tags)
        return answer({"status": "awake" if awake else "sleeping", "tags": tags})

    async def is_sleeping(self, _request: web.BaseRequest) -> web.Response:
        """GET /is_sleeping."""
        return answer({"is_sleeping": await self._engine.is_sleeping()})

    async def release_kv_cache(self, _request: web.BaseRequest) -> web.Response:
        """POST /release_kv_cache_memory."""
        await self._engine.release_kv_cache()
        return answer({"status": "kv_cache_released"})

    async def reset_prefix_cache(self, request: web.BaseRequest) -> web.Response:
        """POST /reset_prefix_cache; 200 whether or not it succeeded."""
        preempt = flag(request, "reset_running_requests", default=False)
        flag(request, "reset_external", default=False)
        return answer({"success": await self._engine.reset_prefix_cache(preempt=preempt)})

    async def reset_nothing(self, _request: web.BaseRequest) -> web.Response:
        """POST /reset_mm_cache and /reset_encoder_cache: caches that this model does not have."""
        async with self._engine.core():
            return empty()

    async def collective_rpc(self, request: web.BaseRequest) -> web.Response:
        """POST /collective_rpc; only methods without effect are there."""
        body = await body_object(request)
        method = body.get("method")
        if method is None:
            return phrase_error("Missing 'method' in request body", 400)
        async with self._engine.core():
            if method not in _HARMLESS:
                raise WorkerFailed(f"'SimWorker' object has no attribute '{method}'")
            return answer({"results": [None for _ in self._engine.workers]})


def _post(path: str, handler: Handler) -> Routes:
    return {path: {"POST": handler}}


def _get(path: str, handler: Handler) -> Routes:
    return {path: {"GET": handler}}


def _checked(action: str, checksums: dict[str, str], baseline: Any) -> dict[str, Any]:
    if action == "checksum":
        return {"checksums": checksums}
    names = checksums.keys() | baseline.keys()
    wrong = sorted(name for name in names if checksums.get(name) != baseline.get(name))
    return {"match": not wrong, "mismatches": wrong}
