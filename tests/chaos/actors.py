"""Who uses the fleet during a chaos run: a trainer that never gives up, and clients of rollouts.

The trainer behaves as stock ones do: a call whose connection broke is repeated, elsewhere; 503 is
repeated; everything else is taken at its word: what the hint says is done.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from random import Random
from time import monotonic
from typing import Any

import httpx

from fleet.sim.weights import build_state_dict, combine_workers, replica_checksum
from tests.cases.conftest import FINISH, INIT, NAMES, START, UPDATE, update_of
from tests.chaos.field import DEADLINE_S, HELD_S, Field, Place
from tests.chaos.history import Called, Made, Rollout

RESET = "/fleet/reset"
HIDDEN = 4
REPEATS = 6
IMPATIENCE_S = 0.1
"""How long the trainer waits before it repeats what may be repeated, or inits again."""


class Trainer:
    """Continuous rounds; each sends weights that no other round has sent, labelled with a number.

    `begin_round` is called before each round; `committed` counts those that ended well.
    """

    def __init__(self, field: Field, random: Random, begin_round: Callable[[int], None]) -> None:
        self._field = field
        self._random = random
        self._begin_round = begin_round
        self._place: Place | None = None
        self._is_in_group = False
        self.rounds = 0
        self.committed = 0
        self.version = 0

    async def train(self, rounds: int) -> None:
        """Run rounds until so many have begun."""
        while self.rounds < rounds:
            if not self._is_in_group and not await self._init():
                await asyncio.sleep(IMPATIENCE_S)
                continue
            self.rounds += 1
            self._begin_round(self.rounds)
            self._is_in_group = await self._round()
            self.committed += self._is_in_group

    def forget(self) -> None:
        """Be another process: know of no group, and of no gateway either."""
        self._is_in_group, self._place = False, None

    async def _init(self) -> bool:
        size = await self._world_size()
        if size is None:
            return False
        info = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1}
        status, told = await self._call(INIT, {"init_info": info | {"world_size": size}})
        if status == 409 and RESET in told:
            await self._call(RESET, None)
        return status == 200

    async def _round(self) -> bool:
        self.version += 1
        version = str(self.version)
        self._field.history.weights[version] = checksum_of(self.version)
        update = update_of(NAMES)
        update["update_info"]["sim_seed"] = self.version
        steps = ((START, None), (UPDATE, update), (FINISH, {"weight_version": version}))
        for path, body in steps:
            status, told = await self._call(path, body)
            if status != 200 and "go on with the next call" not in told:
                return False
        return True

    async def _world_size(self) -> int | None:
        place = self._somewhere()
        if place is None or place.http is None:
            return None
        try:
            answer = await place.http.get("/get_world_size", timeout=DEADLINE_S)
            return 1 + answer.json()["world_size"] if answer.status_code == 200 else None
        except httpx.HTTPError:
            self._place = None
            return None

    async def _call(self, path: str, body: Any) -> tuple[int | None, str]:
        """Make a call, and repeat it where that is what a stock client does."""
        status, told = None, ""
        for _ in range(REPEATS):
            place = self._somewhere()
            if place is None or place.http is None:
                await asyncio.sleep(IMPATIENCE_S)
                continue
            status, told = await self._call_at(place, place.http, path, body)
            if status is None:
                self._place = None
            elif status != 503:
                break
            await asyncio.sleep(IMPATIENCE_S)
        return status, told

    async def _call_at(
        self, place: Place, http: httpx.AsyncClient, path: str, body: Any
    ) -> tuple[int | None, str]:
        began, status, told = monotonic(), None, ""
        try:
            answer = await http.post(path, json=body, timeout=DEADLINE_S + 1)
            status, told = answer.status_code, answer.text
        except httpx.HTTPError as error:
            told = repr(error)
        self._field.history.calls.append(
            Called(
                gateway=place.name,
                path=path,
                began=began,
                ended=monotonic(),
                deadline_s=DEADLINE_S,
                status=status,
                error="" if status == 200 else told,
            )
        )
        return status, told

    def _somewhere(self) -> Place | None:
        """Stay with one gateway until it fails."""
        if self._place is None or self._place.http is None:
            up = [place for place in self._field.places if place.http is not None]
            self._place = self._random.choice(up) if up else None
        return self._place


async def ask_for_rollouts(field: Field, random: Random, goes_on: Callable[[], bool]) -> None:
    """Be one client: the next rollout, whole or streamed, at any gateway, after the last one."""
    while goes_on():
        up = [(place.name, place.http) for place in field.places if place.http is not None]
        if not up:
            await asyncio.sleep(0.05)
            continue
        name, http = random.choice(up)
        field.history.rollouts.append(await _rollout(name, http, random))
        await asyncio.sleep(random.uniform(0, 0.1))


async def _rollout(name: str, http: httpx.AsyncClient, random: Random) -> Rollout:
    is_stream = random.random() < 0.4
    body = {
        "prompt": f"hello {random.randrange(10_000)}",
        "max_tokens": random.choice([1, 4, 16, 64]),
        "stream": is_stream,
    }
    began = monotonic()
    try:
        answer = await http.post("/v1/completions", json=body, timeout=HELD_S + 15)
    except httpx.HTTPError as error:
        return Rollout(gateway=name, began=began, ended=monotonic(), status=None, error=repr(error))
    made, broken, error = _read(answer, is_stream=is_stream)
    return Rollout(
        gateway=name,
        began=began,
        ended=monotonic(),
        status=answer.status_code,
        label=answer.headers.get("X-Weight-Version"),
        end_label=answer.headers.get("X-Weight-Version-End"),
        replica=answer.headers.get("X-Fleet-Replica"),
        made=made,
        is_stream=is_stream,
        broken=broken,
        error=error,
    )


def _read(answer: httpx.Response, *, is_stream: bool) -> tuple[tuple[Made, ...], bool, str]:
    """Return who made the tokens, whether the answer tells of its own failure, and how."""
    if answer.status_code != 200:
        return (), False, answer.text
    if not is_stream:
        return _made(answer.json()), False, ""
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    events: list[Any] = [json.loads(line) for line in lines]
    last = next((event for event in reversed(events) if "sim" in event), None)
    if last is not None:
        return _made(last), False, ""
    return (), True, lines[-1] if lines else "an empty stream"


def _made(body: dict[str, Any]) -> tuple[Made, ...]:
    spans = body["sim"]["choices"][0]["spans"]
    return tuple(Made(version=span["version"], checksum=span["checksum"]) for span in spans)


def checksum_of(seed: int) -> str:
    """Return the checksum that a replica says of weights made from this seed."""
    return combine_workers([replica_checksum(build_state_dict(seed, HIDDEN))])
