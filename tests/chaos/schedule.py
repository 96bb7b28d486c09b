"""What goes wrong and when, drawn from a seed before anything runs: the same seed, the same plan.

A fault hangs on the number of a round and on a moment inside it, not on a clock, so a plan means
the same on a slow machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

PATHS = (
    "/init_weight_transfer_engine",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/resume",
)
KINDS: dict[str, int] = {
    "gateway killed": 5,
    "gateway frozen": 3,
    "gateway clock jumps": 2,
    "replica killed": 4,
    "replica restarted": 3,
    "replica call fails": 6,
    "replica call is slow": 3,
    "replica answer lost": 4,
    "replica hangs": 1,
    "trainer killed": 3,
    "store connections dropped": 4,
    "store slow": 2,
    "store answers lost": 2,
    "store frozen": 1,
    "store killed and back empty": 1,
}
"""Every kind of fault, and how often it comes in comparison."""


@dataclass(frozen=True)
class Fault:
    """One fault: in which round, how long after its begin, what, whom (an index), how long."""

    round: int
    after_s: float
    kind: str
    target: int
    path: str
    seconds: float


def plan(seed: int, rounds: int, every: int = 3) -> list[Fault]:
    """Return the faults of a run, about one in `every` rounds, in order."""
    random = Random(seed)
    return [_draw(random, number) for number in range(2, rounds) if random.randrange(every) == 0]


def _draw(random: Random, number: int) -> Fault:
    kind = random.choices(list(KINDS), weights=list(KINDS.values()))[0]
    return Fault(
        round=number,
        after_s=random.choice([0.0, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15]),
        kind=kind,
        target=random.randrange(12),
        path=random.choice(PATHS),
        seconds=round(random.uniform(0.2, 2.5), 2),
    )
