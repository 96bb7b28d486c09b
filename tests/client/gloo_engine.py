"""A trainer engine as vLLM's are, for environments without vLLM: same calls, same order, gloo.

`fleet/backends/gloo.py` is the real one; tests/e2e drives it. What is kept here is what an elastic
session relies on: `trainer_init`, `send_weights`, `shutdown`, a client that is called from a
thread beside the collective, other ranks that only walk the source, metadata sent once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fleet.backends.gloo_calls import answer_or_breakage, call_beside, meet_workers
from fleet.backends.gloo_group import GlooError, GlooGroup
from fleet.sim.trainer import Rendezvous, describe
from fleet.sim.weights import build_state_dict, replica_checksum

InitInfo = Rendezvous


class Weights:
    """A source of weights: those of `seed`, of the model that simulated replicas have."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.asked = 0

    @property
    def checksum(self) -> str:
        """What a replica that holds these weights says."""
        return replica_checksum(build_state_dict(self.seed))

    def metadata(self) -> dict[str, Any]:
        self.asked += 1
        return describe(build_state_dict(self.seed))

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from build_state_dict(self.seed).values()


class GlooEngine:
    """One rank's part in one group."""

    def __init__(self, info: InitInfo, client: Any, source: Any) -> None:
        self.info = info
        self.client = client
        self.source = source
        self.group: GlooGroup | None = None
        self.sent: Any = None

    def send_weights(self) -> None:
        declared = self.source.metadata()
        if self.info.rank != 0:
            for _ in self.source:
                pass
            return
        group = self.group
        assert group is not None
        self.client.start_weight_update()
        empty = {key: [] for key in declared}
        info = empty if declared == self.sent else declared
        answer = call_beside(lambda: self.client.update_weights(info), on_failure=group.close)
        try:
            for tensor in self.source:
                group.broadcast(tensor, src=0)
        except GlooError as error:
            raise answer_or_breakage(answer, error) from error
        answer.result()
        self.client.finish_weight_update()
        self.sent = declared

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.close()


def trainer_init(info: InitInfo, *, client: Any, source: Any) -> GlooEngine:
    """Meet the workers, as vLLM's factory does."""
    engine = GlooEngine(info, client, source)
    if info.rank != 0:
        return engine
    engine.group = meet_workers(client, info)
    return engine
