"""Routing policies: pure choices among eligible replicas, and the keys that some of them go by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import permutations
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.exchange import Request
from gateway.routing import POLICIES, consistent_hash, least_inflight, power_of_two, round_robin
from gateway.routing.prefix import PREFIX_CHARS, PREFIX_TOKENS, prefix_of
from gateway.settings_model import RoutingPolicy

HASHING = ("consistent_hash", "prefix")
REPLICAS = [f"10.0.0.{n}:8000" for n in range(16)]
SESSIONS = [f"session-{n}".encode() for n in range(2000)]

names = st.lists(st.sampled_from(REPLICAS), min_size=1, unique=True)
counts = st.dictionaries(st.sampled_from(REPLICAS), st.integers(1, 50))
turns = st.integers(0, 1000)
keys = st.none() | st.binary(max_size=40)
prompts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


def bound(eligible: list[str], inflight: dict[str, int]) -> int:
    """How many requests a replica may have, the next one included: issue 3's formula."""
    return ceil(1.25 * sum(inflight.get(name, 0) for name in eligible) / len(eligible) + 1)


def homes(eligible: list[str]) -> dict[bytes, str]:
    """Where each session goes in an idle fleet."""
    return {key: consistent_hash.choose(eligible, {}, 0, key) for key in SESSIONS}


def key_of(body: bytes | str | dict[str, Any]) -> bytes | None:
    """The prefix key of a body."""
    raw = json.dumps(body).encode() if isinstance(body, dict) else body
    raw = raw.encode() if isinstance(raw, str) else raw
    return prefix_of(Request(b"POST", b"/v1/completions", [], raw))


# -- every policy ----------------------------------------------------------------------------------


def test_every_policy_has_its_name_in_the_settings() -> None:
    """And every name has its policy."""
    assert set(POLICIES) == {policy.value for policy in RoutingPolicy}


@pytest.mark.parametrize("policy", POLICIES)
@given(eligible=names, inflight=counts, turn=turns, key=keys)
def test_every_policy_takes_an_eligible_replica_and_changes_nothing(
    policy: str, eligible: list[str], inflight: dict[str, int], turn: int, key: bytes | None
) -> None:
    """Whatever the key, whoever is busy, and twice the same."""
    before = (list(eligible), dict(inflight))
    chosen = POLICIES[policy].choose(eligible, inflight, turn, key)
    assert chosen in eligible
    assert chosen == POLICIES[policy].choose(eligible, inflight, turn, key)
    assert (eligible, inflight) == before


@pytest.mark.parametrize("policy", ["power_of_two", *HASHING])
@pytest.mark.parametrize("key", [None, b""])
@given(eligible=names, inflight=counts, turn=turns)
def test_a_rollout_without_a_key_goes_by_least_inflight(
    policy: str, key: bytes | None, eligible: list[str], inflight: dict[str, int], turn: int
) -> None:
    """No session, an empty one, or a body that cannot be read."""
    chosen = POLICIES[policy].choose(eligible, inflight, turn, key)
    assert chosen == least_inflight.choose(eligible, inflight, turn)


@dataclass
class Watched:
    """A rollout that counts how often its body is looked at."""

    session: bytes | None = None
    looks: list[int] = field(default_factory=list[int])

    @property
    def body(self) -> bytes:
        """The body as it came."""
        self.looks.append(1)
        return b'{"prompt": "a"}'


@pytest.mark.parametrize("policy", POLICIES)
def test_only_prefix_looks_into_a_body_and_only_once(policy: str) -> None:
    """Bodies are megabytes; nobody else pays for them."""
    asked = Watched()
    read = POLICIES[policy].key_of
    if read is not None:
        read(asked)
    assert len(asked.looks) == (policy == "prefix")


# -- by load ---------------------------------------------------------------------------------------


@given(names, counts, turns)
def test_least_inflight_never_takes_a_busier_one(
    eligible: list[str], inflight: dict[str, int], turn: int
) -> None:
    """Answers differ in length by orders of magnitude, so counts decide, not turns."""
    chosen = least_inflight.choose(eligible, inflight, turn)
    assert inflight.get(chosen, 0) == min(inflight.get(name, 0) for name in eligible)


@given(names)
def test_ties_go_round(eligible: list[str]) -> None:
    """Otherwise the first of an idle fleet would get everything."""
    turns = range(len(eligible))
    assert [least_inflight.choose(eligible, {}, turn) for turn in turns] == eligible
    assert [round_robin.choose(eligible, {eligible[0]: 99}, turn) for turn in turns] == eligible


