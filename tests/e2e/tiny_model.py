"""A tiny random Qwen3 model with its tokenizer, built on the spot from a seed.

Why: a real vLLM server needs a model directory, and nothing may be downloaded for a test. The
model is 2 layers of 64, loads in seconds and answers noise, but the same noise each time.

Another seed makes other weights of the same model, so that a sync has something to move;
`made_by` tells from an answer whether given weights made it.

Run as a script it builds a directory: ``python tiny_model.py DIR [SEED]``.
"""

import copy
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 512
MAX_POSITIONS = 4096  # a server is busy with the longest answer for seconds, not an instant
_TIE = 0.5
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}<|assistant|>"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a gateway makes a fleet of servers take new weights together or not at all",
    "one two three four five six seven eight nine ten",
)


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Random bf16 weights; equal seeds give equal bytes. Does not disturb torch's global seed."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        _spread(model)
    return model.to(torch.bfloat16).eval()


def weights(seed: int) -> dict[str, torch.Tensor]:
    """The checkpoint names and tensors of `build_model(seed)`, in the checkpoint's order."""
    return dict(build_model(seed).named_parameters())


def save_model(directory: Path, seed: int = 0) -> Path:
    """Write config, weights and tokenizer as `vllm serve` expects them; returns `directory`."""
    build_model(seed).save_pretrained(directory)
    _build_tokenizer().save_pretrained(directory)
    return directory


def made_by(model: Qwen3ForCausalLM, prompt_ids: list[int], tokens: list[int]) -> bool:
    """Whether `tokens` are what `model`, run by `transformers`, appends greedily to `prompt_ids`.

    Each token must have the best logit or tie with it: in bf16 two implementations prefer another
    of two equals now and then. Measured over 72 prompts: at most 0.06 below the best with the
    right weights, at least 9.4 somewhere with wrong ones.
    """
    exact = copy.deepcopy(model).float()
    with torch.inference_mode():
        logits = exact(torch.tensor([prompt_ids + tokens])).logits[0, len(prompt_ids) - 1 : -1]
    chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    return bool((logits.max(dim=-1).values - chosen).max() < _TIE)


def _spread(model: Qwen3ForCausalLM) -> None:
    """Widen the weights, so that the best token leads clearly."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3 if "lm_head" in name else 0.08)


def _build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|system|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


if __name__ == "__main__":
    save_model(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
