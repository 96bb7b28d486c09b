"""Writes docs/state-machine.md from the table that the program runs on.

python docs/generate_state_machine.py [--check]
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from fleet.rules import events
from fleet.rules.events import Event
from fleet.rules.rounds import TRANSITIONS

PAGE = Path(__file__).with_name("state-machine.md")


def render() -> str:
    """Return the page."""
    lines = [
        "# The state machine of a weight update",
        "",
        "Written by `docs/generate_state_machine.py` from `fleet/rules/rounds.py`, not by hand.",
        "An event without a row for the phase is refused, and changes nothing.",
        "",
        "| phase | event | next phase |",
        "| --- | --- | --- |",
    ]
    for phase, row in TRANSITIONS.items():
        lines += [f"| `{phase}` | {event.__name__} | `{row[event]}` |" for event in row]
    lines += ["", "## Events", "", "| event | meaning |", "| --- | --- |"]
    lines += [f"| {kind.__name__} | {_meaning(kind)} |" for kind in _events()]
    return "\n".join(lines) + "\n"


def _events() -> list[type[Event]]:
    used = {event for row in TRANSITIONS.values() for event in row}
    members = [kind for _, kind in inspect.getmembers(events, inspect.isclass) if kind in used]
    return sorted(members, key=lambda kind: inspect.getsourcelines(kind)[1])


def _meaning(kind: type[Event]) -> str:
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")


def main() -> None:
    """Write the page, or with --check fail if it is not up to date."""
    page = render()
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != page)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
