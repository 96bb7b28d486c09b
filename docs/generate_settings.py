"""Write docs/settings.md from the settings' own models, so that the page cannot drift.

Run `python docs/generate_settings.py`; a test compares the page with what this would write.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, SecretStr

from gateway.settings import Deployment, Settings, environment_name

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

PAGE = Path(__file__).with_name("settings.md")

_INTRODUCTION = """\
# Settings

Written by `docs/generate_settings.py` from `gateway/settings_model.py`; do not edit by hand.

Every setting has one name in three spellings: the environment variable below, the same words in
lower case in a YAML file (`fleet serve --config FILE`, one mapping per group: `gate: {mode: hold}`)
and, for some, a flag of `fleet serve`. Flags win over the environment, the environment over the
file, the file over the defaults. An unknown name or a bad value stops the start with one line.
Variables that Kubernetes injects for Services (`FLEET_SERVICE_HOST`, `FLEET_PORT=tcp://…` and the
like) are passed over.
"""


def render() -> str:
    """Return the whole page."""
    top = [item for item in Settings.model_fields.items() if not _is_group(item[1])]
    parts = [_INTRODUCTION, _table("General", "Where to listen and whom to serve.", "", top)]
    for name, field in Settings.model_fields.items():
        if _is_group(field):
            group: type[BaseModel] = field.annotation  # pyright: ignore[reportAssignmentType]
            rows = list(group.model_fields.items())
            parts.append(_table(f"`{name}`", group.__doc__ or "", f"{name}.", rows))
    parts.append(_entries())
    return "\n".join(parts)


def _is_group(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _table(title: str, about: str, prefix: str, rows: list[tuple[str, FieldInfo]]) -> str:
    lines = [f"## {title}", "", about, "", "| name | value | default | meaning |"]
    lines.append("| --- | --- | --- | --- |")
    lines += [
        f"| `{environment_name(prefix + name)}` | {_values(field)} | {_default(field)} "
        f"| {_prose(field)} |"
        for name, field in rows
    ]
    return "\n".join([*lines, ""])


def _entries() -> str:
    lines = ["## Entries of `topology`", "", Deployment.__doc__ or "", ""]
    lines += ["| name | value | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{name}` | {_values(field)} | {_default(field)} | {_prose(field)} |"
        for name, field in Deployment.model_fields.items()
    ]
    return "\n".join([*lines, ""])


def _values(field: FieldInfo) -> str:
    kind: Any = field.annotation
    kinds = [arg for arg in get_args(kind) if arg is not type(None)]
    if type(None) in get_args(kind):
        kind = kinds[0]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return ", ".join(f"`{member}`" for member in kind)
    if kinds and kind is not kinds[0]:
        return "JSON list" if kinds[0] is Deployment else "list"
    words = {SecretStr: "secret", bool: "`true`, `false`", int: "whole number", float: "number"}
    return words.get(kind, "text")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default: Any = field.default
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _prose(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
