"""A gloo process group between one trainer and the workers of a fleet, on CPUs.

Why: vLLM's own weight-transfer backends need CUDA. Gloo moves the same bytes between CPUs, so
the whole protocol, collective behaviour included, can be run on any machine. The trainer, real
vLLM workers and simulated replicas all join through this one module.

The rendezvous is that of ``stateless_init_torch_distributed_process_group(host, port, rank,
world_size, backend="gloo")`` (vLLM 0.32 and 0.33, ``vllm/distributed/utils.py``): rank 0 hosts a
``TCPStore``, and all keys live under the prefix ``tcp://host:port``. So a peer may just as well
use vLLM's function. A tensor travels as its plain bytes, one broadcast for each.

What it does not do: know names, metadata or HTTP, or touch torch's global process group. It
imports torch only, never vLLM.
"""

import ipaddress
import socket
import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo

DEFAULT_TIMEOUT_S = 300.0
_SHORTEST_WAIT_S = 0.1  # what is left for the last step of a join that used up its time
_KNOCK_EVERY_S = 0.1


class GlooError(RuntimeError):
    """A collective failed; the group it happened in is closed and of no further use."""


class GlooTimeoutError(GlooError, TimeoutError):
    """A join or a broadcast did not complete within the group's timeout."""


class GlooGroup:
    """One rank's place in a group that is complete; made by `join_group`.

    Not safe for two broadcasts at once: like every collective they are matched by order.
    """

    def __init__(
        self, backend: ProcessGroupGloo, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._backend: ProcessGroupGloo | None = backend

    def __repr__(self) -> str:
        state = "open" if self._backend is not None else "closed"
        return f"<GlooGroup rank={self.rank}/{self.world_size} {state}>"

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Send `tensor` from rank `src`, or fill it in place on every other rank; blocks.

        Any dtype, layout and device: what moves is a byte view, staged in host memory where the
        tensor itself is not there. Shape and dtype must agree on all ranks.

        Raises `GlooTimeoutError` after `timeout_s`, and `GlooError` if a peer is gone. Either
        closes the group, so that peers which wait for this rank fail too instead of hanging.
        """
        staged = tensor.detach().to("cpu").contiguous()
        if staged.numel() == 0:
            return
        self._broadcast_bytes(staged.reshape(-1).view(torch.uint8), src)
        if self.rank != src and staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)

    def close(self) -> None:
        """Leave the group, closing its connections and the store; idempotent."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.shutdown()

    def _broadcast_bytes(self, view: torch.Tensor, src: int) -> None:
        if self._backend is None:
            raise GlooError(f"{self!r}: the group is closed")
        options = BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        options.timeout = timedelta(seconds=self.timeout_s)
        began = time.monotonic()
        try:
            # torch's stub leaves out what this class inherits
            self._backend.broadcast([view], options).wait()  # pyright: ignore[reportAttributeAccessIssue]
        except RuntimeError as error:
            self.close()
            raise _broadcast_error(self, time.monotonic() - began, error) from error


def join_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> GlooGroup:
    """Join the group at ``master_address:master_port`` and return once every rank is there.

    Rank 0 opens the port and must be able to bind it; the others may come earlier and wait.
    `master_address` must be spelled alike on all ranks: it is part of the keys in the store.
    `timeout_s` bounds this call as a whole, and afterwards each broadcast. The wait releases the
    interpreter lock but cannot be cancelled: call it from a thread where a loop must go on.

    Raises `GlooTimeoutError` when not all ranks came in time, `GlooError` when the rendezvous
    failed otherwise (such as a port in use), and ValueError for a rank outside the group.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a group of {world_size}")
    began = time.monotonic()
    uri = _tcp_uri(master_address, master_port)
    try:
        store = _open_store(master_address, master_port, rank, world_size, timeout_s)
        left_s = max(timeout_s - (time.monotonic() - began), _SHORTEST_WAIT_S)
        backend = _connect(PrefixStore(uri, store), rank, world_size, left_s)
    except RuntimeError as error:
        raise _join_error(uri, rank, world_size, time.monotonic() - began, error) from error
    return GlooGroup(backend, rank, world_size, timeout_s)


def _open_store(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> TCPStore:
    """Host the store on rank 0, connect elsewhere; returns when `world_size` ranks are there."""
    if rank != 0:
        timeout_s = _await_port(host, port, timeout_s)
    return TCPStore(
        host,
        port,
        world_size=world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=True,
    )


def _await_port(host: str, port: int, timeout_s: float) -> float:
    """Wait for rank 0 to listen; returns the seconds left. TCPStore alone waits twice as long."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), _SHORTEST_WAIT_S)
        try:
            socket.create_connection((host, port), timeout=left_s).close()
        except OSError as error:
            if time.monotonic() + _KNOCK_EVERY_S >= deadline:
                raise RuntimeError(f"timed out waiting for rank 0 to listen: {error}") from error
            time.sleep(_KNOCK_EVERY_S)
        else:
            return left_s


def _connect(store: Store, rank: int, world_size: int, timeout_s: float) -> ProcessGroupGloo:
    """Connect every rank with every other one; the addresses are exchanged through `store`."""
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    backend = ProcessGroupGloo(store, rank, world_size, timeout=timeout)
    backend._set_sequence_number_for_group()  # older torch writes a key here, as vLLM's side does
    return backend


def _tcp_uri(host: str, port: int) -> str:
    """The rendezvous URL, which is also the key prefix (vLLM ``get_tcp_uri``)."""
    try:
        v6 = ipaddress.ip_address(host).version == 6
    except ValueError:
        v6 = False
    return f"tcp://[{host}]:{port}" if v6 else f"tcp://{host}:{port}"


def _join_error(
    uri: str, rank: int, world_size: int, elapsed_s: float, cause: RuntimeError
) -> GlooError:
    what = f"rank {rank} could not join the gloo group of {world_size} at {uri}"
    if _is_timeout(cause):
        return GlooTimeoutError(
            f"{what}: not all ranks came within {elapsed_s:.1f} s ({_first_line(cause)})"
        )
    return GlooError(f"{what}: {_first_line(cause)}")


def _broadcast_error(group: GlooGroup, elapsed_s: float, cause: RuntimeError) -> GlooError:
    what = f"{group!r}: broadcast failed after {elapsed_s:.1f} s"
    if _is_timeout(cause):
        return GlooTimeoutError(f"{what}, a peer did not take part: {_first_line(cause)}")
    return GlooError(f"{what}, a peer is gone: {_first_line(cause)}")


def _is_timeout(cause: RuntimeError) -> bool:
    text = str(cause).lower()  # torch has no class of its own for it
    return any(mark in text for mark in ("timed out", "timeout", "wait timeout"))


def _first_line(cause: RuntimeError) -> str:
    return str(cause).strip().partition("\n")[0]
