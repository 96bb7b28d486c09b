"""Logging: constant messages with fields, as text for people or JSON lines for collectors.

In text, a value that has blanks in it stands in quotes, so a line can be taken apart again. Where
several processes write into one stream, each line says which one wrote it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import msgspec

from gateway.settings_model import Log, LogFormat

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


_PLAIN = re.compile(r"""[^\s"=]+""")


class _Json(logging.Formatter):
    def __init__(self, *, tells_process: bool) -> None:
        super().__init__()
        self._tells_process = tells_process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if self._tells_process:
            line["process"] = record.process
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={_written(value)}" for key, value in _fields(record).items())
        return f"{super().format(record)} {fields}".rstrip()


def configure_logging(settings: Log, *, tells_process: bool = False) -> None:
    """Send the program's log to standard error in the chosen form, from the chosen level on.

    `tells_process` adds the id of the process that writes, in text as `[id]`.
    """
    handler = logging.StreamHandler(sys.stderr)
    process = "[%(process)d] " if tells_process else ""
    plain = _Text(f"%(asctime)s %(levelname)-7s {process}%(name)s: %(message)s")
    in_json = settings.format is LogFormat.JSON
    handler.setFormatter(_Json(tells_process=tells_process) if in_json else plain)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())


def _written(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}