@pytest.mark.parametrize("count", [2, 3, 7])
def test_power_of_two_takes_the_less_busy_of_every_pair_equally_often(count: int) -> None:
    """All ordered pairs of different replicas, so the busiest never gets anything."""
    eligible = REPLICAS[:count]
    inflight = {name: 10 * n for n, name in enumerate(eligible)}
    draws = (n.to_bytes(8, "big") for n in range(5 * count * (count - 1)))
    chosen = sorted(power_of_two.choose(eligible, inflight, 0, draw) for draw in draws)
    assert chosen == sorted(5 * [min(pair) for pair in permutations(eligible, 2)])


def test_power_of_two_draws_anew_for_each_rollout() -> None:
    """The only randomness is in the key."""
    asked = Watched(session=b"same")
    assert len({power_of_two.draw(asked) for _ in range(100)}) == 100


# -- by session, by prefix -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", HASHING)
@given(
    eligible=names,
    steps=st.lists(st.tuples(st.binary(min_size=1, max_size=1), st.integers(0, 3)), max_size=150),
)
def test_no_replica_is_filled_beyond_the_bound(
    policy: str, eligible: list[str], steps: list[tuple[bytes, int]]
) -> None:
    """Even when few keys make all the load, and rollouts end in between."""
    inflight: dict[str, int] = {}
    running: list[str] = []
    for key, ending in steps:
        limit = bound(eligible, inflight)
        chosen = POLICIES[policy].choose(eligible, inflight, 0, key)
        inflight[chosen] = inflight.get(chosen, 0) + 1
        running.append(chosen)
        assert inflight[chosen] <= limit
        for _ in range(min(max(ending - 1, 0), len(running) - 1)):
            inflight[running.pop(0)] -= 1


@pytest.mark.parametrize("policy", HASHING)
@given(eligible=names, inflight=counts, key=st.binary(min_size=1), turn=turns)
def test_a_session_stays_where_it_is_while_that_replica_has_room(
    policy: str, eligible: list[str], inflight: dict[str, int], key: bytes, turn: int
) -> None:
    """Neither turns nor the load of others move it."""
    choose = POLICIES[policy].choose
    home = choose(eligible, {}, 0, key)
    chosen = choose(eligible, inflight, turn, key)
    has_room = inflight.get(home, 0) < bound(eligible, inflight)
    assert (chosen == home) is has_room


@pytest.mark.parametrize("policy", HASHING)
def test_a_replica_is_filled_up_to_the_bound_before_a_key_spills_over(policy: str) -> None:
    """Exactly: a tighter bound would scatter sessions, a looser one would crowd a replica."""
    eligible, inflight = REPLICAS[:4], dict[str, int]()
    home = POLICIES[policy].choose(eligible, {}, 0, b"key")
    for _ in range(200):
        has_room = inflight.get(home, 0) < bound(eligible, inflight)
        chosen = POLICIES[policy].choose(eligible, inflight, 0, b"key")
        assert (chosen == home) is has_room
        inflight[chosen] = inflight.get(chosen, 0) + 1


@pytest.mark.parametrize("policy", HASHING)
@given(st.permutations(REPLICAS[:6]), st.permutations(REPLICAS[:6]), counts, st.binary(min_size=1))
def test_the_order_of_the_eligible_is_irrelevant(
    policy: str, one: list[str], other: list[str], inflight: dict[str, int], key: bytes
) -> None:
    """Gateways list the same fleet in different orders, and must agree."""
    choose = POLICIES[policy].choose
    assert choose(one, inflight, 0, key) == choose(other, inflight, 5, key)


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_a_replica_that_leaves_moves_its_own_sessions_only(count: int) -> None:
    """About 1/n of them, spread over all that stay; coming back, it gets exactly them again."""
    eligible = REPLICAS[:count]
    before, after = homes(eligible), homes(eligible[1:])
    moved = {key for key in SESSIONS if before[key] != after[key]}
    assert moved == {key for key, home in before.items() if home == eligible[0]}
    assert abs(len(moved) / len(SESSIONS) - 1 / count) < 0.04
    assert {after[key] for key in moved} == set(eligible[1:])


