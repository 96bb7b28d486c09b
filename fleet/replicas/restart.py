"""Restarting a replica from outside: a command or a web hook that an operator has configured.

The gateway cannot restart a server itself; it can only ask whoever runs it. Pods are restarted by
`discovery/restart.py`.
"""

from __future__ import annotations

import asyncio
import shlex
from typing import Protocol
from urllib.parse import urlsplit

import httpx
import msgspec

from fleet.errors import Unavailable
from fleet.facts.replica import Replica

TOLD_BYTES = 500
"""How much of a failing command's last words an error repeats."""


class Restart(Protocol):
    """Something that can have a replica restarted."""

    async def restart(self, replica: Replica) -> None:
        """Ask for a restart and return; the replica goes and comes back by itself.

        Raises Unavailable, which may be retried, if the request was not taken.
        """
        ...


class CommandRestart:
    """Runs a command; `{id}`, `{url}`, `{host}` and `{port}` in its words stand for the replica.

    The words are split as a shell would, but no shell runs, so an id cannot smuggle anything in.
    """

    def __init__(self, command: str, timeout_s: float) -> None:
        self._words = shlex.split(command)
        self._timeout_s = timeout_s

    async def restart(self, replica: Replica) -> None:
        """Run the command to its end; Unavailable unless it ends with status 0 in time."""
        words = [_filled_in(word, replica) for word in self._words]
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise Unavailable(f"{words[0]} could not be run: {error}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                _, told = await process.communicate()
        except BaseException as error:
            if process.returncode is None:
                process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise Unavailable(f"{words[0]} ran longer than {self._timeout_s:g} s") from None
            raise
        if process.returncode:
            last_words = told[-TOLD_BYTES:].decode(errors="replace").strip()
            raise Unavailable(f"{words[0]} ended with status {process.returncode}: {last_words}")


class HookRestart:
    """Posts `{"id", "url", "reason"}` as JSON to a URL."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s

    async def restart(self, replica: Replica) -> None:
        """Post; Unavailable unless the answer is 2xx and in time."""
        reason = replica.wedged or replica.fence or replica.lost
        body = msgspec.json.encode({"id": replica.id, "url": replica.url, "reason": reason})
        headers = {"content-type": "application/json"}
        try:
            async with httpx.AsyncClient(timeout=self._timeout_s) as http:
                answer = await http.post(self._url, content=body, headers=headers)
        except httpx.HTTPError as error:
            fact = str(error) or type(error).__name__
            raise Unavailable(f"the restart hook did not answer: {fact}") from error
        if not answer.is_success:
            told = answer.text[:TOLD_BYTES]
            raise Unavailable(f"the restart hook answered {answer.status_code}: {told}")


def _filled_in(word: str, replica: Replica) -> str:
    where = urlsplit(replica.url)
    known = {"id": replica.id, "url": replica.url, "host": where.hostname, "port": where.port}
    for name, value in known.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word
