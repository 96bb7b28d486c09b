"""The addresses of one name, asked for again and again: a headless Service, say.

dnspython, because it tells «there is none» from «no answer», which decides here, asks without a
thread, and falls back to TCP for long answers (ADR 13). The system's resolv.conf is read before
each question; /etc/hosts is not.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from time import time

from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.resolver import NXDOMAIN

from fleet.discovery.addresses import Addresses, after_answer, endpoints_of
from fleet.discovery.base import Tell
from fleet.facts.endpoint import Snapshot

log = logging.getLogger(__name__)


class NameSource:
    """Tells the A and AAAA records of one name; every replica listens on one port."""

    def __init__(
        self,
        host: str,
        port: int,
        interval_s: float,
        resolver: Callable[[], Resolver] = Resolver,
    ) -> None:
        self.name = f"dns {host}"
        self._host = host
        self._port = port
        self._interval_s = interval_s
        self._resolver = resolver

    async def run(self, tell: Tell) -> None:
        """Tell snapshots for ever; a failure is logged and tells nothing."""
        known: Addresses = {}
        while True:
            try:
                answer = await self._ask()
            except (DNSException, OSError) as error:
                told = {"source": self.name, "error": f"{type(error).__name__}: {error}"}
                log.warning("discovery has no answer; the fleet stays as it is", extra=told)
            else:
                known = after_answer(known, answer, time())
                found = endpoints_of(known, self.name, self._port)
                tell(Snapshot(source=self.name, endpoints=found))
            _stop_if_cancelled()
            await asyncio.sleep(self._interval_s * random.uniform(0.9, 1.0))

    async def _ask(self) -> set[str]:
        """Return all addresses; none if the name does not exist or has none of either kind."""
        resolver = self._resolver()
        found: set[str] = set()
        for kind in ("A", "AAAA"):
            try:
                answer = await resolver.resolve(
                    self._host, kind, raise_on_no_answer=False, search=True
                )
            except NXDOMAIN:
                continue
            found.update(str(record) for record in answer)
        return found


def _stop_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled and has not heard of it.

    dnspython 2.9 waits under asyncio.wait_for, which before Python 3.12 loses a cancellation that
    comes in the very moment when it is done.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
