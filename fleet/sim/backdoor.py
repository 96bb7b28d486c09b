"""The control port of a simulated fleet: it answers for replicas that are down.

What a replica's own /sim/ paths do, for any replica by its index, and booting a dead one. One that
is up is not booted a second time: that is a 409, and `restart` is the way.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from fleet.sim.http import answer
from fleet.sim.server import fault_answer, seconds_of

if TYPE_CHECKING:
    from fleet.sim.replica import SimReplica


class ControlPort:
    """A small server beside the replicas; `port` 0 takes a free one."""

    def __init__(self, host: str, port: int, replicas: "Sequence[SimReplica]") -> None:
        self._host = host
        self._port = port
        self._replicas = replicas
        app = web.Application()
        app.add_routes(
            [
                web.get("/replicas", self._list),
                web.get("/replicas/{index}/log", self._log),
                web.delete("/replicas/{index}/log", self._clear_log),
                web.get("/replicas/{index}/stats", self._stats),
                web.get("/replicas/{index}/faults", self._faults),
                web.post("/replicas/{index}/faults", self._add_fault),
                web.delete("/replicas/{index}/faults", self._clear_faults),
                web.post("/replicas/{index}/die", self._die),
                web.post("/replicas/{index}/restart", self._restart),
                web.post("/replicas/{index}/start", self._start),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    def _replica(self, request: web.Request) -> "SimReplica":
        try:
            return self._replicas[int(request.match_info["index"])]
        except (ValueError, IndexError):
            raise web.HTTPNotFound from None

    async def _list(self, _request: web.Request) -> web.Response:
        return answer({"replicas": [replica.as_json() for replica in self._replicas]})

    async def _log(self, request: web.Request) -> web.Response:
        return answer(self._replica(request).log.as_json())

    async def _clear_log(self, request: web.Request) -> web.Response:
        self._replica(request).log.clear()
        return answer({})

    async def _stats(self, request: web.Request) -> web.Response:
        return answer(self._replica(request).stats())

    async def _faults(self, request: web.Request) -> web.Response:
        return answer(self._replica(request).faults.as_json())

    async def _add_fault(self, request: web.Request) -> web.Response:
        return await fault_answer(self._replica(request), request)

    async def _clear_faults(self, request: web.Request) -> web.Response:
        self._replica(request).faults.clear()
        return answer([])

    async def _die(self, request: web.Request) -> web.Response:
        await self._replica(request).die()
        return answer(self._replica(request).as_json())

    async def _restart(self, request: web.Request) -> web.Response:
        await self._replica(request).restart(await seconds_of(request))
        return answer(self._replica(request).as_json())

    async def _start(self, request: web.Request) -> web.Response:
        replica = self._replica(request)
        if replica.alive:
            index = replica.index
            told = f"replica {index} is up; POST /replicas/{index}/restart ends and boots it"
            return answer({"detail": told}, 409)
        await replica.start()
        return answer(replica.as_json())
