"""An API server for pods on a real socket, with the ways in which real ones let watchers down.

It keeps pods, a history of events and resource versions, honours label selectors, pages, bookmarks
and timeoutSeconds, checks tokens, and can drop or freeze connections, forget its history, refuse,
answer nonsense, be away and come back.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Pod = dict[str, Any]


@dataclass
class Asked:
    """One request, as it came."""

    verb: str
    query: dict[str, str]
    token: str
    at: float


@dataclass
class FakeApi:
    """Change pods with `put` and `delete`; break it with the other methods."""

    namespace: str = "rl"
    tokens: set[str] | None = None
    """Tokens that are let in; None: everybody is."""
    forbidden: set[str] = field(default_factory=set[str])
    """Verbs (list, watch, delete) that are answered 403."""
    answers: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    """Answers to the next lists, before any real one."""
    page: int = 500
    delay_s: float = 0.0
    bookmark_s: float = 0.1
    gone_in_stream: bool = True
    """Whether 410 comes as an event in a watch (a watch cache does that) or as its status."""
    port: int = 0

    def __post_init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.version = 100
        self.asked: list[Asked] = []
        self.watches: dict[web.StreamResponse, web.Request] = {}
        self._oldest = 100
        self._history: list[tuple[int, Pod | None, Pod | None]] = []
        self._frozen: set[web.StreamResponse] = set()
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    # -- pods --------------------------------------------------------------------------------------

    async def put(self, pod: Pod) -> Pod:
        """Create a pod or put it in the place of the one with its name."""
        name = pod["metadata"]["name"]
        before = self.pods.get(name)
        self.version += 1
        pod = json.loads(json.dumps(pod))
        pod["metadata"]["resourceVersion"] = str(self.version)
        self.pods[name] = pod
        await self._happen(before, pod)
        return pod

    async def delete(self, name: str, *, silently: bool = False) -> None:
        """Take a pod away; `silently` loses the event, as a broken watch cache does."""
        pod = self.pods.pop(name)
        self.version += 1
        if not silently:
            gone = json.loads(json.dumps(pod))
            gone["metadata"]["resourceVersion"] = str(self.version)
            await self._happen(gone, None)

    async def replace(self, pod: Pod, *, silently: bool = True) -> Pod:
        """Delete and create under the same name, as a StatefulSet does; loses the deletion."""
        await self.delete(pod["metadata"]["name"], silently=silently)
        return await self.put(pod)

    async def _happen(self, before: Pod | None, after: Pod | None) -> None:
        self._history.append((self.version, before, after))
        await self._wake()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # -- trouble -----------------------------------------------------------------------------------

    def drop(self) -> None:
        """Reset every watch's connection."""
        for request in tuple(self.watches.values()):
            if isinstance(request.transport, asyncio.WriteTransport):
                request.transport.abort()

    def freeze(self) -> None:
        """Let the watches of now say nothing any more, not even that they are over."""
        self._frozen |= self.watches.keys()

    def forget(self) -> None:
        """Forget the history: older resource versions are too old from now on."""
        self._history.clear()
        self.version += 1
        self._oldest = self.version

    async def go_away(self) -> None:
        """Stop listening and drop everybody."""
        assert self._runner is not None
        self.drop()
        await self._runner.cleanup()
        self._runner = None

    async def come_back(self) -> None:
        """Listen again, on the same port, with the same pods."""
        app = web.Application()
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        app.router.add_get(path, self._get)
        app.router.add_delete(path + "/{name}", self._delete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def lists(self) -> int:
        """How many lists (first pages) have been asked for."""
        return sum(1 for a in self.asked if a.verb == "list" and "continue" not in a.query)

    # -- HTTP --------------------------------------------------------------------------------------

    async def _get(self, request: web.Request) -> web.StreamResponse:
        verb = "watch" if request.query.get("watch") else "list"
        refusal = self._note(request, verb)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if refusal is not None:
            return refusal
        return await (self._watch(request) if verb == "watch" else self._list(request))

    def _note(self, request: web.Request, verb: str) -> web.Response | None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        now = asyncio.get_running_loop().time()
        self.asked.append(Asked(verb, dict(request.query), token, now))
        if self.tokens is not None and token not in self.tokens:
            return _status(401, "Unauthorized")
        if verb in self.forbidden:
            return _status(403, f"pods is forbidden: may not {verb}")
        return None

    async def _list(self, request: web.Request) -> web.Response:
        if self.answers:
            status, body = self.answers.pop(0)
            return web.Response(status=status, body=body)
        selector, first = request.query["labelSelector"], int(request.query.get("continue", "0"))
        found = [pod for pod in self.pods.values() if matches(selector, pod)]
        last = first + min(self.page, int(request.query.get("limit", "500")))
        meta = {"resourceVersion": str(self.version)}
        if last < len(found):
            meta["continue"] = str(last)
        return web.json_response({"kind": "PodList", "metadata": meta, "items": found[first:last]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        if seen < self._oldest and not self.gone_in_stream:
            return _status(410, "too old resource version")
        answer = web.StreamResponse()
        await answer.prepare(request)
        self.watches[answer] = request
        try:
            await self._stream(request, answer, seen)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.watches.pop(answer, None)
        return answer

    async def _stream(self, request: web.Request, answer: web.StreamResponse, seen: int) -> None:
        clock = asyncio.get_running_loop().time
        ends = clock() + float(request.query["timeoutSeconds"])
        bookmark_at = clock() + self.bookmark_s
        while clock() < ends or answer in self._frozen:
            if answer not in self._frozen:
                seen = await self._send_news(request.query["labelSelector"], answer, seen)
                if seen < 0:
                    return
                if clock() >= bookmark_at and request.query.get("allowWatchBookmarks"):
                    bookmark_at = clock() + self.bookmark_s
                    meta = {"resourceVersion": str(self.version)}
                    await _event(answer, "BOOKMARK", {"kind": "Pod", "metadata": meta})
                    seen = self.version
            try:
                async with asyncio.timeout(min(self.bookmark_s, max(0.0, ends - clock()))):
                    async with self._changed:
                        await self._changed.wait()
            except TimeoutError:
                continue

    async def _send_news(self, selector: str, answer: web.StreamResponse, seen: int) -> int:
        if seen < self._oldest:
            told = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            await _event(answer, "ERROR", told)
            return -1
        for version, before, after in tuple(self._history):
            if version <= seen:
                continue
            was = before is not None and matches(selector, before)
            now = after is not None and matches(selector, after)
            if now:
                await _event(answer, "MODIFIED" if was else "ADDED", after)
            elif was:
                left = after or before or {}
                meta = {**left["metadata"], "resourceVersion": str(version)}
                await _event(answer, "DELETED", {**left, "metadata": meta})
            seen = version
        return seen

    async def _delete(self, request: web.Request) -> web.Response:
        refusal = self._note(request, "delete")
        if refusal is not None:
            return refusal
        name, options = request.match_info["name"], await request.json()
        pod = self.pods.get(name)
        if pod is None:
            return _status(404, f"pods {name} not found")
        if options["preconditions"]["uid"] != pod["metadata"]["uid"]:
            return _status(409, "the UID in the precondition does not match")
        await self.delete(name)
        return web.json_response(pod)


def matches(selector: str, pod: Pod) -> bool:
    """Whether a pod's labels meet a selector of `=`, `!=`, `in` and `notin`."""
    labels: dict[str, str] = pod["metadata"].get("labels", {})
    for part in re.split(r",(?![^(]*\))", selector):
        listed = re.fullmatch(r"\s*(\S+) (in|notin) \((.*)\)\s*", part)
        if listed:
            key, word, values = listed.groups()
            is_in = labels.get(key) in [v.strip() for v in values.split(",")]
            if is_in != (word == "in"):
                return False
        else:
            key, word, value = re.split(r"(!?==?)", part, maxsplit=1)
            if (labels.get(key.strip()) == value.strip()) == word.startswith("!"):
                return False
    return True


def a_pod(name: str, address: str, uid: str = "", **facts: Any) -> Pod:
    """A Ready pod at `host:port`.

    Facts: labels, annotations, ready, created, terminating, phase.
    """
    host, _, port = address.rpartition(":")
    annotations = {"fleet.vllm.ai/port": port} | facts.get("annotations", {})
    meta: dict[str, Any] = {
        "name": name,
        "uid": uid or f"uid-of-{name}",
        "creationTimestamp": facts.get("created", "2026-01-01T00:00:00Z"),
        "labels": {"app": "vllm"} | facts.get("labels", {}),
        "annotations": annotations,
    }
    if facts.get("terminating"):
        meta["deletionTimestamp"] = "2026-01-01T01:00:00Z"
    ready = {"type": "Ready", "status": "True" if facts.get("ready", True) else "False"}
    status = {"phase": facts.get("phase", "Running"), "podIP": host, "conditions": [ready]}
    return {"kind": "Pod", "metadata": meta, "status": status}


def _status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "code": code, "message": message}
    return web.json_response(body, status=code)


async def _event(answer: web.StreamResponse, kind: str, told: Any) -> None:
    line = json.dumps({"type": kind, "object": told}, ensure_ascii=False)
    await answer.write(line.encode() + b"\n")


@asynccontextmanager
async def fake_api(**facts: Any) -> AsyncGenerator[FakeApi]:
    """Serve until the context is left."""
    api = FakeApi(**facts)
    await api.come_back()
    try:
        yield api
    finally:
        if api._runner is not None:
            await api.go_away()
