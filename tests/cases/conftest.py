"""A gateway in front of a simulated fleet, and the words in which the cases are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from fleet.sim import SimFleet, SimOptions, SimReplica
from fleet.sim.log import ControlCall
from gateway.context import Gateway
from gateway.settings_model import Settings, Timeouts
from tests.gateway.serving import Served, serve
from tests.waiting import wait_until

NAMES = ("embed", "layer.0", "layer.1", "head")
INIT = "/init_weight_transfer_engine"
START = "/start_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"
ROUND = (START, UPDATE, FINISH)


def fast(**times: float) -> Timeouts:
    """Return timeouts whose probes come often enough for a test to wait for what they see."""
    return Timeouts(**({"probe_s": 0.2} | times))


class Seen(Protocol):
    """A gateway, in this process or another: what a Case needs of it."""

    @property
    def url(self) -> str: ...
    @property
    def http(self) -> httpx.AsyncClient: ...
    async def fleet(self) -> dict[str, Any]: ...
    async def states(self) -> dict[str, str]: ...


@dataclass
class Case:
    """A gateway and the replicas behind it, seen from both ends."""

    sim: SimFleet
    served: Seen

    @property
    def gateway(self) -> Gateway:
        """The parts of a gateway that runs in this process."""
        assert isinstance(self.served, Served)
        return self.served.gateway

    @property
    def http(self) -> httpx.AsyncClient:
        """A client of the gateway."""
        return self.served.http

    @property
    def replicas(self) -> list[SimReplica]:
        """The simulated replicas."""
        return self.sim.replicas

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """POST to the gateway, with a JSON body unless there is none."""
        return await self.http.post(path, json=body, **more)

    async def ok(self, path: str, body: Any = None) -> Any:
        """POST to the gateway and return the JSON of its 200."""
        answer = await self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    # -- a trainer without a data plane (backends that move no data in the simulator) -------------

    async def init(self, world_size: int | None = None, base: int = 1) -> httpx.Response:
        """Init a group; None asks for the number first, as TRL does."""
        if world_size is None:
            world_size = base + (await self.http.get("/get_world_size")).json()["world_size"]
        info = {
            "master_address": "127.0.0.1",
            "master_port": 29500,
            "rank_offset": base,
            "world_size": world_size,
        }
        return await self.post(INIT, {"init_info": info})

    async def start(self) -> httpx.Response:
        """Start an update."""
        return await self.post(START)

    async def update(self, names: Sequence[str] = NAMES) -> httpx.Response:
        """Send one chunk that names these tensors."""
        return await self.post(UPDATE, update_of(names))

    async def finish(self, version: str | None = None) -> httpx.Response:
        """Finish an update, with the trainer's own label or without."""
        return await self.post(FINISH, None if version is None else {"weight_version": version})

    async def sync(self, version: str | None = None, names: Sequence[str] = NAMES) -> None:
        """One whole round, each step of which must succeed."""
        for answer in (await self.start(), await self.update(names), await self.finish(version)):
            assert answer.status_code == 200, answer.text

    async def first_sync(self, version: str | None = None) -> None:
        """Init and one whole round."""
        answer = await self.init()
        assert answer.status_code == 200, answer.text
        await self.sync(version)

    # -- rollouts ---------------------------------------------------------------------------------

    async def complete(
        self, prompt: str = "hello", max_tokens: int = 4, **headers: str
    ) -> httpx.Response:
        """One completion through the gateway."""
        body = {"prompt": prompt, "max_tokens": max_tokens}
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return await self.post("/v1/completions", body, headers=named)

    async def complete_directly(
        self, replica: SimReplica, prompt: str, max_tokens: int = 1
    ) -> dict[str, Any]:
        """One completion behind the gateway's back."""
        url = f"{replica.url}/v1/completions"
        answer = await self.http.post(url, json={"prompt": prompt, "max_tokens": max_tokens})
        return answer.json()

    # -- what can be seen --------------------------------------------------------------------------

    async def version(self) -> str:
        """The version that /weight_info gives."""
        return (await self.http.get("/weight_info")).json()["weight_version"]

    async def fleet(self) -> dict[str, Any]:
        """GET /fleet."""
        return await self.served.fleet()

    async def states(self) -> list[str]:
        """The state of each replica, in order."""
        found = await self.served.states()
        return [found[replica.id] for replica in self.replicas if replica.id in found]

    async def await_states(self, *expected: str, timeout_s: float = 10.0) -> None:
        """Wait until the replicas are in these states, in order."""

        async def reached() -> bool:
            return await self.states() == list(expected)

        try:
            await wait_until(reached, timeout_s=timeout_s)
        except TimeoutError:
            found = (await self.http.get("/fleet/replicas")).json()["replicas"]
            told = [(r["state"], r["reason"]) for r in found]
            raise AssertionError(f"expected {expected}, found {told}") from None

    async def await_nobody(self, state: str) -> None:
        """Wait until no replica is in this state."""

        async def reached() -> bool:
            return state not in await self.states()

        await wait_until(reached)

    async def await_held(self, count: int) -> None:
        """Wait until so many rollouts are held at the gate."""

        async def reached() -> bool:
            return (await self.fleet())["gate"]["held"] == count

        await wait_until(reached)

    async def rounds(self) -> list[dict[str, Any]]:
        """GET /fleet/rounds, newest first."""
        return (await self.http.get("/fleet/rounds")).json()["rounds"]

    def forget_logs(self) -> None:
        """Empty every replica's log."""
        for replica in self.replicas:
            replica.log.clear()

    def sent(self, index: int) -> list[str]:
        """The state-changing control calls that one replica got, in order."""
        return self.replicas[index].log.paths()

    def all_sent(self) -> list[list[str]]:
        """The same for every replica."""
        return [replica.log.paths() for replica in self.replicas]


