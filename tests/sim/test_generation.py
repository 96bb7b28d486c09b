"""The pure model: tokens depend on weights, prefix KV and prompt, and on nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from fleet.sim.generation import (
    PrefixCache,
    combine_kv,
    decode,
    encode,
    expected_tokens,
)

PROMPT = list(range(40))


def test_other_weights_give_other_tokens() -> None:
    """A change of weights shows in the answer."""
    assert expected_tokens("a", PROMPT, 8) != expected_tokens("b", PROMPT, 8)


def test_stale_kv_gives_other_tokens() -> None:
    """Reused KV of old weights shows in the answer."""
    assert expected_tokens("b", PROMPT, 8, kv="mixed:x") != expected_tokens("b", PROMPT, 8)


def test_choices_of_one_prompt_differ() -> None:
    """n samples of a prompt are not n copies."""
    assert expected_tokens("a", PROMPT, 8, choice=1) != expected_tokens("a", PROMPT, 8)


def test_prefix_cached_by_old_weights_is_reused() -> None:
    """New weights on old KV are neither the old nor the new answer."""
    cache = PrefixCache(16)
    assert cache.prefill(PROMPT, "old") == "old"
    assert cache.prefill(PROMPT, "new") == combine_kv(["old", "old"], "new")
    cache.clear()
    assert cache.prefill(PROMPT, "new") == "new"


def test_prompt_shorter_than_a_block_is_never_cached() -> None:
    """Only full blocks are kept, and the last token is always computed anew."""
    cache = PrefixCache(16)
    cache.prefill(PROMPT[:16], "old")
    assert cache.prefill(PROMPT[:16], "new") == "new"


@given(st.lists(st.integers(0, 511), max_size=40))
def test_tokens_survive_text(tokens: list[int]) -> None:
    """Every token id is one character."""
    assert encode(decode(tokens)) == tokens


@given(st.lists(st.integers(0, 255), max_size=60), st.lists(st.integers(0, 255), max_size=60))
def test_shared_prefix_is_all_that_is_shared(first: list[int], second: list[int]) -> None:
    """A prompt that shares no full block with an older one is computed by its own weights."""
    cache = PrefixCache(16)
    cache.prefill(first, "old")
    shares = len(second) > 16 and len(first) > 16 and first[:16] == second[:16]
    assert (cache.prefill(second, "new") == "new") is not shares
