"""LoRA adapters: when a replica's refusal means that it has what was asked for already.

A replica that was restarted has lost its adapters. To load them again is refused by those that have
them, and to unload them by it (vllm/entrypoints/openai/models/serving.py, 0.32), so the one call
would never succeed on all. What is so at a replica, its own list of models says, in every version's
words alike.

What it does not do: remember adapters. A call that nobody had to carry out stays refused, as by one
server: whoever has written new weights to an old path must not hear that they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from fleet.facts.outcome import Outcome, Result

Outcomes = Mapping[str, Outcome]


class Wish(msgspec.Struct, frozen=True):
    """An adapter that is to be there from this path, or not to be there (None)."""

    name: str
    path: str | None


def wish_of(path: str, body: bytes) -> Wish | None:
    """Return what a call to /v1/load_lora_adapter or /v1/unload_lora_adapter wants to be so.

    None if no list of models could tell: `load_inplace` loads what is there once more.
    """
    asked: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    name, source = asked.get("lora_name"), asked.get("lora_path")
    if not isinstance(name, str) or asked.get("load_inplace"):
        return None
    if "unload" in path:
        return Wish(name, None)
    return Wish(name, source) if isinstance(source, str) else None


def in_question(outcomes: Outcomes) -> bool:
    """Whether all that went wrong is refusals, and another replica did what was asked."""
    bad = [outcome for outcome in outcomes.values() if outcome.bad]
    refused = all(400 <= (outcome.status or 0) < 500 for outcome in bad)
    return bool(bad) and refused and any(outcome.ok for outcome in outcomes.values())


def excused(outcomes: Outcomes, models: Outcomes, wish: Wish) -> dict[str, Outcome]:
    """Return the outcomes, done where a replica's models (GET /v1/models) say that it is so."""
    return {
        replica: msgspec.structs.replace(outcome, outcome=Result.OK)
        if outcome.bad and replica in models and _is_so(wish, models[replica])
        else outcome
        for replica, outcome in outcomes.items()
    }


def _is_so(wish: Wish, models: Outcome) -> bool:
    """Whether a replica that lists these models has what is wished; its word must be complete."""
    answer: Any = models.answer if models.ok else None
    cards: Any = cast("dict[str, Any]", answer).get("data") if isinstance(answer, dict) else None
    if not isinstance(cards, list):
        return False
    mine = [c for c in cast("list[Any]", cards) if isinstance(c, dict) and c.get("id") == wish.name]
    if wish.path is None:
        return not mine
    return any(c.get("root") == wish.path and c.get("parent") for c in mine)
