"""How the command line shows what the operator routes answer."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

Answer = dict[str, Any]

_COLOURS = {"ready": "green", "paused": "yellow", "updating": "cyan", "stale": "yellow"}


def status_table(fleet: Answer, replicas: Answer) -> Group:
    """Return the summary above the list of replicas."""
    gate = fleet["gate"]
    line = (
        f"fleet {fleet['name']}   generation {fleet['generation']}   "
        f"weight_version {fleet['weight_version']}   phase {fleet['phase']}   "
        f"gate {gate['state']} ({gate['held']} held)"
    )
    notes = [Text(line, style="bold")]
    if fleet["membership"]["changed"]:
        world = fleet["membership"]["world_size"]
        notes.append(Text(f"membership changed: the next init needs world_size={world}"))
    if fleet["pause"]:
        notes.append(Text(f"paused by {fleet['pause']['by']}"))
    if fleet["call"]:
        call = fleet["call"]
        notes.append(Text(f"{call['what']} on its way, by {call['by']}"))
    if len(fleet["gateways"]) > 1:
        seats = ", ".join(seat["where"] for seat in fleet["gateways"].values())
        notes.append(Text(f"gateways: {seats}"))
    if fleet["round"]:
        current = fleet["round"]
        reason = f": {current['reason']}" if current["reason"] else ""
        notes.append(Text(f"round {current['id']} by {current['opened_by']}{reason}"))
    return Group(*notes, replicas_table(replicas))


def replicas_table(answer: Answer) -> Table:
    """Return one line per replica."""
    table = Table("replica", "state", "version", "ranks", "in flight", "reason")
    for replica in answer["replicas"]:
        state = replica["state"]
        table.add_row(
            replica["id"],
            Text(state, style=_COLOURS.get(state, "red")),
            replica["weight_version"] or "",
            _ranks(replica),
            str(replica["inflight"]),
            replica["reason"],
        )
    return table


def rounds_table(answer: Answer) -> Table:
    """Return one line per weight update."""
    table = Table("round", "result", "version", "opened", "pause", "transfer", "total", "reason")
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
            found["reason"] or "",
        )
    return table


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
        return f"({size})" if size else ""
    return f"{first}" if size == 1 else f"{first}–{first + size - 1}"