def posts(replica: SimReplica, path: str) -> list[ControlCall]:
    """The POSTs that a replica got on one path; probing asks for the same paths with GET."""
    return [call for call in replica.log.calls(path) if call.method == "POST"]


def update_of(names: Sequence[str] = NAMES) -> dict[str, Any]:
    """The body of an update that names these tensors."""
    shapes, dtypes = [[1] for _ in names], ["float32" for _ in names]
    return {"update_info": {"names": list(names), "dtype_names": dtypes, "shapes": shapes}}


@asynccontextmanager
async def case_of(
    options: SimOptions | None = None, *, asgi_only: bool = False, **settings: Any
) -> AsyncGenerator[Case]:
    """Serve a fleet of three replicas that move no data, unless the options say otherwise."""
    options = options or SimOptions(replicas=3, backend="nccl")
    async with SimFleet(options) as sim:
        settings = {"replicas": tuple(sim.urls), "timeouts": fast()} | settings
        async with serve(Settings(**settings), asgi_only=asgi_only) as served:
            yield Case(sim, served)


def nccl(replicas: int = 3, **fields: Any) -> SimOptions:
    """Options of a fleet whose collectives need no trainer."""
    chosen: dict[str, Any] = {"replicas": replicas, "backend": "nccl"} | fields
    return SimOptions(**chosen)


def outcomes_of(answer: httpx.Response) -> dict[str, str]:
    """The outcome words of an answer, by replica."""
    return {replica: told["outcome"] for replica, told in answer.json()["replicas"].items()}


def check_error(answer: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    """Check an error's status and shape, and that it says these words; return its body."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error", "replicas", "hint"}
    assert set(body["error"]) == {"message", "type", "code"}
    assert body["error"]["code"] == status
    for outcome in body["replicas"].values():
        assert set(outcome) == {"outcome", "status", "detail", "elapsed_s"}
    told = f"{body['error']['message']} {body['hint']}"
    for word in words:
        assert word in told, told
    return body


async def all_of(calls: Iterable[Any]) -> list[Any]:
    """Run these calls at once and return their results in order."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]
