"""Random weights of a chosen size: on disk for servers to boot from, in memory for the trainer.

Nothing is downloaded. A seed stands for the weights: `take(seed)` makes the same bytes again on the
same kind of device, so a server booted from `save(directory)` tells what they look like inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

VOCABULARY = 512  # of the tokenizer; models have at least as many rows

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"vocab": 512, "hidden": 64, "inner": 128, "layers": 2, "heads": 4, "kv": 2, "dim": 32},
    "1b": {
        "vocab": 32768,
        "hidden": 2048,
        "inner": 5632,
        "layers": 18,
        "heads": 16,
        "kv": 8,
        "dim": 128,
    },
    "8b": {
        "vocab": 32768,
        "hidden": 4096,
        "inner": 12288,
        "layers": 40,
        "heads": 32,
        "kv": 8,
        "dim": 128,
    },
}


class Weights(Protocol):
    """What a trainer sends."""

    def take(self, seed: int) -> None:
        """Hold the weights of this seed."""
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The checkpoint's tensors, in its order."""
        ...

    def save(self, directory: Path) -> Path:
        """Write what is held, as `vllm serve` expects it; returns `directory`."""
        ...


def count(size: str) -> int:
    """The parameters of a model of this size."""
    s = SHAPES[size]
    attention = s["hidden"] * s["dim"] * (2 * s["heads"] + 2 * s["kv"]) + 2 * s["dim"]
    layer = attention + 3 * s["hidden"] * s["inner"] + 2 * s["hidden"]
    return 2 * s["vocab"] * s["hidden"] + s["layers"] * layer + s["hidden"]


def nbytes(weights: Weights) -> int:
    """The bytes that one update moves."""
    return sum(t.numel() * t.element_size() for t in weights.tensors().values())


class Qwen:
    """A Qwen3 model of transformers, in bf16, on a GPU or the CPU."""

    def __init__(self, size: str, device: str) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        s = SHAPES[size]
        config = Qwen3Config(
            vocab_size=s["vocab"],
            hidden_size=s["hidden"],
            intermediate_size=s["inner"],
            num_hidden_layers=s["layers"],
            num_attention_heads=s["heads"],
            num_key_value_heads=s["kv"],
            head_dim=s["dim"],
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        )
        self.device = torch.device(device)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                self.module: Any = Qwen3ForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
        self.module.config.dtype = "bfloat16"
        self.module.requires_grad_(False)

    def take(self, seed: int) -> None:
        """Hold the weights of this seed: norms about 1, everything else small."""
        noise = torch.Generator(self.device).manual_seed(seed)
        for tensor in self.module.parameters():
            drawn = torch.empty(tensor.shape, dtype=torch.bfloat16, device=self.device)
            drawn.normal_(0.0, 0.02, generator=noise)
            tensor.copy_(drawn if tensor.dim() > 1 else drawn + 1.0)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The module's parameters, by name."""
        return dict(self.module.named_parameters())

    def save(self, directory: Path) -> Path:
        """Write config, weights and tokenizer."""
        self.module.save_pretrained(directory)
        save_tokenizer(directory)
        return directory


class SimWeights:
    """The tensors of a simulated replica."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self.take(0)

    def take(self, seed: int) -> None:
        """Hold what a simulated replica of this seed boots with."""
        from fleet.sim.weights import build_state_dict

        self._held = build_state_dict(seed)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The state dict."""
        return self._held

    def save(self, directory: Path) -> Path:
        """Nothing to write: a simulated replica is told its seed."""
        directory.mkdir(parents=True, exist_ok=True)
        return directory


def save_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer of VOCABULARY tokens, trained on a sentence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|bos|>", "<|eos|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a fleet takes new weights together or not at all"], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    ).save_pretrained(directory)


def shake(weights: Weights, seed: int, portion: float) -> None:
    """Change this portion of every tensor's entries."""
    with torch.no_grad():
        for tensor in weights.tensors().values():
            noise = torch.Generator(tensor.device).manual_seed(seed)
            chosen = torch.rand(tensor.shape, generator=noise, device=tensor.device) < portion
            drawn = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
            drawn.normal_(0.0, 0.05, generator=noise)
            tensor.copy_(torch.where(chosen, drawn.to(tensor.dtype), tensor))
