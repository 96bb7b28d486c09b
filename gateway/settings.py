"""Reading the settings: flags over environment over file over defaults, and one line if it fails.

Every source becomes dotted names (`gate.max_held`) before anything is merged, so that an error
can say which name, in which source, was wrong. pydantic-settings merges first and reads
os.environ by itself; that is why it is not used.

What it does not do: read anything at import time, or keep what it read.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from gateway.settings_model import (
    Auth,
    Deployment,
    DeploymentKind,
    DiscoveryKind,
    Gate,
    GateMode,
    Limits,
    Log,
    LogFormat,
    LogLevel,
    PauseOnUpdate,
    Routing,
    RoutingPolicy,
    Settings,
    Timeouts,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

__all__ = [
    "Auth",
    "Deployment",
    "DeploymentKind",
    "DiscoveryKind",
    "Gate",
    "GateMode",
    "Limits",
    "Log",
    "LogFormat",
    "LogLevel",
    "PauseOnUpdate",
    "Routing",
    "RoutingPolicy",
    "Settings",
    "SettingsError",
    "Timeouts",
    "load_settings",
]

PREFIX: Final = "FLEET_"

# What Kubernetes puts into every container for each Service called fleet or fleet-something.
_KUBERNETES_NAME: Final = re.compile(
    r"FLEET_(?:.+_)?"
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_.+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_KUBERNETES_PORT: Final = re.compile(r"(?:tcp|udp|sctp)://")


CLIENT_URL: Final = "FLEET_URL"
"""Where `fleet status` and its like find the gateway; not a setting of the gateway."""


class SettingsError(ValueError):
    """The settings cannot be used; the message is one line for the one who starts the program."""


@dataclass(frozen=True, slots=True)
class _Given:
    """One value that somebody set, and how that one wrote its name."""

    written: str
    value: object


def load_settings(
    *, environ: Mapping[str, str], flags: Mapping[str, object], config: Path | None
) -> Settings:
    """Build the settings; SettingsError names the first name or value that is wrong.

    `flags` has dotted names (`{"gate.mode": "hold"}`); None and empty lists mean not given.
    `config` is a YAML file with one mapping per group.
    """
    given = {**_from_file(config), **_from_environment(environ), **_from_flags(flags)}
    try:
        return Settings.model_validate(_nested(given))
    except ValidationError as error:
        raise SettingsError(_explain(_gravest(error.errors()), given)) from None


def setting_names() -> dict[str, FieldInfo]:
    """Return every setting by its dotted name, in the order of their declaration."""
    return dict(_walk(Settings, ""))


def environment_name(dotted: str) -> str:
    """Return the environment variable of a setting: `gate.mode` -> `FLEET_GATE__MODE`."""
    return PREFIX + dotted.upper().replace(".", "__")


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _walk(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _from_flags(flags: Mapping[str, object]) -> dict[str, _Given]:
    known = {name: _flag_name(name) for name in setting_names()}
    given: dict[str, _Given] = {}
    for name, value in flags.items():
        if value is None or value in ([], ()):
            continue
        if name not in known:
            raise SettingsError(_unknown(_flag_name(name), known.values()))
        given[name] = _Given(known[name], value)
    return given


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    known = {environment_name(name): name for name in setting_names()}
    given: dict[str, _Given] = {}
    for written, value in sorted(environ.items()):
        if not written.startswith(PREFIX) or _from_kubernetes(written, value):
            continue
        if written == CLIENT_URL:
            continue
        if written not in known:
            raise SettingsError(_unknown(written, known))
        given[known[written]] = _Given(written, value)
    return given


def _from_kubernetes(written: str, value: str) -> bool:
    if _KUBERNETES_NAME.fullmatch(written):
        return True
    return written.endswith("_PORT") and _KUBERNETES_PORT.match(value) is not None


def _from_file(config: Path | None) -> dict[str, _Given]:
    if config is None:
        return {}
    try:
        content: object = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{config}: cannot be read: {_one_line(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the last two: no date, no end
        raise SettingsError(f"{config}: not valid YAML{_line_of(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{config}: must be a mapping of setting names to values")
    return dict(_flatten(content, "", str(config)))


def _line_of(error: Exception) -> str:
    """Say where, and not what: the line may hold a token."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f" in line {error.problem_mark.line + 1}"
    return ""


def _flatten(content: dict[Any, Any], prefix: str, file: str) -> Iterator[tuple[str, _Given]]:
    known = setting_names()
    groups = {name.rpartition(".")[0] for name in known}
    for key, value in content.items():
        dotted = f"{prefix}{key}"
        written = f"{dotted} in {file}"
        if dotted in known:
            yield dotted, _Given(written, value)
        elif dotted not in groups:
            raise SettingsError(_unknown(dotted, {*known, *groups}, f" in {file}"))
        elif isinstance(value, dict):
            yield from _flatten(value, f"{dotted}.", file)
        elif value is not None:
            raise SettingsError(f"{written}: a group takes a mapping of names to values")


def _nested(given: Mapping[str, _Given]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for dotted, item in given.items():
        group, _, name = dotted.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = item.value
    return nested


def _gravest(errors: list[ErrorDetails]) -> ErrorDetails:
    """Prefer an unknown name: what is missing is then often the same name, well spelt."""
    return next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])


def _explain(error: ErrorDetails, given: Mapping[str, _Given]) -> str:
    dotted, inside = _place(error["loc"])
    written = given[dotted].written if dotted in given else environment_name(dotted)
    if error["type"] == "extra_forbidden":
        return _unknown(inside[-1], Deployment.model_fields, f" in {written}")
    inner = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in inside)
    fact = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    echo = error["type"] not in {"value_error", "missing"} and not _is_secret(dotted)
    return _one_line(f"{written}{inner}: {fact}{_shown(error['input']) if echo else ''}")


def _place(location: tuple[int | str, ...]) -> tuple[str, list[str]]:
    """Split pydantic's location into the setting's dotted name and the path within its value."""
    path = [str(part) for part in location]
    length = next((n for n in (2, 1) if ".".join(path[:n]) in setting_names()), len(path))
    return ".".join(path[:length]), path[length:]


def _shown(value: object) -> str:
    text = repr(value)
    return f", not {text}" if len(text) <= 80 else ""


def _is_secret(dotted: str) -> bool:
    return dotted.startswith("auth.") or dotted == "store"


def _unknown(written: str, known: Iterable[str], where: str = "") -> str:
    names = list(known)
    near = [name for name in names if name.startswith(f"{written}__")]
    near = near or _nearest(written, names)
    hint = f"did you mean {near[0]}?" if near else "docs/settings.md lists all names"
    return f"{written}{where}: unknown setting; {hint}"


def _nearest(written: str, names: list[str]) -> list[str]:
    # Without what all names have in common, or FLEET_X would be near to every short name.
    bare = {name.removeprefix(PREFIX): name for name in names}
    return [bare[b] for b in difflib.get_close_matches(written.removeprefix(PREFIX), bare, n=1)]


def _flag_name(dotted: str) -> str:
    if dotted == "replicas":
        return "--replica"
    return "--" + dotted.replace(".", "-").replace("_", "-")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
