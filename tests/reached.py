"""A gateway as a client reaches it, in this process or another: what tests ask of any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(kw_only=True)
class Reached:
    """A gateway that answers at `url`, and a client of it."""

    url: str
    http: httpx.AsyncClient

    async def fleet(self) -> dict[str, Any]:
        """GET /fleet."""
        return (await self.http.get("/fleet")).json()

    async def states(self) -> dict[str, str]:
        """Each replica's state by id."""
        found = (await self.http.get("/fleet/replicas")).json()["replicas"]
        return {replica["id"]: replica["state"] for replica in found}

    async def ready(self) -> bool:
        """Whether /readyz says 200."""
        try:
            return (await self.http.get("/readyz")).status_code == 200
        except httpx.HTTPError:
            return False
