"""What a routing policy is: a pure choice, and what it wants to know of a rollout beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Choose = Callable[[Sequence[str], Mapping[str, int], int, bytes | None], str]
"""(eligible, inflight, turn, key) -> one of the eligible.

`eligible` is never empty; `inflight` has no entry for an idle replica and may have entries for
replicas that are not eligible; `turn` counts dispatches; `key` is what `key_of` gave, else None.
"""


class Asked(Protocol):
    """What a policy may see of a rollout."""

    @property
    def session(self) -> bytes | None:
        """The value of X-Session-Id."""
        ...

    @property
    def body(self) -> bytes | bytearray:
        """The body as it came."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy. `key_of` runs once per rollout, when it arrives; without it nothing runs."""

    choose: Choose
    key_of: Callable[[Asked], bytes | None] | None = None
