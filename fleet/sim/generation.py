"""What the simulated model says: a pure function of weights, cached prefix and prompt.

A real model's next token depends on the weights that compute it and on the keys and values of the
prefix, which an earlier version of the weights may have computed. Both are arguments here, so a
test can say exactly which tokens a replica must give, and stale KV shows as different tokens.

    token i = hash(weights, kv, prompt, choice, i), with kv == weights when all KV is fresh

It does no I/O and knows no engine. Token ids below 256 are prompt bytes, 256 to 511 generated;
each id is the Unicode character of the same number, so text and ids convert both ways.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

VOCAB_SIZE = 512
_FIRST_GENERATED = 256


@dataclass(frozen=True)
class Context:
    """Everything that a choice's tokens depend on, apart from the weights of the moment."""

    prompt: str  # digest of the prompt's tokens
    kv: str  # the checksum of the weights that computed the prefix, or "mixed:…"
    choice: int = 0


def token_at(weights: str, context: Context, index: int) -> int:
    """Token number `index` of an answer computed by weights with this checksum."""
    text = f"{weights}|{context.kv}|{context.prompt}|{context.choice}|{index}"
    return _FIRST_GENERATED + hashlib.blake2b(text.encode(), digest_size=1).digest()[0]


def expected_tokens(
    weights: str,
    prompt: Sequence[int] | str,
    max_tokens: int,
    *,
    kv: str | None = None,
    choice: int = 0,
) -> list[int]:
    """The tokens that a replica with these weights gives; `kv` None means a fresh prefix.

    `weights` is the `sim.checksum` of an answer, or `weights.replica_checksum` of a state dict.
    """
    tokens = encode(prompt) if isinstance(prompt, str) else prompt
    context = Context(prompt_digest(tokens), kv or weights, choice)
    return [token_at(weights, context, index) for index in range(max_tokens)]


def expected_text(weights: str, prompt: str, max_tokens: int) -> str:
    """`expected_tokens` as the text that an answer carries."""
    return decode(expected_tokens(weights, prompt, max_tokens))


def logprob_of(weights: str, context: Context, index: int) -> float:
    """A log-probability for token `index`, as repeatable as the token itself."""
    return -(token_at(weights, context, index + 1_000_003) - _FIRST_GENERATED + 1) / 128


def encode(text: str) -> list[int]:
    """Token ids of a text: a character below 512 is itself, any other its UTF-8 bytes."""
    tokens: list[int] = []
    for character in text:
        code = ord(character)
        tokens.extend([code] if code < VOCAB_SIZE else character.encode())
    return tokens


def decode(tokens: Iterable[int]) -> str:
    """The text of token ids."""
    return "".join(chr(token) for token in tokens)


def prompt_digest(tokens: Sequence[int]) -> str:
    """A short digest of a prompt's tokens."""
    return hashlib.blake2b(repr(list(tokens)).encode(), digest_size=12).hexdigest()


@dataclass
class PrefixCache:
    """Which weights computed the KV of each cached prefix block of `block_size` tokens.

    As in vLLM, only full blocks are cached, a prefix hits as far as its blocks are there without
    a gap, and the prompt's last token is always computed anew. Blocks are never evicted, and
    those of generated tokens are not modelled.
    """

    block_size: int
    blocks: dict[str, str] = field(default_factory=dict)

    def prefill(self, tokens: Sequence[int], weights: str) -> str:
        """Compute a prompt's KV, reusing cached blocks; returns the `kv` of its `Context`."""
        used: list[str] = []
        digest = hashlib.blake2b(digest_size=12)
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            digest.update(repr(tokens[start : start + self.block_size]).encode())
            used.append(self.blocks.setdefault(digest.hexdigest(), weights))
        return combine_kv(used, weights)

    def clear(self) -> None:
        """Forget every block."""
        self.blocks.clear()


def combine_kv(blocks: Sequence[str], weights: str) -> str:
    """One name for the weights that computed these blocks and the rest of the prompt."""
    if all(block == weights for block in blocks):
        return weights
    joined = "|".join([*blocks, weights])
    return "mixed:" + hashlib.blake2b(joined.encode(), digest_size=12).hexdigest()
