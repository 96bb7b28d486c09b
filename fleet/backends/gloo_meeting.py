"""The rendezvous of a gloo group: how ranks that know one address find each other.

Why a module of its own: torch's calls here block for minutes and cannot be cancelled, and a
trainer whose init was refused must not sit through that. So the meeting runs in a thread that is
left behind when its caller stops waiting.

The layout is that of ``stateless_init_torch_distributed_process_group(host, port, rank,
world_size, backend="gloo")`` (vLLM 0.32 and 0.33, ``vllm/distributed/utils.py``): rank 0 hosts a
``TCPStore``, each rank counts itself in there, and all other keys live under the prefix
``tcp://host:port``.
"""

import contextlib
import ipaddress
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

_POLL_S = 0.05
_ABANDONED_S = 1.0  # how long an abandoned wait may take to notice
_SHORTEST_WAIT_S = 0.1  # what is left for the last step of a join that used up its time


@dataclass(frozen=True)
class Meeting:
    """One attempt to bring a group together, as seen by one rank."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float

    @property
    def uri(self) -> str:
        """The rendezvous URL, which is also the key prefix (vLLM ``get_tcp_uri``)."""
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(self.host).version == 6:
                return f"tcp://[{self.host}]:{self.port}"
        return f"tcp://{self.host}:{self.port}"

    def run(self, cancelled: threading.Event) -> ProcessGroupGloo:
        """Return the connected group; RuntimeError on failure, timeout or cancellation."""
        met: Future[ProcessGroupGloo] = Future()
        thread = threading.Thread(
            target=self._meet, args=(met, cancelled), name="gloo-join", daemon=True
        )
        thread.start()
        try:
            while not met.done() and not cancelled.is_set():
                _wait(met)
        finally:  # also on Ctrl-C: leave no thread behind that holds the port
            if not met.done():
                self._abandon(cancelled)
                thread.join(_ABANDONED_S)
        return met.result(timeout=0) if met.done() else _raise_cancelled()

    def _meet(self, met: Future[ProcessGroupGloo], cancelled: threading.Event) -> None:
        try:
            met.set_result(self._connect(cancelled))
        except Exception as error:  # whatever it is, it is the caller's to see
            # without its frames, which hold the store and with it the port
            met.set_exception(error.with_traceback(None))

    def _connect(self, cancelled: threading.Event) -> ProcessGroupGloo:
        """Open the store, then connect with every other rank, whose addresses are in there."""
        deadline = time.monotonic() + self.timeout_s
        if self.rank != 0:
            self._await_port(deadline, cancelled)
        store: Store = PrefixStore(self.uri, self._open_store(_left_s(deadline)))
        if cancelled.is_set():
            _raise_cancelled()
        timeout = timedelta(seconds=_left_s(deadline))
        store.set_timeout(timeout)
        backend = ProcessGroupGloo(store, self.rank, self.world_size, timeout=timeout)
        backend._set_sequence_number_for_group()  # older torch writes a key here, as peers do
        return backend

    def _open_store(self, timeout_s: float) -> TCPStore:
        """Host the store on rank 0, connect elsewhere; rank 0 waits until all have come.

        Never shared inside a process: what an attempt before left in it would spoil this one.
        """
        return TCPStore(
            self.host,
            self.port,
            world_size=self.world_size,
            is_master=self.rank == 0,
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=False,
        )

    def _await_port(self, deadline: float, cancelled: threading.Event) -> None:
        """Wait until rank 0 listens. TCPStore would, but for twice its timeout."""
        while not cancelled.wait(_POLL_S):
            try:
                socket.create_connection((self.host, self.port), _left_s(deadline)).close()
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise RuntimeError(f"timed out, rank 0 does not listen: {error}") from error
            else:
                return
        _raise_cancelled()

    def _abandon(self, cancelled: threading.Event) -> None:
        """Make rank 0's wait end by counting in for those who did not come."""
        cancelled.set()
        if self.rank != 0:
            return
        with contextlib.suppress(RuntimeError):  # the store may be gone by itself
            for _ in range(self.world_size - 1):
                TCPStore(
                    self.host,
                    self.port,
                    world_size=self.world_size,
                    is_master=False,
                    timeout=timedelta(seconds=1),
                )


def _raise_cancelled() -> NoReturn:
    raise RuntimeError("cancelled")


def _wait(met: Future[ProcessGroupGloo]) -> None:
    with contextlib.suppress(Exception):  # told by the future's own state
        met.exception(timeout=_POLL_S)


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), _SHORTEST_WAIT_S)
