"""Logging: constant messages with fields, as text for people or JSON lines for collectors."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

from gateway.settings_model import Log, LogFormat

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        return f"{super().format(record)} {fields}".rstrip()


def configure_logging(settings: Log) -> None:
    """Send the program's log to standard error in the chosen form, from the chosen level on."""
    handler = logging.StreamHandler(sys.stderr)
    plain = _Text("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(_Json() if settings.format is LogFormat.JSON else plain)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}
