"""Rollouts whose prompts start alike share a replica, and so its prefix cache; load is bounded.

What a start is: the first PREFIX_CHARS characters of a text, the first PREFIX_TOKENS token ids, a
conversation up to and including its first message of a user (so all its turns share one). A batch
goes by its first prompt. docs/adr/0011 has the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from gateway.routing import consistent_hash
from gateway.routing.policy import Asked, Policy

PREFIX_CHARS = 1024
PREFIX_TOKENS = 256
"""About as much text: some sixteen blocks of vLLM's prefix cache."""


class _Body(msgspec.Struct, frozen=True):
    """The fields that hold a prompt; each route has one of them."""

    prompt: Any = None
    messages: Any = None
    input: Any = None
    token_ids: Any = None


_DECODER = msgspec.json.Decoder(_Body)
_ENCODER = msgspec.json.Encoder(order="deterministic")  # however a client spells the same JSON


def prefix_of(asked: Asked) -> bytes | None:
    """Return the key: a digest of how the prompt starts, or None if there is no telling."""
    try:
        body = _DECODER.decode(asked.body)
        start = _start(body.prompt or body.messages or body.input or body.token_ids)
        return blake2b(_ENCODER.encode(start), digest_size=16).digest() if start else None
    except (msgspec.MsgspecError, RecursionError):
        return None  # the replica will say what is wrong with it


def _start(prompt: Any) -> Any:
    match prompt:
        case str():
            return prompt[:PREFIX_CHARS]
        case [int(), *_]:
            return prompt[:PREFIX_TOKENS]
        case [dict(), *_]:
            return prompt[: _first_user(prompt) + 1]
        case [str() | list() as first, *_]:
            return _start(first)
        case _:
            return None


def _first_user(messages: Sequence[Any]) -> int:
    roles = (message.get("role") if isinstance(message, dict) else None for message in messages)
    return next((n for n, role in enumerate(roles) if role == "user"), len(messages))


POLICY = Policy(consistent_hash.choose, prefix_of)
