"""The rollout worker's client: ask one gateway for rollouts, and learn which weights made them.

Asynchronous, on httpx. A rollout is repeated only if it is certain that nothing was generated: no
connection came about, or the gateway refused it with a time to come back. The gateway itself
holds rollouts during weight updates, so a worker needs no other patience.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import httpx

from fleet.client import calls
from fleet.client.answers import Rollout, body_of, error_of, field_of, rollout_of
from fleet.client.calls import Call, Timeouts
from fleet.client.connection import lost, options_of, request_of
from fleet.client.errors import Unavailable, Unreachable

log = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_S = 2.0  # less than the gateway keeps an idle connection


class Wishes(TypedDict, total=False):
    """What a rollout may ask of the gateway, beside its body.

    Rollouts of one `session` go to one replica, for its prefix cache. `min_version` lets it wait
    until that version has been committed. `request_id` is the name under which it can be aborted.
    """

    session: str | None
    min_version: str | None
    request_id: str | None


class Stream:
    """A streamed rollout on its way; `rollout` is what its headers said."""

    def __init__(self, response: httpx.Response) -> None:
        self.rollout = rollout_of(response.headers, None)
        self._response = response

    async def events(self) -> AsyncGenerator[Any]:
        """Yield the JSON of each event.

        Raises what a last event says of a replica that broke off, AnswerLost if not even that
        came: the tokens so far are no answer.
        """
        call = f"{self._response.request.method} {self._response.request.url.path}"
        try:
            async for line in self._response.aiter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data and data != "[DONE]":
                    yield _checked(call, json.loads(data))
        except httpx.HTTPError as error:
            raise lost(call, error) from error


class AsyncFleetClient:
    """Talks to one gateway, with as many rollouts at a time as one likes.

    `patience_s` is how long a rollout may be repeated that had no effect; 0 raises at once.
    Every method raises a `FleetError`; a model server's own refusal of a rollout is one too.
    ValueError is raised here for a `base_url` that is none.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        patience_s: float = 60.0,
    ) -> None:
        self.timeouts = timeouts
        self.patience_s = patience_s
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S)
        self._http = httpx.AsyncClient(**options_of(base_url, token, timeouts), limits=limits)

    def __repr__(self) -> str:
        return f"<AsyncFleetClient {self._http.base_url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the connections; rollouts under way are cancelled."""
        await self._http.aclose()

    # -- rollouts ----------------------------------------------------------------------------------

    async def generate(self, body: Mapping[str, Any], **wishes: Unpack[Wishes]) -> Rollout:
        """Tokens in, tokens out (/inference/v1/generate; vLLM's --enable-scale-out)."""
        return await self.rollout("/inference/v1/generate", body, **wishes)

    async def complete(self, body: Mapping[str, Any], **wishes: Unpack[Wishes]) -> Rollout:
        """A completion (/v1/completions)."""
        return await self.rollout("/v1/completions", body, **wishes)

    async def chat(self, body: Mapping[str, Any], **wishes: Unpack[Wishes]) -> Rollout:
        """A chat completion (/v1/chat/completions)."""
        return await self.rollout("/v1/chat/completions", body, **wishes)

    async def rollout(
        self, path: str, body: Mapping[str, Any], **wishes: Unpack[Wishes]
    ) -> Rollout:
        """Ask on any rollout path, whole; return its answer and who made it with which weights."""
        call = Call("POST", path, dict(body), waits="rollout_s")

        async def once() -> Rollout:
            answer = await self._answer(call, _headers(wishes))
            return rollout_of(answer.headers, answer.content)

        return await self._patiently(once, call)

    @asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any], **wishes: Unpack[Wishes]
    ) -> AsyncGenerator[Stream]:
        """Ask on any rollout path, token by token; leaving the context cancels what is left."""
        call = Call("POST", path, {**body, "stream": True}, waits="rollout_s")
        response = await self._patiently(lambda: self._begin(call, _headers(wishes)), call)
        try:
            yield Stream(response)
        finally:
            await response.aclose()

    # -- the fleet ---------------------------------------------------------------------------------

    async def weight_info(self) -> str:
        """Return the committed version, "default" before the first commit."""
        return field_of(await self.call(calls.weight_info()), "weight_version", str)

    async def pause(self, mode: str = "keep", *, clear_cache: bool = True) -> None:
        """Shut the gate and pause every replica, until `resume`."""
        await self.call(calls.pause(mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        """Resume every replica whose weights are known, and open the gate."""
        await self.call(calls.resume())

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Abort rollouts, by the ids that their senders know, or all; return how many.

        Of named ones that is the number of names, as vLLM counts: also of those that match nothing.
        """
        return field_of(await self.call(calls.abort(request_ids)), "aborted", int)

    async def call(self, call: Call) -> Any:
        """Make one control call, and again while it had no effect; return its answer's JSON."""

        async def once() -> Any:
            return body_of((await self._answer(call, {})).content)

        return await self._patiently(once, call)

    # -- one request -------------------------------------------------------------------------------

    async def _patiently(self, once: Callable[[], Awaitable[T]], call: Call) -> T:
        gives_up = time.monotonic() + self.patience_s
        while True:
            try:
                return await once()
            except (Unavailable, Unreachable) as error:
                wait_s = error.retry_after_s
                if time.monotonic() + wait_s > gives_up:
                    raise
                log.info("call had no effect, once more", extra={"call": str(call), "why": error})
                await asyncio.sleep(wait_s)

    async def _answer(self, call: Call, headers: Mapping[str, str]) -> httpx.Response:
        response = await self._begin(call, headers)
        try:
            await response.aread()
        except httpx.HTTPError as error:
            raise lost(str(call), error) from error
        finally:
            await response.aclose()
        return response

    async def _begin(self, call: Call, headers: Mapping[str, str]) -> httpx.Response:
        """Send, and return once the answer's head says yes."""
        request = self._http.build_request(**request_of(call, self.timeouts), headers=headers)
        try:
            response = await self._http.send(request, stream=True)
            if not response.is_success:
                await response.aread()
                await response.aclose()
        except httpx.HTTPError as error:
            raise lost(str(call), error) from error
        if not response.is_success:
            status, told = response.status_code, response.headers
            error = error_of(str(call), status, told, response.content)
            assert error is not None
            raise error
        return response


def _checked(call: str, event: Any) -> Any:
    if isinstance(event, dict) and "error" in event:
        error = error_of(call, 502, {}, json.dumps(event).encode())
        assert error is not None
        raise error
    return event


def _headers(wishes: Wishes) -> dict[str, str]:
    named = {
        "x-session-id": wishes.get("session"),
        "x-min-weight-version": wishes.get("min_version"),
        "x-request-id": wishes.get("request_id"),
    }
    return {name: value for name, value in named.items() if value is not None}
