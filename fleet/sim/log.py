"""What a replica saw: control calls in order, bodies as they came, and what answered each rollout.

Tests assert from here, the replica's own point of view. Nothing is interpreted.
"""

import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any

_ROLLOUTS_KEPT = 20_000


@dataclass
class ControlCall:
    """One control call; times from the monotonic clock and, `_wall`, since the epoch, in s.

    `t_end` and `status` stay None while the call runs, and for good if it never got an answer.
    `body` is the parsed JSON, or the text if it was none.
    """

    method: str
    path: str
    query: dict[str, list[str]]
    body: Any
    headers: dict[str, str]
    boot: int
    t_start: float = field(default_factory=time.monotonic)
    t_start_wall: float = field(default_factory=time.time)
    t_end: float | None = None
    t_end_wall: float | None = None
    status: int | None = None

    def end(self, status: int) -> None:
        """Note the answer."""
        self.t_end, self.t_end_wall, self.status = time.monotonic(), time.time(), status


@dataclass
class RolloutRecord:
    """One rollout: the weights and version that made its last token, and how it ended.

    `outcome` is ``finished``, ``aborted``, ``cancelled`` (the client hung up), ``killed`` (the
    engine died) or ``refused``.
    """

    path: str
    request_id: str
    outcome: str
    tokens: int
    version: str
    checksum: str
    kv: str
    t_start: float
    t_end: float = field(default_factory=time.monotonic)


class SimLog:
    """The log of one replica over all its boots."""

    def __init__(self) -> None:
        self.control: list[ControlCall] = []
        self.rollouts: deque[RolloutRecord] = deque(maxlen=_ROLLOUTS_KEPT)
        self.outcomes: Counter[str] = Counter()

    def calls(self, path: str) -> list[ControlCall]:
        """The control calls of one path, in order of arrival."""
        return [call for call in self.control if call.path == path]

    def paths(self) -> list[str]:
        """The paths of all state-changing control calls (POST), in order of arrival."""
        return [call.path for call in self.control if call.method == "POST"]

    def bodies(self, path: str) -> list[Any]:
        """The bodies received on one path."""
        return [call.body for call in self.calls(path)]

    def add_rollout(self, record: RolloutRecord) -> None:
        """Note one rollout that is over."""
        self.rollouts.append(record)
        self.outcomes[record.outcome] += 1

    def clear(self) -> None:
        """Forget everything."""
        self.control.clear()
        self.rollouts.clear()
        self.outcomes.clear()

    def as_json(self) -> dict[str, Any]:
        """The whole log for GET /sim/log."""
        return {
            "control": [asdict(call) for call in self.control],
            "rollouts": [asdict(record) for record in self.rollouts],
        }
