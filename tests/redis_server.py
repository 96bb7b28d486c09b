"""A real redis-server for tests: no persistence, a free port, and the ways in which it may fail."""

from __future__ import annotations

import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest
from redis import Redis

from tests.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path


class RedisServer:
    """One server process; `start` returns when it accepts connections."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        """The URL of the server's first database."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start on the same port as before, empty."""
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.fail("redis-server is not on PATH: run `make redis`")
        # The last words of the configuration keep the server from writing anything anywhere.
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self._directory), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        log: list[str] = []
        for line in self._process.stdout:
            log.append(line)
            if "Ready to accept connections" in line:
                return
        pytest.fail("redis-server did not start:\n" + "".join(log))

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process = None

    def freeze(self) -> None:
        """Stop it from answering while its connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def empty(self) -> None:
        """Delete every key."""
        with Redis.from_url(self.url) as client:
            client.flushall()
