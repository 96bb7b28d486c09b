"""How the command line shows what the operator routes answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fleet.facts.moments import ago

Answer = dict[str, Any]

_COLOURS = {"ready": "green", "paused": "yellow", "updating": "cyan", "stale": "yellow"}


def status_table(fleet: Answer, replicas: Answer, now: float) -> Group:
    """Return the summary above the list of replicas; `now` is in seconds since the epoch."""
    gate, name = fleet["gate"], fleet["name"]
    closed = f" {ago(gate['closed_since'], now)}" if gate["closed_since"] else ""
    called = name if name == "fleet" else f"fleet {name}"
    lines = (
        f"{called}: weight_version {fleet['weight_version']}, phase {fleet['phase']}",
        f"gate {gate['state']}{closed}, {gate['held']} held, generation {fleet['generation']}",
    )
    summary = (Text(line, style="bold") for line in lines)
    notes = map(Text, _notes(fleet, _reasons(replicas), now))
    return Group(*summary, *notes, replicas_table(replicas))


def _notes(fleet: Answer, told_below: str, now: float) -> Iterator[str]:
    """Yield what is out of the ordinary, one line each; what is `told_below` is not told twice."""
    current, pause, call = fleet["round"], fleet["pause"], fleet["call"]
    if fleet["store"]:
        since = ago(fleet["store"]["since"], now)
        yield f"the store fails, first {since}, so this may be old: {fleet['store']['reason']}"
    if fleet["hint"]:
        yield f"next: {fleet['hint']}"
    if pause:
        yield f"paused {ago(pause['since'], now)} by {pause['by']}"
    if call:
        yield f"{call['what']} on its way, begun {ago(call['since'], now)} by {call['by']}"
    if len(fleet["gateways"]) > 1:
        seats = Counter(seat["where"] for seat in fleet["gateways"].values())
        told = ", ".join(f"{n} × {where}" if n > 1 else where for where, n in seats.items())
        yield f"{seats.total()} gateways: {told}"
    if current:
        opened = f"opened {ago(current['opened_at'], now)} by {current['opened_by']}"
        yield f"round {current['id']}, {current['result']}, {opened}{_why(current, told_below)}"


def _why(current: Answer, told_below: str) -> str:
    """Return why a round failed; the reasons of the replicas that it fenced have the rest."""
    reason: str = current["reason"] or ""
    phase, _, rest = reason.partition(": ")
    if rest and rest in told_below:
        return f": {phase} failed"
    return f": {reason}" if reason else ""


def _reasons(answer: Answer) -> str:
    return "\n".join(replica["reason"] or "" for replica in answer["replicas"])


def replicas_table(answer: Answer) -> Group:
    """Return one line per replica, and below them each reason once, with those it holds for.

    A version with a question mark is the last label of a replica that may hold other weights.
    """
    table = Table("replica", "state", "version", "ranks", "in flight")
    held_by: dict[tuple[str, str], list[str]] = {}
    for replica in answer["replicas"]:
        state = replica["state"]
        table.add_row(
            replica["id"],
            Text(state, style=_COLOURS.get(state, "red")),
            _version(replica),
            _ranks(replica),
            str(replica["inflight"]),
        )
        if replica["reason"]:
            held_by.setdefault((state, replica["reason"]), []).append(replica["id"])
    told = (f"{', '.join(ids)} {state}: {why}" for (state, why), ids in held_by.items())
    return Group(table, *map(Text, told))


def rounds_table(answer: Answer) -> Group:
    """Return one line per weight update, and below them the reasons."""
    if not answer["rounds"]:
        return Group(Text("no rounds yet"))
    heads = ("round", "result", "version", "opened", "init", "pause", "transfer", "total")
    table = Table(*heads, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)  # for 80 columns
    reasons: list[Text] = []
    for found in answer["rounds"]:
        table.add_row(
            str(found["id"]),
            found["result"],
            found["version"] or "",
            time.strftime("%m-%d %H:%M:%S", time.localtime(found["opened_at"])),
            milliseconds(phase_s(found, "initializing")),
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


def _version(replica: Answer) -> str:
    label: str = replica["weight_version"] or ""
    return label if replica["version_holds"] or not label else f"{label}?"


def _ranks(replica: Answer) -> str:
    first, size = replica["rank_offset"], replica["world_size"]
    if first is None:
        return f"none ({size} worker{'s' if size > 1 else ''})" if size else ""
    return f"{first}" if size == 1 else f"{first}–{first + size - 1}"
