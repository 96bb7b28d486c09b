"""Event streams that break off: the last event, which tells a client why. Pure.

Clients take what stands before a blank line for one whole event. So an error event is added only
where the last event is whole; behind half an event it would make that one pass for whole.
"""

from __future__ import annotations

from fleet.errors import FleetError
from gateway.errors import body_of
from gateway.heads import Headers

BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")
LONGEST_BLANK_LINE = 4


def takes_events(headers: Headers) -> bool:
    """Whether an event may be added to an answer with these headers, names in lower case.

    Its type says events, and it has neither a length nor a coding, which an addition would break.
    """
    found = False
    for name, value in headers:
        if name in (b"content-length", b"content-encoding"):
            return False
        if name == b"content-type":
            found = value.lower().startswith(b"text/event-stream")
    return found


def end_of(before: bytes, data: bytes) -> bytes:
    """Return the end of a stream that has just grown by `data`, as far as `is_between` needs it."""
    return data if len(data) >= LONGEST_BLANK_LINE else (before + data)[-LONGEST_BLANK_LINE:]


def is_between(end: bytes) -> bool:
    """Whether a stream that ends like this ends between two events."""
    return not end or end.endswith(BLANK_LINES)


def error_event(error: FleetError) -> bytes:
    """Return the event that vLLM's clients raise: an `error` where they expect choices."""
    return b"data: " + body_of(error) + b"\n\n"
