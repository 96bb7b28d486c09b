"""The trainer's request bodies, read once and kept as bytes.

Weights bodies may be many megabytes and go to every replica as they came, so only what the
gateway must know is decoded: that the JSON is well formed, whether update_info is an object or a
list, and which tensors it names. Raises BadInput with what to do, before anything is sent.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from typing import Any

import msgspec

from fleet.errors import BadInput
from fleet.facts.layout import Layout, Slot, check_list_length, slice_update

VERSION_CHARS = 128
PIECE_BYTES = 1024 * 1024
"""How much of a body is looked at in one go, so that a look does not cost a second body."""


class InitBody(msgspec.Struct, frozen=True):
    """`init_info` as the trainer wrote it."""

    init_info: dict[str, Any]


class FinishBody(msgspec.Struct, frozen=True):
    """`weight_version` is the trainer's label, or None."""

    weight_version: str | None = None


class VersionBody(msgspec.Struct, frozen=True):
    """`new_version` is the label to set."""

    new_version: str


class _RawUpdate(msgspec.Struct, frozen=True):
    update_info: msgspec.Raw


class _Announced(msgspec.Struct, frozen=True):
    names: list[str] | None = None


class UpdateBody:
    """An update_weights body: the bytes, its items if it is a list, the tensors it names.

    `names` is None where the body does not speak of names, and empty where it says «as before».
    """

    def __init__(self, body: bytes | bytearray | memoryview) -> None:
        self._body = memoryview(body)
        raw = decode(body, _RawUpdate, "update_weights").update_info
        _check_text(self._body, "update_weights")
        first = bytes(memoryview(raw)[:1])
        if first not in (b"{", b"["):
            raise BadInput("update_info must be an object, or a list with one object per worker")
        self.items: list[msgspec.Raw] | None = (
            msgspec.json.decode(raw, type=list[msgspec.Raw]) if first == b"[" else None
        )
        self.names = self._read_names(raw)

    @property
    def size(self) -> int:
        """How many bytes the body has."""
        return self._body.nbytes

    def check(self, layout: Layout) -> None:
        """Raise BadInput unless a list has one item per worker."""
        if self.items is not None:
            check_list_length(layout, len(self.items))

    def for_slot(self, layout: Layout, slot: Slot) -> bytes | memoryview:
        """Return what one replica must get: the same bytes, or its slice of a list."""
        if self.items is None:
            return self._body
        own = slice_update(layout, slot, self.items)
        return b'{"update_info":[' + b",".join(bytes(item) for item in own) + b"]}"

    def _read_names(self, raw: msgspec.Raw) -> list[str] | None:
        parts = self.items if self.items is not None else [raw]
        found = [_names(part) for part in parts]
        if all(names is None for names in found):
            return None
        return sorted({name for names in found if names for name in names})


def _names(part: msgspec.Raw) -> list[str] | None:
    if bytes(memoryview(part)[:1]) != b"{":
        raise BadInput("every item of update_info must be an object")
    try:
        return msgspec.json.decode(part, type=_Announced).names
    except msgspec.ValidationError as error:
        raise BadInput(f"update_info.names must be a list of strings: {error}") from error


def decode(body: bytes | bytearray | memoryview, kind: type[Any], what: str) -> Any:
    """Decode a body into a struct; BadInput says where it is wrong. An empty body is `{}`."""
    try:
        return msgspec.json.decode(body if len(body) else b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise BadInput(f"{what}: {error}") from error
    except msgspec.DecodeError as error:
        raise BadInput(f"{what}: the body is not valid JSON: {error}") from error


def _check_text(body: memoryview, what: str) -> None:
    """Raise BadInput for broken UTF-8 also where nothing was decoded: a server would refuse it."""
    decoder = getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(body), PIECE_BYTES):
            decoder.decode(body[start : start + PIECE_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise BadInput(f"{what}: the body is not valid JSON: {error.reason}") from error


def check_version(version: str | None) -> None:
    """Raise BadInput unless a version is 1 to 128 printable ASCII characters without spaces."""
    if version is None:
        return
    if not 1 <= len(version) <= VERSION_CHARS or not all("!" <= c <= "~" for c in version):
        raise BadInput(
            f"a weight version is 1 to {VERSION_CHARS} printable ASCII characters without "
            f"spaces, not {version[:VERSION_CHARS]!r}"
        )
