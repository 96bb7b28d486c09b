"""What replicas and gateway say of themselves over time; only what changes is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import httpx

from bench.gpu.processes import Served

INTERVAL_S = 0.5


class Watch:
    """Looks at every server by itself, and at the gateway's view of it."""

    def __init__(self, front: Served, servers: Sequence[Served]) -> None:
        self.front = front
        self.servers = servers
        self.seen: list[tuple[float, str, str]] = []
        self._last: dict[str, str] = {}
        self._over = threading.Event()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Look until the block is left."""
        looks = [threading.Thread(target=self._states, daemon=True)]
        looks += [
            threading.Thread(target=self._server, args=(server,), daemon=True)
            for server in self.servers
        ]
        for look in looks:
            look.start()
        try:
            yield
        finally:
            self._over.set()
            for look in looks:
                look.join(5.0)

    def lines(self, at: float) -> list[str]:
        """Every change, relative to a moment."""
        told = sorted(self.seen)
        return [f"{when - at:+8.2f} s  {who}: {what}" for when, who, what in told]

    def _server(self, server: Served) -> None:
        while not self._over.wait(INTERVAL_S):
            alive = "" if server.alive else "dead, "
            health, engine = server.told("/health"), server.told("/weight_info")
            self._note(server.name, f"{alive}/health {health}, /weight_info {engine}")

    def _states(self) -> None:
        while not self._over.wait(INTERVAL_S):
            try:
                shown = self.front.get("/fleet/replicas")["replicas"]
                fleet = self.front.get("/fleet")
            except httpx.HTTPError as error:
                self._note("gateway", f"{type(error).__name__}")
                continue
            for replica in shown:
                named = next((s.name for s in self.servers if s.id == replica["id"]), replica["id"])
                reason = f" ({replica['reason'][:160]})" if replica["reason"] else ""
                self._note(f"gateway on {named}", f"{replica['state']}{reason}")
            self._note("gateway", f"phase {fleet['phase']}, gate {fleet['gate']['state']}")

    def _note(self, who: str, what: str) -> None:
        if self._last.get(who) != what:
            self._last[who] = what
            self.seen.append((time.monotonic(), who, what))
