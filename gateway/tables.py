"""How the command line shows what the operator routes answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fleet.facts.moments import ago

Answer = dict[str, Any]

_COLOURS = {"ready": "green", "paused": "yellow", "updating": "cyan", "stale": "yellow"}


def status_table(fleet: Answer, replicas: Answer, now: float) -> Group:
    """Return the summary above the list of replicas; `now` is in seconds since the epoch."""
    gate = fleet["gate"]
    closed = f" {ago(gate['closed_since'], now)}" if gate["closed_since"] else ""
    line = (
        f"fleet {fleet['name']}: weight_version {fleet['weight_version']}, phase {fleet['phase']}, "
        f"gate {gate['state']}{closed}, {gate['held']} held, generation {fleet['generation']}"
    )
    notes = [Text(line, style="bold"), *map(Text, _notes(fleet, now))]
    return Group(*notes, replicas_table(replicas))


def _notes(fleet: Answer, now: float) -> Iterator[str]:
    """Yield what is out of the ordinary, one line each."""
    membership, current = fleet["membership"], fleet["round"]
    pause, call = fleet["pause"], fleet["call"]
    world = membership["world_size"]
    if fleet["phase"] == "failed":
        yield f"the last update failed: init again with world_size={world}, then a full update"
    elif membership["changed"]:
        yield f"membership changed: the next init needs world_size={world}"
    if pause:
        yield f"paused {ago(pause['since'], now)} by {pause['by']}"
    if call:
        yield f"{call['what']} on its way, begun {ago(call['since'], now)} by {call['by']}"
    if len(fleet["gateways"]) > 1:
        seats = Counter(seat["where"] for seat in fleet["gateways"].values())
        told = ", ".join(f"{n} × {where}" if n > 1 else where for where, n in seats.items())
        yield f"{seats.total()} gateways: {told}"
    if current:
        reason = f": {current['reason']}" if current["reason"] else ""
        opened = f"opened {ago(current['opened_at'], now)} by {current['opened_by']}"
        yield f"round {current['id']}, {current['result']}, {opened}{reason}"


def replicas_table(answer: Answer) -> Group:
    """Return one line per replica, and below them each reason once, with those it holds for."""
    table = Table("replica", "state", "version", "ranks", "in flight")
    held_by: dict[tuple[str, str], list[str]] = {}
    for replica in answer["replicas"]:
        state = replica["state"]
        table.add_row(
            replica["id"],
            Text(state, style=_COLOURS.get(state, "red")),
            replica["weight_version"] or "",
            _ranks(replica),
            str(replica["inflight"]),
        )
        if replica["reason"]:
            held_by.setdefault((state, replica["reason"]), []).append(replica["id"])
    told = (f"{', '.join(ids)} {state}: {why}" for (state, why), ids in held_by.items())
    return Group(table, *map(Text, told))


def rounds_table(answer: Answer) -> Group:
    """Return one line per weight update, and below them the reasons."""
    table = Table("round", "result", "version", "opened", "pause", "transfer", "total")
    reasons: list[Text] = []
    for found in answer["rounds"]:
        opened = time.strftime("%H:%M:%S", time.localtime(found["opened_at"]))
        table.add_row(
            str(found["id"]),
            found["result"],
            found["version"] or "",
            opened,
            milliseconds(phase_s(found, "pausing")),
            milliseconds(phase_s(found, "updating")),
            milliseconds(total_s(found)),
        )
        if found["reason"]:
            reasons.append(Text(f"round {found['id']}: {found['reason']}"))
    return Group(table, *reasons)


def phase_s(found: Answer, phase: str) -> float | None:
    """Return the seconds that one phase of a round took, None if it had none."""
    return next((p["elapsed_s"] for p in found["phases"] if p["phase"] == phase), None)


def total_s(found: Answer) -> float | None:
    """Return the seconds from the pause to the resume of a round."""
    phases = [p for p in found["phases"] if p["phase"] != "initializing"]
    if not phases:
        return None
    ends = [p["started_at"] + p["elapsed_s"] for p in phases]
    return max(ends) - min(p["started_at"] for p in phases)


def milliseconds(seconds: float | None) -> str:
    """Return a duration as a person reads it."""
    return "" if seconds is None else f"{seconds * 1000:.0f} ms"


def _ranks(replica: Answer) -> str:
    first, size = replica["rank_offset"], replica["world_size"]
    if first is None:
        return f"none ({size} worker{'s' if size > 1 else ''})" if size else ""
    return f"{first}" if size == 1 else f"{first}–{first + size - 1}"
