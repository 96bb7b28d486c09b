"""Patches between two sets of weights, without vLLM and without a wire."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fleet.backends.sparse_patches import changed_entries, check_patch, patched

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]


@example(bits=[(0x0000, 0x8000), (0x7FC1, 0x7FC1), (0x7FC1, 0x7FC2)], dtype=torch.bfloat16)
@given(
    bits=st.lists(st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)), min_size=1),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_a_patch_leads_exactly_from_one_tensor_to_the_other(
    bits: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Bit for bit: minus zero, infinities and NaN included, and nothing more than what differs."""
    before, after = (
        torch.tensor([pair[i] for pair in bits], dtype=torch.int32).to(torch.int16).view(dtype)
        for i in (0, 1)
    )
    changed = changed_entries(before, after)
    if changed is None:
        assert all(old == new for old, new in bits)
        return
    indices, values = changed
    assert indices.tolist() == [i for i, (old, new) in enumerate(bits) if old != new]
    result = patched(before, indices, values)
    assert torch.equal(result.view(torch.int16), after.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_and_shape_can_be_patched(dtype: torch.dtype) -> None:
    """The original stays as it is; the shape stays too, also of a view."""
    before = torch.arange(12.0).reshape(3, 4).t().to(dtype)
    after = before.clone()
    after[2, 1] = 100.0
    changed = changed_entries(before, after)
    assert changed is not None
    assert (changed[0].dtype, changed[0].tolist()) == (torch.int32, [2 * 3 + 1])
    result = patched(before, *changed)
    assert torch.equal(result.float(), after.float())
    assert before[2, 1].float() == 6.0


def test_weights_of_another_shape_or_dtype_are_no_patch_away() -> None:
    """They need a full update."""
    with pytest.raises(ValueError, match="no patch leads there"):
        changed_entries(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="no patch leads there"):
        changed_entries(torch.zeros(3), torch.zeros(3).half())


@pytest.mark.parametrize(
    ("indices", "values", "words"),
    [
        ([0, 6], [1.0, 1.0], "leave the shape"),
        ([-1], [1.0], "leave the shape"),
        ([2, 2], [1.0, 1.0], "patched twice"),
        ([2], [float("nan")], "NaN"),
        ([2, 3], [1.0], "as many values as indices"),
    ],
)
def test_what_vllm_would_refuse_is_refused_by_name(
    indices: list[int], values: list[float], words: str
) -> None:
    """On both ends, before anything has changed."""
    with pytest.raises(ValueError, match=f"w: .*{words}"):
        check_patch("w", (2, 3), torch.tensor(indices, dtype=torch.int32), torch.tensor(values))


def test_integers_cannot_be_patched_and_no_entries_are_fine() -> None:
    """vLLM marks what stays by NaN, which integers lack."""
    index = torch.tensor([0], dtype=torch.int32)
    with pytest.raises(ValueError, match="only floating"):
        check_patch("w", (2,), index, torch.tensor([1]))
    check_patch("w", (2,), index[:0], torch.zeros(0))
