"""The one way in which the routes answer in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Response


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer with this content; `headers` are added to its own."""
    body = msgspec.json.encode(content)
    return Response(body, status, headers=headers, media_type="application/json")
