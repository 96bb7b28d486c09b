"""From one HTTP request to one answer: routing, faults, the wedge, the log.

Order for each request: scripted faults; then silence while the engine sits in a lonely init; then
the route. Control calls run in tasks of the boot, so they end even if the caller hangs up.
Generation is cancelled with its caller, as in vLLM. Paths under /sim/ are this simulator's own
back door; they always answer, faults and wedges notwithstanding:

- GET /sim/log (DELETE clears it), GET /sim/stats
- GET, POST, DELETE /sim/faults: rules as in `faults.py`; path ``now`` acts at once
- POST /sim/die, POST /sim/restart {"seconds": …}
"""

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from fleet.sim.control import ControlRoutes
from fleet.sim.errors import EngineDead, SimError
from fleet.sim.faults import Fault
from fleet.sim.http import CallFailedAnswer, Handler, Routes, answer, detail, failure, script_object
from fleet.sim.info import InfoRoutes
from fleet.sim.log import ControlCall
from fleet.sim.rollout import RolloutRoutes

if TYPE_CHECKING:
    from fleet.sim.engine import SimEngine
    from fleet.sim.replica import SimReplica
    from fleet.sim.tasks import TaskOwner

_LOGGED_HEADERS = ("authorization", "x-request-id", "idempotency-key", "content-type")


class SimServer:
    """The request handler of one boot."""

    def __init__(
        self, replica: "SimReplica", engine: "SimEngine", owner: "TaskOwner", boot: int
    ) -> None:
        self._replica = replica
        self._engine = engine
        self._owner = owner
        self._boot = boot
        self._control = ControlRoutes(engine).routes()
        rollouts = RolloutRoutes(engine, replica.log, self._streamed)
        self._open = InfoRoutes(engine).routes() | rollouts.routes()
        self._back_door: Routes = {
            "/sim/log": {"GET": self._get_log, "DELETE": self._clear_log},
            "/sim/stats": {"GET": self._get_stats},
            "/sim/faults": {
                "GET": self._get_faults,
                "POST": self._add_fault,
                "DELETE": self._clear_faults,
            },
            "/sim/die": {"POST": self._die},
            "/sim/restart": {"POST": self._restart},
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        if request.path.startswith("/sim/"):
            return await _route(self._back_door, request)
        call = await self._log(request) if request.path in self._control else None
        reply = await self._with_faults(request)
        if call is not None:
            call.end(reply.status)
        if isinstance(reply, CallFailedAnswer):
            await _answer_and_hang_up(request, reply)
        return reply

    async def _log(self, request: web.BaseRequest) -> ControlCall:
        headers = {
            name: request.headers[name] for name in _LOGGED_HEADERS if name in request.headers
        }
        query = {name: request.query.getall(name) for name in request.query}
        body = _parsed(await request.read())
        call = ControlCall(request.method, request.path, query, body, headers, self._boot)
        self._replica.log.control.append(call)
        return call

    async def _with_faults(self, request: web.BaseRequest) -> web.StreamResponse:
        routes = self._control.get(request.path) or self._open.get(request.path) or {}
        fault = self._replica.faults.take(request.path, served=request.method in routes)
        if fault is None:
            return await self._dispatch(request)
        if fault.when == "before":
            return await self._act(fault, request) or await self._dispatch(request)
        reply = await self._dispatch(request)
        return await self._act(fault, request) or reply

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._engine.wedged:
            await self._wedge_over()
        if request.path not in self._control:
            return await _route(self._open, request)
        call = self._owner.spawn(_route(self._control, request), f"call {request.path}")
        return await asyncio.shield(call)

    async def _wedge_over(self) -> None:
        with contextlib.suppress(EngineDead):  # the route will say so
            await self._engine.until(lambda: not self._engine.wedged)

    async def _act(self, fault: Fault, request: web.BaseRequest) -> web.StreamResponse | None:
        """Carry a fault out; None means that the call goes on."""
        if fault.action == "delay":
            await asyncio.sleep(fault.seconds)
            return None
        if fault.action == "status":
            return answer(fault.answer_body(), fault.status)
        if fault.action == "lie":
            return answer(fault.answer_body(), 200)
        return await self._vanish(fault, request)

    async def _vanish(self, fault: Fault, request: web.BaseRequest) -> web.StreamResponse:
        """The faults after which no answer comes: drop, die, restart, hang."""
        if fault.action == "drop" and request.transport is not None:
            request.transport.abort()
        elif fault.action in ("die", "restart"):
            self._replica.schedule(fault.action, fault.seconds)
        await asyncio.Event().wait()  # ended by cancellation when the connection goes
        raise AssertionError

    async def _streamed(self, request: web.BaseRequest, tokens: int) -> None:
        fault = self._replica.faults.take_during(request.path, tokens)
        if fault is not None:
            await self._act(fault, request)

    async def _get_log(self, _request: web.BaseRequest) -> web.Response:
        return answer(self._replica.log.as_json())

    async def _clear_log(self, _request: web.BaseRequest) -> web.Response:
        self._replica.log.clear()
        return answer({})

    async def _get_stats(self, _request: web.BaseRequest) -> web.Response:
        return answer(self._replica.stats())

    async def _get_faults(self, _request: web.BaseRequest) -> web.Response:
        return answer(self._replica.faults.as_json())

    async def _clear_faults(self, _request: web.BaseRequest) -> web.Response:
        self._replica.faults.clear()
        return answer([])

    async def _add_fault(self, request: web.BaseRequest) -> web.Response:
        return await fault_answer(self._replica, request)

    async def _die(self, _request: web.BaseRequest) -> web.Response:
        self._replica.schedule("die")
        return answer({})

    async def _restart(self, request: web.BaseRequest) -> web.Response:
        self._replica.schedule("restart", await seconds_of(request))
        return answer({})


async def seconds_of(request: web.BaseRequest) -> float:
    """How long a replica is to stay away, from the body of a restart; 0 if that is empty."""
    body = await script_object(request, {"seconds": 5})
    return float(body.get("seconds", 0))


async def fault_answer(replica: "SimReplica", request: web.BaseRequest) -> web.Response:
    """Add a fault, or act at once for path ``now``; answers the rules that are left."""
    body = await script_object(request, {"path": "/update_weights", "action": "die"})
    if body.get("path") == "now":
        replica.schedule(str(body.get("action")), float(body.get("seconds", 0)))
        return answer(replica.faults.as_json())
    try:
        replica.faults.add_json(body)
    except ValueError as error:
        return answer({"detail": str(error)}, 400)
    return answer(replica.faults.as_json())


async def _answer_and_hang_up(request: web.BaseRequest, reply: web.Response) -> None:
    """Close the connection behind an answer without having said so.

    vLLM's handler for unforeseen exceptions re-raises them past a finished answer, upon which
    uvicorn closes (seen on a real server): a client that reuses the connection meets a reset.
    """
    await reply.prepare(request)
    await reply.write_eof()
    if request.transport is not None:
        request.transport.close()


async def _route(routes: Routes, request: web.BaseRequest) -> web.StreamResponse:
    methods = routes.get(request.path)
    if methods is None:
        return detail(404)
    handler: Handler | None = methods.get(request.method)
    if handler is None:
        return detail(405, methods)
    try:
        return await handler(request)
    except SimError as error:
        return failure(error)


def _parsed(raw: bytes) -> Any:
    if not raw:
        return None
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
