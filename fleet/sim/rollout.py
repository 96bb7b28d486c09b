"""The generation routes of a replica: completions, chat and token-in token-out, whole or streamed.

Shapes are those of vLLM 0.32. An answer has one key more, ``sim``: which weights, version and KV
made it, token by token; a streamed answer carries it on its last choice. Requests that the caller
hangs up on are cancelled and counted.
"""

import time
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from aiohttp import web

from fleet.sim import shapes
from fleet.sim.errors import EngineDead, SimError
from fleet.sim.http import Routes, answer, body_object, failure
from fleet.sim.prompts import Job, parse_chat, parse_completion, parse_generate
from fleet.sim.scheduler import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fleet.sim.engine import SimEngine
    from fleet.sim.log import SimLog

_EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}


class RolloutRoutes:
    """The generation routes of one engine."""

    def __init__(
        self,
        engine: "SimEngine",
        log: "SimLog",
        on_chunk: "Callable[[web.BaseRequest, int], Awaitable[None]]",
    ) -> None:
        self._engine = engine
        self._log = log
        self._on_chunk = on_chunk  # told the number of events sent so far: faults hook in

    def routes(self) -> Routes:
        """Path to method to handler."""
        return {
            "/v1/completions": {"POST": self.completions},
            "/v1/chat/completions": {"POST": self.chat},
            "/inference/v1/generate": {"POST": self.generate},
        }

    async def completions(self, request: web.BaseRequest) -> web.StreamResponse:
        """POST /v1/completions."""
        body = await body_object(request)
        job = parse_completion(body, _request_id(request, body), self._engine)
        return await self._serve(request, job)

    async def chat(self, request: web.BaseRequest) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = await body_object(request)
        job = parse_chat(body, _request_id(request, body), self._engine)
        return await self._serve(request, job)

    async def generate(self, request: web.BaseRequest) -> web.StreamResponse:
        """POST /inference/v1/generate."""
        body = await body_object(request)
        job = parse_generate(body, _request_id(request, body), self._engine)
        return await self._serve(request, job)

    async def _serve(self, request: web.BaseRequest, job: Job) -> web.StreamResponse:
        began = time.monotonic()
        outcome = "cancelled"
        try:
            reply = await (self._stream(request, job) if job.stream else self._whole(job))
            outcome = "aborted" if job.aborted else "finished"
        except SimError as error:
            outcome = "killed" if isinstance(error, EngineDead) else "refused"
            reply = failure(error)
        finally:
            if self._engine.dead and outcome == "cancelled":
                outcome = "killed"
            self._log.add_rollout(shapes.record(request.path, job, outcome, began))
        return reply

    async def _whole(self, job: Job) -> web.Response:
        async for _ in run(self._engine, job.batch):
            pass
        return answer(shapes.whole(job, self._engine))

    async def _stream(self, request: web.BaseRequest, job: Job) -> web.StreamResponse:
        events = self._events(job)
        first = await anext(events)  # so that an error before the first token is a plain answer
        reply = web.StreamResponse(headers=_EVENT_STREAM)
        reply.enable_chunked_encoding()
        await reply.prepare(request)
        await self._send(reply, request, first, 1)
        sent = 1
        async for event in events:
            sent += 1
            await self._send(reply, request, event, sent)
        await reply.write_eof()
        return reply

    async def _send(
        self, reply: web.StreamResponse, request: web.BaseRequest, event: str, sent: int
    ) -> None:
        await reply.write(f"data: {event}\n\n".encode())
        await self._on_chunk(request, sent)

    async def _events(self, job: Job) -> AsyncIterator[str]:
        sent = [0] * len(job.batch)
        started = False
        try:
            async for _ in run(self._engine, job.batch):
                for event in shapes.new_chunks(job, sent, self._engine):
                    started = True
                    yield event
        except EngineDead as error:
            if not started:
                raise
            yield shapes.error_event(error)
        for event in shapes.last_chunks(job, self._engine):
            yield event


def _request_id(request: web.BaseRequest, body: dict[str, Any]) -> str:
    return request.headers.get("X-Request-Id") or str(
        body.get("request_id") or uuid.uuid4().hex[:16]
    )
