"""Pods by label selector, as the API server knows them: list, then watch, then list again.

A reflector (the way of client-go): list everything, watch for changes from the list's resource
version on, with bookmarks so that this version stays young, and go on from the last one after a
dropped connection. A version that is too old (410), an error inside the watch, and every few
minutes the clock make it list again: whatever was missed, even a lost DELETED, is healed then. The
watch is short, and its reader waits only a little longer than it, so a connection that has silently
died is noticed.

What it does not do: decide anything about replicas (`fleet/rules/roster.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import httpx
import msgspec

from fleet.discovery.api import ApiFailed, ApiServer, asked
from fleet.discovery.base import Tell
from fleet.discovery.patience import Backoff
from fleet.discovery.pods import (
    PodList,
    Pods,
    WatchFailed,
    after_event,
    endpoints_of,
)
from fleet.facts.endpoint import Snapshot

log = logging.getLogger(__name__)

PAGE = 500
TOO_OLD = 410


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often and how patiently to ask, in seconds."""

    watch_s: float = 60.0
    """Length of one watch. The server closes it then, and a new one goes on where it ended."""
    slack_s: float = 15.0
    """How much longer than that a silent connection is believed to be alive."""
    relist_s: float = 300.0
    """Between two lists, less up to a fifth, so that gateways do not ask in step."""
    confirm_s: float = 5.0
    """Before an empty list is asked for again: it counts only if it comes twice."""
    first_retry_s: float = 0.2
    most_retry_s: float = 15.0


class PodSource:
    """Tells the pods of one namespace that carry some labels."""

    def __init__(
        self, api: ApiServer, namespace: str, selector: str, port: int, pace: Pace | None = None
    ) -> None:
        self.name = f"kubernetes {namespace} {selector}"
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._selector = selector
        self._port = port
        self._pace = pace or Pace()
        self._backoff = Backoff(self._pace.first_retry_s, self._pace.most_retry_s)

    async def run(self, tell: Tell) -> None:
        """Tell snapshots for ever; failures are logged, and asked again after a while."""
        while True:
            try:
                async with self._api.client() as client:
                    await self._list_and_watch(client, tell)
            except ApiFailed as error:
                await self._wait_after(error)

    async def _list_and_watch(self, client: httpx.AsyncClient, tell: Tell) -> None:
        """List once, then watch until it is time for the next list, or until there is no other way.

        Raises ApiFailed; a connection that broke is not a reason to list again.
        """
        asked_at, pods = await self._list(client)
        reflection = _Reflection(self.name, self._port, pods, tell)
        reflection.tell_list(asked_at)
        clock = asyncio.get_running_loop().time
        due = clock() + self._pace.relist_s * random.uniform(0.8, 1.0)
        while clock() < due:
            began, version = clock(), reflection.pods.version
            try:
                await self._watch(client, reflection)
            except ApiFailed as error:
                if error.code is not None:
                    raise
                await self._wait_after(error)
                continue
            if reflection.pods.version != version or clock() - began > self._pace.first_retry_s:
                self._backoff.reset()
            else:
                await self._wait_after(ApiFailed("the watch ended at once"))

    async def _list(self, client: httpx.AsyncClient) -> tuple[float, Pods]:
        """Return all pods and the loop's time when they were asked for."""
        clock = asyncio.get_running_loop().time
        asked_at, pods = clock(), await self._list_once(client)
        if not pods.by_name:
            log.info("no pods", extra={"source": self.name})
            await asyncio.sleep(self._pace.confirm_s)
            asked_at, pods = clock(), await self._list_once(client)
        return asked_at, pods

    async def _list_once(self, client: httpx.AsyncClient) -> Pods:
        """Ask for the newest pods (no resource version: a quorum read), page by page."""
        pods = Pods("", {})
        params = {"labelSelector": self._selector, "limit": str(PAGE)}
        while True:
            async with asked(client, self._path, params) as answer:
                page = _decode_list(await answer.aread())
            found = {pod.metadata.name: pod for pod in page.items or ()}
            pods = Pods(page.metadata.resource_version, pods.by_name | found)
            if not page.metadata.continue_:
                return pods
            params["continue"] = page.metadata.continue_

    async def _watch(self, client: httpx.AsyncClient, reflection: _Reflection) -> None:
        """Follow changes until the server ends the watch; ApiFailed if it ends otherwise."""
        length_s = self._pace.watch_s * random.uniform(0.8, 1.0)
        params = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": reflection.pods.version,
            "timeoutSeconds": str(max(1, round(length_s))),
        }
        async with asked(client, self._path, params, length_s + self._pace.slack_s) as answer:
            async for line in _lines(answer):
                reflection.take(line)

    async def _wait_after(self, error: ApiFailed) -> None:
        delay_s = self._backoff.next_s()
        told = {"source": self.name, "error": str(error), "again_in_s": round(delay_s, 1)}
        level = logging.INFO if error.code == TOO_OLD else logging.WARNING
        log.log(level, "discovery has no answer; the fleet stays as it is", extra=told)
        await asyncio.sleep(delay_s)


class _Reflection:
    """The pods known now, and what has been told of them."""

    def __init__(self, source: str, port: int, pods: Pods, tell: Tell) -> None:
        self.pods = pods
        self._source = source
        self._port = port
        self._tell = tell
        self._meant: set[tuple[str | None, ...]] = set()

    def tell_list(self, asked_at: float) -> None:
        """Tell a whole list."""
        self._snapshot(asked_at)

    def take(self, line: bytes) -> None:
        """Take over one line of the watch, and tell it if it means anything to a fleet."""
        try:
            self.pods = after_event(self.pods, line)
        except WatchFailed as error:
            raise ApiFailed(str(error), error.code) from error
        except msgspec.MsgspecError as error:
            raise ApiFailed(f"not a watch event: {error}", 0) from error
        self._snapshot(None)

    def _snapshot(self, asked_at: float | None) -> None:
        found = endpoints_of(self.pods, self._source, self._port)
        meant = {endpoint.meaning for endpoint in found.values()}
        if asked_at is None and meant == self._meant:
            return
        self._meant = meant
        self._tell(Snapshot(source=self._source, endpoints=found, asked_at=asked_at))


def _decode_list(body: bytes) -> PodList:
    try:
        page = msgspec.json.decode(body, type=PodList)
    except msgspec.MsgspecError as error:
        raise ApiFailed(f"not a list of pods: {error}", 0) from error
    if not page.metadata.resource_version:
        raise ApiFailed("not a list of pods: it has no resource version", 0)
    return page


async def _lines(answer: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the lines of a body as they come.

    httpx's own splits at every Unicode line separator, and an annotation may hold one.
    """
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
