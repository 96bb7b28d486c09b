"""A trainer engine for `--dry-run`: vLLM's calls in vLLM's order, over gloo, without vLLM."""

from __future__ import annotations

from typing import Any

from bench.gpu.models import Weights
from fleet.backends.gloo_calls import answer_or_breakage, call_beside, meet_workers
from fleet.backends.gloo_group import GlooError
from fleet.sim.trainer import Rendezvous, describe

TIMEOUT_S = 30.0


class SimEngine:
    """Rank 0 of a group with simulated workers."""

    def __init__(self, client: Any, weights: Weights, world_size: int) -> None:
        self.client = client
        self.weights = weights
        self._sent_meta: Any = None
        self.model_update_group = meet_workers(client, Rendezvous(world_size, timeout_s=TIMEOUT_S))

    def send_weights(self, *payload: Any) -> None:
        """One round; what it is given stands for the weights that are held."""
        del payload
        declared = describe(self.weights.tensors())
        self.client.start_weight_update()
        info = {key: [] for key in declared} if declared == self._sent_meta else declared
        group = self.model_update_group
        answer = call_beside(lambda: self.client.update_weights(info), on_failure=group.close)
        try:
            for tensor in self.weights.tensors().values():
                group.broadcast(tensor, src=0)
        except GlooError as error:
            raise answer_or_breakage(answer, error) from error
        answer.result()
        self.client.finish_weight_update()
        self._sent_meta = declared

    def shutdown(self) -> None:
        """Leave the group."""
        self.model_update_group.close()
