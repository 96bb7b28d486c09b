"""One chaos run: a seed and a number of rounds in, a report out."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic

import httpx

from tests.chaos.actors import Trainer, ask_for_rollouts, checksum_of
from tests.chaos.checker import check, written_in_order
from tests.chaos.field import Field, faketime, field_of
from tests.chaos.history import History
from tests.chaos.schedule import Fault, plan

CLIENTS = 6
QUIET_S = 60.0
"""How long a fleet may take to be whole again after the last fault."""


@dataclass(frozen=True)
class Report:
    """What a run covered, and what was wrong."""

    seed: int
    rounds: int
    committed: int
    took_s: float
    faults: Counter[str]
    history: History
    violations: dict[str, list[str]]
    is_whole: bool

    @property
    def is_good(self) -> bool:
        """Whether no rule was broken and the fleet was whole in the end."""
        return self.is_whole and not any(self.violations.values())

    def __str__(self) -> str:
        seen = self.history.rollouts
        good = [r for r in seen if r.status == 200 and not r.broken]
        calls = Counter(str(call.status or "broken") for call in self.history.calls)
        lines = [
            (
                f"seed {self.seed}: {self.rounds} rounds, {self.committed} committed, in "
                f"{self.took_s:.0f} s"
            ),
            f"faults: {sum(self.faults.values())}: {_counted(self.faults)}",
            (
                f"rollouts: {len(seen)}, answered well: {len(good)}, streams among them: "
                f"{sum(r.is_stream for r in good)}, over an update: "
                f"{sum(len(r.made) > 1 for r in good)}"
            ),
            f"control calls: {_counted(calls)}",
            (
                f"states written and seen: {len(self.history.states)}, calls that replicas got: "
                f"{len(self.history.did)}"
            ),
            "clock jumps: " + ("libfaketime" if faketime() else "left out, no libfaketime here"),
            f"whole again in the end: {'yes' if self.is_whole else 'NO'}",
            f"violations: {sum(map(len, self.violations.values()))}",
        ]
        for rule, found in self.violations.items():
            lines.append(f"  {rule}: {len(found)}")
            lines += [f"    {told}" for told in found[:12]]
        return "\n".join(lines)


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{number} x {name}" for name, number in sorted(found.items()))


async def run(seed: int, rounds: int, folder: Path, every: int = 3) -> Report:
    """Run so many rounds with the faults that the seed stands for, and check what was seen."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # replicas whose callers left
    faults: defaultdict[int, list[Fault]] = defaultdict(list)
    for fault in plan(seed, rounds, every):
        faults[fault.round].append(fault)
    began = monotonic()
    async with field_of(folder) as field:
        field.history.weights["default"] = checksum_of(0)
        game = _Game(field, seed, faults)
        await game.play(rounds)
        is_whole = await game.is_whole_again()
        await game.end()
        field.collect()
    field.history.states = written_in_order(field.history.states)
    return Report(
        seed=seed,
        rounds=game.trainer.rounds,
        committed=game.trainer.committed,
        took_s=monotonic() - began,
        faults=Counter(outage.kind for outage in field.history.outages),
        history=field.history,
        violations=check(field.history),
        is_whole=is_whole,
    )


class _Game:
    """The trainer, the clients, and who lets the faults happen."""

    def __init__(self, field: Field, seed: int, faults: dict[int, list[Fault]]) -> None:
        self._field = field
        self._faults = faults
        self._goes_on = True
        self.trainer = Trainer(field, Random(seed + 1), self._begin_round)
        self._training: asyncio.Task[None] | None = None
        self._clients = [
            asyncio.ensure_future(
                ask_for_rollouts(field, Random(seed + 10 + n), lambda: self._goes_on)
            )
            for n in range(CLIENTS)
        ]

    async def play(self, rounds: int) -> None:
        """Train; a trainer that is killed is followed by another one."""
        while self.trainer.rounds < rounds:
            self._training = asyncio.ensure_future(self.trainer.train(rounds))
            with suppress(asyncio.CancelledError):
                await self._training
            self.trainer.forget()
        await self._field.repaired()

    async def is_whole_again(self) -> bool:
        """Whether one more round makes every replica ready again, in time."""
        for replica in self._field.sim.replicas:
            replica.faults.clear()
        try:
            async with asyncio.timeout(QUIET_S):
                while True:
                    await self.trainer.train(self.trainer.rounds + 1)
                    if await self._all_ready():
                        return True
        except TimeoutError:
            return False

    async def end(self) -> None:
        """Let every client have its last answer."""
        self._goes_on = False
        await asyncio.gather(*self._clients)

    async def _all_ready(self) -> bool:
        for place in self._field.places:
            if place.http is None:
                return False
            try:
                fleet = (await place.http.get("/fleet")).json()
            except httpx.HTTPError:
                return False
            ready = fleet["replicas"].get("ready") == len(self._field.sim.replicas)
            if not ready or fleet["weight_version"] != str(self.trainer.version):
                return False
        return True

    def _begin_round(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        for fault in self._faults.get(number, ()):
            loop.call_later(fault.after_s, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        if fault.kind != "trainer killed":
            self._field.strike(fault)
        elif self._training is not None:
            self._field.note(fault.kind, "trainer")
            self._training.cancel()
