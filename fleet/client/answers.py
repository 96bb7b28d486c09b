"""What an answer means: its JSON and headers, or the error that it is. Pure.

Read with care: between the gateway and its client may stand a proxy that answers in its own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fleet.client.errors import (
    BY_NAME,
    BY_STATUS,
    FleetError,
    MembershipChanged,
    Told,
    Unavailable,
)
from fleet.facts.outcome import Outcome, Result

_LONGEST_QUOTE = 500


@dataclass(frozen=True)
class Membership:
    """How the trainer's group compares with the fleet, by the last control answer that tells.

    `changed` says that the next init would give another group, of `world_size` ranks; that is
    None while nobody could lay it out. Refusals and failures tell it by the world size that they
    name for the next init.
    """

    changed: bool = False
    world_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A rollout's answer, and by which weights and whom it was made.

    `weight_version` is the version at its dispatch, `weight_version_end` that at its completion;
    the latter is None for a stream, whose headers went out before anybody could know. `kv_mixed`
    says that prefixes may have been answered from the keys and values of older weights. `body` is
    the JSON of the answer, None for a stream.
    """

    weight_version: str
    weight_version_end: str | None
    replica: str
    request_id: str
    kv_mixed: bool = False
    body: Any = field(default=None, repr=False)

    @property
    def made_by_one_version(self) -> bool:
        """Whether no update came between its first token and its last, as far as is known."""
        return self.weight_version == self.weight_version_end


def body_of(content: bytes) -> Any:
    """Return the JSON of a body; its text if it is none, None if there is nothing."""
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def membership_of(headers: Mapping[str, str]) -> Membership:
    """Read X-Fleet-Membership; an answer without it says that the group is the fleet."""
    told = headers.get("x-fleet-membership", "")
    size = re.search(r"world_size=(\d+)", told)
    return Membership("changed" in told, int(size.group(1)) if size else None)


def membership_after(error: FleetError, asked: int | None) -> Membership | None:
    """Return what an error tells of the membership, or None if it does not speak of it.

    `asked` is the world size of the last init, None if there was none or it named no size.
    """
    if isinstance(error, MembershipChanged):
        return Membership(changed=True, world_size=error.world_size)
    if error.world_size is None or asked is None:
        return None
    return Membership(changed=error.world_size != asked, world_size=error.world_size)


def rollout_of(headers: Mapping[str, str], content: bytes | None) -> Rollout:
    """Return what a rollout's answer says of itself; `content` is None for a stream."""
    version = headers.get("x-weight-version", "")
    end = headers.get("x-weight-version-end", version if content is not None else None)
    return Rollout(
        weight_version=version,
        weight_version_end=end,
        replica=headers.get("x-fleet-replica", ""),
        request_id=headers.get("x-request-id", ""),
        kv_mixed=headers.get("x-weight-version-kv") == "mixed",
        body=None if content is None else body_of(content),
    )


def error_of(
    call: str, status: int, headers: Mapping[str, str], content: bytes
) -> FleetError | None:
    """Return the error that an answer is, or None for one that says yes."""
    if 200 <= status < 300:
        return None
    body = _object(body_of(content))
    told = _object(body.get("error"))
    name = str(told.get("type", ""))
    kind = BY_NAME.get(name) or (BY_STATUS.get(status) if "replicas" in body else None)
    kind = kind or FleetError
    retry = headers.get("retry-after") if issubclass(kind, Unavailable) else None
    message = told.get("message") or content[:_LONGEST_QUOTE].decode(errors="replace")
    return kind(
        str(message),
        Told(
            call=call,
            status=status,
            type=name or "HTTPError",
            hint=body.get("hint"),
            outcomes=_outcomes(body.get("replicas")),
            retry_after_s=float(retry) if retry and retry.isdecimal() else None,
        ),
    )


def field_of(body: Any, name: str, kind: type[Any]) -> Any:
    """Return one field of an answer. Raises FleetError if it is not there or of another kind."""
    value = _object(body).get(name)
    if not isinstance(value, kind):
        text = f"the answer has no {name} that is a {kind.__name__}: {str(body)[:_LONGEST_QUOTE]}"
        raise FleetError(text, Told(type="UnexpectedAnswer"))
    return value


def _outcomes(replicas: Any) -> dict[str, Outcome]:
    return {replica: _outcome(_object(told)) for replica, told in _object(replicas).items()}


def _outcome(told: Mapping[str, Any]) -> Outcome:
    """A word that only a later gateway knows counts as a failure; its detail says more."""
    word = told.get("outcome")
    known = isinstance(word, str) and word in set(Result)
    elapsed = told.get("elapsed_s")
    return Outcome(
        outcome=Result(word) if known else Result.FAILED,
        status=told.get("status"),
        detail=told.get("detail"),
        elapsed_s=float(elapsed) if isinstance(elapsed, (int, float)) else 0.0,
    )


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
