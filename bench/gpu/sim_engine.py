"""A trainer engine for `--dry-run`: vLLM's calls in vLLM's order, over gloo, without vLLM."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from bench.gpu.models import Weights
from bench.gpu.processes import free_port
from fleet.backends.gloo_group import GlooError, GlooGroup, join_group
from fleet.sim.trainer import describe

TIMEOUT_S = 30.0


class SimEngine:
    """Rank 0 of a group with simulated workers."""

    def __init__(self, client: Any, weights: Weights, world_size: int) -> None:
        self.client = client
        self.weights = weights
        self._sent_meta: Any = None
        self.model_update_group = self._meet(world_size)

    def send_weights(self, *payload: Any) -> None:
        """One round; what it is given stands for the weights that are held."""
        del payload
        declared = describe(self.weights.tensors())
        self.client.start_weight_update()
        info = {key: [] for key in declared} if declared == self._sent_meta else declared
        group = self.model_update_group
        answer = _beside(lambda: self.client.update_weights(info), group)
        try:
            for tensor in self.weights.tensors().values():
                group.broadcast(tensor, src=0)
        except GlooError:
            answer.result(10)
            raise
        answer.result()
        self.client.finish_weight_update()
        self._sent_meta = declared

    def shutdown(self) -> None:
        """Leave the group."""
        self.model_update_group.close()

    def _meet(self, world_size: int) -> GlooGroup:
        port, refused = free_port(), threading.Event()
        body = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
        }
        answer = _beside(lambda: self.client.init_weight_transfer_engine(body), refused)
        try:
            group = join_group(
                "127.0.0.1", port, 0, world_size, timeout_s=TIMEOUT_S, cancelled=refused
            )
        except GlooError:
            answer.result(10)
            raise
        answer.result()
        return group


def _beside(call: Any, on_failure: GlooGroup | threading.Event) -> Future[None]:
    answer: Future[None] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # carried to the trainer's thread
            answer.set_exception(error)
            if isinstance(on_failure, threading.Event):
                on_failure.set()
            else:
                on_failure.close()

    threading.Thread(target=run, daemon=True).start()
    return answer
