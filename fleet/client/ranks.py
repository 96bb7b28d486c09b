"""The trainer's own ranks, and how the one that speaks HTTP tells the others what comes next.

Rank 0 is the sender, as everywhere in vLLM's trainer engines; the others never touch the gateway.
What it says travels over a gloo group of the trainer's own, beside the group that trains, so it
disturbs no CUDA stream and a rank that waits for it can neither hang for ever nor outlive a sender
that died.

torch is imported only if there is more than one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

T = TypeVar("T")

TELL_S = 3_600.0
"""How long the others wait for the sender's next word: longer than any phase of an update."""


class SenderFailed(RuntimeError):
    """The sender could not go on; it raises why, this is what the other ranks raise."""


@dataclass(frozen=True)
class Stop:
    """The sender gives up, for this reason."""

    reason: str


class TrainerRanks:
    """One trainer process among its siblings; by default there are none."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    @classmethod
    def of_torch(cls, *, timeout_s: float = TELL_S) -> Self:
        """Return the ranks of torch's default group; call it on all of them, once.

        `timeout_s` bounds every wait for the sender's next word.
        """
        from torch import distributed

        timeout = timedelta(seconds=timeout_s)
        group = distributed.new_group(backend="gloo", timeout=timeout)
        return cls(distributed.get_rank(), distributed.get_world_size(), group)

    @property
    def is_sender(self) -> bool:
        """Whether this rank speaks to the gateway."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is nobody to tell."""
        return self.size == 1

    def tell(self, word: Any) -> None:
        """Let every other rank hear a word; on the sender only."""
        if not self.alone:
            self._broadcast(word)

    def hear(self) -> Any:
        """Return the sender's next word. Raises SenderFailed if it gave up, or is gone."""
        try:
            word = self._broadcast(None)
        except RuntimeError as error:
            raise SenderFailed(f"no word from trainer rank 0: {error}") from error
        if isinstance(word, Stop):
            raise SenderFailed(word.reason)
        return word

    def on_sender(self, work: Callable[[], T]) -> T | None:
        """Do something on the sender, while the others wait for it; None on those.

        If it raises, the others raise SenderFailed instead of going on without it.
        """
        if not self.is_sender:
            self.hear()
            return None
        try:
            done = work()
        except Exception as error:
            self.tell(Stop(f"{type(error).__name__}: {error}"))
            raise
        self.tell(None)
        return done

    def on_all(self, work: Callable[[], T]) -> T:
        """Do something on every rank; if the sender fails, the others' next `hear` says so."""
        try:
            return work()
        except Exception as error:
            if self.is_sender:
                self.tell(Stop(f"{type(error).__name__}: {error}"))
            raise

    def _broadcast(self, word: Any) -> Any:
        from torch import distributed

        words = [word]
        distributed.broadcast_object_list(words, src=0, group=self._group)
        return words[0]