def test_sessions_go_to_the_same_replicas_in_every_interpreter() -> None:
    """Python's own hash differs between processes; several gateways would not agree by it."""
    script = (
        "from gateway.routing.consistent_hash import choose;"
        "print(''.join(choose('abcdefgh', {}, 0, b'%d' % n) for n in range(40)))"
    )
    told = {
        subprocess.check_output(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2")
    }
    here = "".join(consistent_hash.choose("abcdefgh", {}, 0, b"%d" % n) for n in range(40))
    assert told == {here.encode() + os.linesep.encode()}


# -- prefix keys -----------------------------------------------------------------------------------


@given(prompts, prompts, prompts)
def test_texts_that_start_alike_have_one_key(start: str, one: str, other: str) -> None:
    """What follows the first characters does not count."""
    start = (start * PREFIX_CHARS)[:PREFIX_CHARS]
    assert key_of({"prompt": start + one}) == key_of({"prompt": start + other}) is not None


@given(prompts, prompts)
def test_texts_that_start_differently_have_two_keys(one: str, other: str) -> None:
    """And equal ones have one."""
    same = one[:PREFIX_CHARS] == other[:PREFIX_CHARS]
    assert (key_of({"prompt": one}) == key_of({"prompt": other})) is same


@given(st.integers(0, PREFIX_CHARS + 20))
def test_texts_are_compared_up_to_their_limit(position: int) -> None:
    """A difference counts within the start, and only there."""
    one = "abcd" * PREFIX_CHARS
    other = f"{one[:position]}!{one[position + 1 :]}"
    assert (key_of({"prompt": one}) == key_of({"prompt": other})) is (position >= PREFIX_CHARS)


@given(st.integers(0, PREFIX_TOKENS + 20))
def test_token_ids_are_compared_up_to_their_limit(position: int) -> None:
    """A difference counts within the start, and only there."""
    one = list(range(PREFIX_TOKENS + 40))
    other = [*one[:position], 999_999, *one[position + 1 :]]
    same = position >= PREFIX_TOKENS
    for name in ("prompt", "token_ids"):
        assert (key_of({name: one}) == key_of({name: other})) is same


SYSTEM = {"role": "system", "content": "Be brief. " * 400}


@given(prompts, prompts, prompts)
def test_all_turns_of_a_conversation_have_one_key(asked: str, said: str, then: str) -> None:
    """It begins with everything up to its first question, however long that is."""
    first = [SYSTEM, {"role": "user", "content": asked}]
    later = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": then}]
    key = key_of({"messages": first})
    assert key == key_of({"messages": later, "temperature": 1.0}) is not None
    assert (key == key_of({"messages": [SYSTEM, {"role": "user", "content": then}]})) is (
        asked == then
    )


def test_the_spelling_of_the_json_is_irrelevant() -> None:
    """Escapes, spaces and the order of keys differ between clients."""
    message = {"role": "user", "content": [{"type": "text", "text": "Grüße, 世界"}]}
    plain = {"model": "m", "messages": [message]}
    reverse = {"messages": [{"content": message["content"], "role": "user"}], "n": 8}
    spellings = [
        json.dumps(plain),
        json.dumps(plain, ensure_ascii=False),
        json.dumps(reverse, indent=3),
        json.dumps(reverse, separators=(",", ":")),
    ]
    assert len({key_of(spelling) for spelling in spellings} - {None}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": ["a", "b"]}, {"prompt": "a"}),
        ({"prompt": [[1, 2], [3]]}, {"prompt": [1, 2]}),
        ({"input": "a"}, {"prompt": "a"}),
        ({"input": [{"role": "user"}]}, {"messages": [{"role": "user"}]}),
    ],
)
def test_a_batch_goes_by_its_first_prompt(one: dict[str, Any], other: dict[str, Any]) -> None:
    """And the routes' names for the prompt do not matter."""
    assert key_of(one) == key_of(other) is not None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\x1f\x8b\x08",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"messages": [' + b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        *(b'{"prompt": %b}' % value for value in (b'""', b"[]", b"null", b"7", b"{}", b"[null]")),
        b'{"messages": 5}',
        b"{}",
    ],
)
def test_a_body_that_tells_no_prompt_has_no_key(body: bytes) -> None:
    """Its replica says what is wrong with it; least_inflight finds one."""
    assert key_of(body) is None


scalars = st.none() | st.booleans() | st.integers() | st.text()


@given(st.recursive(scalars, st.lists) | st.lists(scalars | st.dictionaries(st.text(), scalars)))
def test_no_json_value_in_place_of_a_prompt_raises(value: Any) -> None:
    """A client may send anything; a key is 16 bytes or none."""
    for name in ("prompt", "messages", "input", "token_ids"):
        assert len(key_of({name: value}) or bytes(16)) == 16
