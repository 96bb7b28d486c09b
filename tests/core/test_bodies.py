"""The trainer's bodies: refused with a reason before anything is sent, or passed on as is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import BadInput
from fleet.facts.layout import lay_out
from fleet.rules.bodies import FinishBody, InitBody, UpdateBody, VersionBody, check_version, decode
from tests.fleets import replica

LAYOUT = lay_out([replica("a", 1), replica("b", 2)])


def update(info: object, **more: object) -> UpdateBody:
    """Return the body that a trainer would send."""
    return UpdateBody(json.dumps({"update_info": info, **more}).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"not json",
        b'{"update_info": {"a": }}',
        b'{"update_info": {}} trailing',
        b"\xff\xfe",
        b'{"update_info": {"names": ["a"], "x": "\xff"}}',
        b'{"update_info": {"x": "' + b"a" * 3_000_000 + b'\xc3"}}',
        b'{"update_info": {"names": ["a"]}',
        b'{"update_info": [{}, ]}',
    ],
)
def test_a_body_that_is_not_json_is_bad_input(body: bytes) -> None:
    """The message names the call and says that it is not valid JSON."""
    with pytest.raises(BadInput, match=r"update_weights: the body is not valid JSON"):
        UpdateBody(body)


@pytest.mark.parametrize("size", range(2**20 - 30, 2**20 - 20))
def test_a_character_may_lie_anywhere_in_a_large_body(size: int) -> None:
    """The check for broken characters looks at pieces, and none of them is torn."""
    UpdateBody(b'{"update_info": {"x": "' + b"a" * size + "日".encode() + b'"}}')


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"null", b"5", b'"x"', b'{"other": {}}'])
def test_a_body_without_update_info_is_bad_input(body: bytes) -> None:
    """Whatever else it is."""
    with pytest.raises(BadInput, match="update_weights: "):
        UpdateBody(body)


@pytest.mark.parametrize("info", [None, 5, "x", True, 1.5])
def test_update_info_is_an_object_or_a_list(info: object) -> None:
    """The two forms that vLLM knows."""
    with pytest.raises(BadInput, match="must be an object, or a list"):
        update(info)


@pytest.mark.parametrize("item", [None, 5, "x", [], [{}], True])
def test_every_item_of_a_list_is_an_object(item: object) -> None:
    """A wrong one is found before the first replica hears of it."""
    with pytest.raises(BadInput, match="every item of update_info must be an object"):
        update([{}, item, {}])


@pytest.mark.parametrize("names", [5, "w", {"w": 1}, [5], [None], [["w"]]])
def test_names_are_a_list_of_strings(names: object) -> None:
    """They decide whether a round is full."""
    with pytest.raises(BadInput, match="names must be a list of strings"):
        update({"names": names})


@pytest.mark.parametrize(
    ("info", "names"),
    [
        ({}, None),
        ({"names": None}, None),
        ({"names": []}, []),
        ({"names": ["b", "a", "b"]}, ["a", "b"]),
        ([{}, {}], None),
        ([{"names": ["b"]}, {}, {"names": ["a"]}], ["a", "b"]),
        ([{"names": []}, {}], []),
        ([], None),
    ],
)
def test_names_say_which_tensors_or_as_before_or_nothing(
    info: object, names: list[str] | None
) -> None:
    """None: the body does not speak of names; empty: as in the previous call."""
    assert update(info).names == names


@given(st.binary(max_size=200), st.integers(0, 5))
def test_an_object_goes_to_everyone_as_the_bytes_that_came(padding: bytes, spaces: int) -> None:
    """Key order, spaces and unknown fields included."""
    text = json.dumps({"x": padding.hex(), "update_info": {"z": 1, "a": [1, 2]}, "mode": None})
    body = b" " * spaces + text.encode()
    parsed = UpdateBody(body)
    assert {bytes(parsed.for_slot(LAYOUT, slot)) for slot in LAYOUT.slots} == {body}


def test_a_huge_object_is_kept_in_one_buffer() -> None:
    """Sixty-four replicas must not cost sixty-four copies, nor even one."""
    body = bytearray(json.dumps({"update_info": {"handles": "x" * 5_000_000}}).encode())
    parsed = UpdateBody(body)
    views = [parsed.for_slot(LAYOUT, slot) for slot in LAYOUT.slots]
    assert parsed.size == len(body)
    assert all(isinstance(view, memoryview) for view in views)
    assert views[0] is views[1]
    assert isinstance(views[0], memoryview)
    assert views[0].obj is body


def test_a_list_is_cut_into_one_part_per_unit() -> None:
    """Items travel as they were written, spaces and big numbers included."""
    items = ['{"rank": 0,  "n": 12345678901234567890}', ' {"rank": 1}', '{"rank": [2.50]}']
    parsed = UpdateBody(f'{{"update_info": [{",".join(items)}]}}'.encode())
    parsed.check(LAYOUT)
    parts = [bytes(parsed.for_slot(LAYOUT, slot)) for slot in LAYOUT.slots]
    assert b"12345678901234567890" in parts[0]
    assert b"2.50" in parts[1]
    found: list[Any] = [item for part in parts for item in json.loads(part)["update_info"]]
    assert found == [json.loads(item) for item in items]


@pytest.mark.parametrize("length", [0, 1, 2, 4])
def test_a_list_of_the_wrong_length_is_refused_before_anything_is_sent(length: int) -> None:
    """Three workers, three items."""
    with pytest.raises(BadInput, match=f"list of {length} items, but the group has 3 workers"):
        update([{}] * length).check(LAYOUT)


def test_an_object_needs_no_particular_length() -> None:
    """It is for everyone."""
    update({"a": 1}).check(LAYOUT)


@pytest.mark.parametrize("version", ["1", "v1.0", "!", "~", "a" * 128, "step/17?x=[1]"])
def test_a_version_of_printable_ascii_without_spaces_is_taken(version: str) -> None:
    """Up to 128 characters."""
    check_version(version)


@pytest.mark.parametrize(
    "version", ["", " ", "a b", "a\n", "\t", "é", "версия", "a\x7f", "a\x00", "a" * 129, "１"]
)
def test_any_other_version_is_bad_input(version: str) -> None:
    """It becomes a header and a metric label."""
    with pytest.raises(BadInput, match="1 to 128 printable ASCII characters"):
        check_version(version)


@given(st.text(max_size=140))
def test_a_version_that_is_taken_fits_into_a_header(version: str) -> None:
    """No character that HTTP would have to escape."""
    try:
        check_version(version)
    except BadInput:
        return
    assert 1 <= len(version) <= 128
    assert version.isascii()
    assert version.isprintable()
    assert not set(version) & set(" \t\r\n")


def test_no_version_is_no_error() -> None:
    """The stock client sends none."""
    check_version(None)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (InitBody, b""),
        (InitBody, b"{}"),
        (InitBody, b'{"init_info": [1]}'),
        (InitBody, b'{"init_info": null}'),
        (InitBody, b"[]"),
        (FinishBody, b'{"weight_version": 5}'),
        (FinishBody, b'{"weight_version": ["1"]}'),
        (FinishBody, b"[]"),
        (FinishBody, b"null"),
        (VersionBody, b"{}"),
        (VersionBody, b'{"new_version": 7}'),
        (VersionBody, b'{"new_version": null}'),
        (VersionBody, b"{"),
    ],
)
def test_wrong_types_are_bad_input_and_name_the_call(kind: type[Any], body: bytes) -> None:
    """vLLM answers 400 to an int as a version; so does the gateway, before it asks anyone."""
    with pytest.raises(BadInput, match=r"^this call: "):
        decode(body, kind, "this call")


@pytest.mark.parametrize("body", [b"", b"{}", b'{"weight_version": null}', b'{"else": 1}'])
def test_a_finish_needs_no_body(body: bytes) -> None:
    """vLLM's client sends none, TRL sends {}."""
    assert decode(body, FinishBody, "finish").weight_version is None
