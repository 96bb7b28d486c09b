"""The dashboard: one static page that reads the operator's routes; it holds no data itself."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Response

router = APIRouter()

FOLDER: Final = Path(__file__).parent.parent / "dashboard"
CONTENT: Final = {
    name: ((FOLDER / name).read_bytes(), kind)
    for name, kind in (
        ("index.html", "text/html"),
        ("fleet.css", "text/css"),
        ("fleet.js", "text/javascript"),
    )
}
HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/")
async def dashboard() -> Response:
    """Show the fleet; the page asks for the operator's token if one is needed."""
    return _file("index.html")


@router.get("/dashboard/{name}")
async def part(name: str) -> Response:
    """Return what the page is made of."""
    if name not in CONTENT:
        raise HTTPException(404, "no such part of the dashboard")
    return _file(name)


def _file(name: str) -> Response:
    body, kind = CONTENT[name]
    return Response(body, media_type=f"{kind}; charset=utf-8", headers=HEADERS)
