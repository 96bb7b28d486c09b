"""A trainer as vLLM's documentation writes it, around the tiny model.

What it is for: to send known weights through the stock client and factory, to one server or to
a gateway, and to say whether those weights made an answer. It knows nothing of gateways.
"""

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from fleet.backends.gloo import GlooTrainerInitInfo
from tests.e2e.real_vllm import free_port
from tests.e2e.tiny_model import build_model, made_by

BETWEEN_Q_AND_K = 3  # the broadcast of k, in the first layer, which vLLM fuses with q and v


class TinyTrainer:
    """Rank 0 of a joined group; `model` holds what `send` sends."""

    def __init__(self, url: str, world_size: int, *, timeout_s: float = 60.0) -> None:
        """Join with `world_size` − 1 workers behind `url`; blocks until all have met."""
        self.model = build_model(seed=0)
        self.engine: Any = WeightTransferTrainerFactory.trainer_init(
            GlooTrainerInitInfo(
                master_address="127.0.0.1",
                master_port=free_port(),
                world_size=world_size,
                timeout_s=timeout_s,
            ),
            client=HTTPVLLMWeightSyncClient(url),
            source=ModuleSource(self.model),
        )

    def send(self, seed: int) -> None:
        """Take the weights of `seed` and send them with the stock `send_weights()`."""
        self.take(seed)
        self.engine.send_weights()

    def take(self, seed: int) -> None:
        """Take the weights of `seed`; they go out with the next `send_weights()`."""
        with torch.no_grad():
            for mine, new in zip(
                self.model.parameters(), build_model(seed).parameters(), strict=True
            ):
                mine.copy_(new)

    def explains(self, prompt_ids: list[int], tokens: list[int]) -> bool:
        """Whether `tokens` is what the weights now in `model` append greedily to `prompt_ids`."""
        return made_by(self.model, prompt_ids, tokens)


@contextmanager
def joined_trainer(url: str, world_size: int, *, timeout_s: float = 60.0) -> Generator[TinyTrainer]:
    """A `TinyTrainer` that leaves its group at the end."""
    trainer = TinyTrainer(url, world_size, timeout_s=timeout_s)
    try:
        yield trainer
    finally:
        trainer.engine.shutdown()


def at_broadcast(trainer: TinyTrainer, number: int, act: Callable[[], None]) -> None:
    """Let something happen just before the trainer's next broadcast of this number."""
    group = trainer.engine._group
    broadcast, count = group.broadcast, itertools.count(1)

    def eventful(tensor: torch.Tensor, src: int = 0) -> None:
        if next(count) == number:
            act()
        broadcast(tensor, src)

    group.broadcast = eventful
