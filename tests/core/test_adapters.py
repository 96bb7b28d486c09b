"""When a replica that refuses to load or unload an adapter has what was asked for already."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleet.facts.outcome import Outcome, Result
from fleet.rules.adapters import Wish, excused, in_question, wish_of

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
OK = Outcome(outcome=Result.OK, status=200, answer="Success")
REFUSED = Outcome(outcome=Result.FAILED, status=400, detail="has already been loaded")
UNKNOWN = Outcome(outcome=Result.FAILED, status=404, detail="cannot be found")
BROKEN = Outcome(outcome=Result.FAILED, status=500, detail="out of memory")
LOST = Outcome(outcome=Result.UNREACHABLE)
SKIPPED = Outcome(outcome=Result.SKIPPED)


def wish(path: str, **body: Any) -> Wish | None:
    """What a call with this body wants."""
    return wish_of(path, json.dumps(body).encode())


def models(*cards: Any) -> Outcome:
    """A replica's list of models."""
    base = {"id": "m", "root": "/m", "parent": None}
    return Outcome(outcome=Result.OK, status=200, answer={"data": [base, *cards]})


def card(name: str, root: str) -> dict[str, Any]:
    """An adapter in that list."""
    return {"id": name, "root": root, "parent": "m"}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (LOAD, {"lora_name": "a", "lora_path": "/a"}, Wish("a", "/a")),
        (LOAD, {"lora_name": "a", "lora_path": "/a", "load_inplace": False}, Wish("a", "/a")),
        (LOAD, {"lora_name": "a", "lora_path": "/a", "load_inplace": True}, None),
        (LOAD, {"lora_name": "a"}, None),
        (LOAD, {"lora_path": "/a"}, None),
        (UNLOAD, {"lora_name": "a"}, Wish("a", None)),
        (UNLOAD, {"lora_name": ["a"]}, None),
        (UNLOAD, {}, None),
    ],
)
def test_a_call_wishes_what_a_list_of_models_can_show(
    path: str, body: dict[str, Any], expected: Wish | None
) -> None:
    """Loading in place shows nowhere, and what vLLM refuses as malformed is no wish."""
    assert wish(path, **body) == expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([OK, REFUSED], True),
        ([OK, UNKNOWN, SKIPPED], True),
        ([REFUSED, REFUSED], False),
        ([SKIPPED, REFUSED], False),
        ([OK, REFUSED, BROKEN], False),
        ([OK, REFUSED, LOST], False),
        ([OK, OK], False),
    ],
)
def test_a_refusal_is_in_question_only_beside_one_that_did_it(
    outcomes: list[Outcome], expected: bool
) -> None:
    """Where nobody did anything, or something broke, the call has failed."""
    assert in_question({str(n): outcome for n, outcome in enumerate(outcomes)}) is expected


@pytest.mark.parametrize(
    ("told", "is_loaded", "is_unloaded"),
    [
        (models(card("a", "/a")), True, False),
        (models(card("a", "/other")), False, False),
        (models(card("b", "/a")), False, True),
        (models({"id": "a", "root": "/a", "parent": None}), False, False),
        (models(), False, True),
        (Outcome(outcome=Result.OK, status=200, answer=[]), False, False),
        (Outcome(outcome=Result.OK, status=200, answer={"data": None}), False, False),
        (Outcome(outcome=Result.FAILED, status=404), False, False),
        (None, False, False),
    ],
)
def test_only_a_list_that_shows_it_excuses_a_refusal(
    told: Outcome | None, is_loaded: bool, is_unloaded: bool
) -> None:
    """By name and path; who lists nothing that can be read has shown nothing."""
    listed = {"x": models(), "y": told} if told else {"x": models()}
    for asked, expected in ((Wish("a", "/a"), is_loaded), (Wish("a", None), is_unloaded)):
        done = excused({"x": OK, "y": REFUSED}, listed, asked)
        assert done["x"] == OK
        assert (done["y"].ok, done["y"].detail) == (expected, REFUSED.detail)
