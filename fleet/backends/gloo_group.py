"""A gloo process group between one trainer and the workers of a fleet, on CPUs.

Why: vLLM's own weight-transfer backends need CUDA. Gloo moves the same bytes between CPUs, so
the whole protocol, collective behaviour included, can be run on any machine. The trainer, real
vLLM workers and simulated replicas all join through this one module.

A tensor travels as its plain bytes, one broadcast for each. The rendezvous, in
`gloo_meeting.py`, is vLLM's own, so a peer may just as well use vLLM's function.

Gloo cannot be interrupted: its calls end when the peers come, or at the timeout. Here the caller
waits in Python instead, so a join can be cancelled, a broadcast ended by closing the group from
another thread, and Ctrl-C works.

What it does not do: know names, metadata or HTTP, or touch torch's global process group. It
imports torch only, never vLLM.
"""

import atexit
import threading
import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo

from fleet.backends.gloo_meeting import Meeting

DEFAULT_TIMEOUT_S = 300.0


class GlooError(RuntimeError):
    """A collective failed; the group it happened in is closed and of no further use."""


class GlooTimeoutError(GlooError, TimeoutError):
    """A join or a broadcast did not complete within the group's timeout."""


class GlooGroup:
    """One rank's place in a group that is complete; made by `join_group`.

    One broadcast at a time: like every collective they are matched by their order.
    """

    def __init__(
        self, backend: ProcessGroupGloo, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._backend: ProcessGroupGloo | None = backend
        self._wake = threading.Event()  # a broadcast ended, or the group was closed under it
        self._one_closes = threading.Lock()

    def __repr__(self) -> str:
        state = "open" if self._backend is not None else "closed"
        return f"<GlooGroup rank={self.rank}/{self.world_size} {state}>"

    @property
    def closed(self) -> bool:
        """Whether the group was left, by `close` or by a failure; it cannot be used again."""
        return self._backend is None

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Send `tensor` from rank `src`, or fill it in place on every other rank; blocks.

        Any dtype, layout and device: what moves is a byte view, staged in host memory where the
        tensor itself is not there. Shape and dtype must agree on all ranks.

        Raises `GlooTimeoutError` after `timeout_s`, and `GlooError` if a peer is gone or `close`
        was called meanwhile. A failure closes the group, so that peers that wait for this rank
        fail too instead of hanging.
        """
        staged = tensor.detach().to("cpu").contiguous()
        if staged.numel() == 0:
            return
        self._broadcast_bytes(staged.reshape(-1).view(torch.uint8), src)
        if self.rank != src and staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)

    def close(self) -> None:
        """Leave the group, closing its connections and the store; idempotent, from any thread.

        Once it returns, and before a broadcast beside it does, the interpreter's exit knows what to
        wait for: whoever learns that the group is closed may end the process.
        """
        with self._one_closes:
            held = [self._backend]
            self._backend = None
            if held[0] is not None:
                # This waits for gloo's own threads, which may sit in a call until its timeout.
                _let_go(held)
        self._wake.set()

    def _broadcast_bytes(self, view: torch.Tensor, src: int) -> None:
        self._wake.clear()
        began = time.monotonic()
        try:
            self._run(view, src)
        except RuntimeError as error:
            # Its frames hold the work, and with that the connections, for as long as it is kept.
            error.with_traceback(None)
            self.close()
            raise _broadcast_error(self, time.monotonic() - began, error) from error

    def _run(self, view: torch.Tensor, src: int) -> None:
        work = self._start(view, src)
        work.get_future().add_done_callback(lambda _: self._wake.set())
        self._wake.wait()
        if self._backend is None:
            raise RuntimeError("the group was closed meanwhile")
        work.wait()

    def _start(self, view: torch.Tensor, src: int) -> Work:
        backend = self._backend
        if backend is None:
            raise RuntimeError("the group is closed")
        options = BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        options.timeout = timedelta(seconds=self.timeout_s)
        # torch's stub leaves out what this class inherits
        return backend.broadcast([view], options)  # pyright: ignore[reportAttributeAccessIssue]


_closing: set[threading.Thread] = set()
EXIT_WAIT_S = 10.0
"""How long the interpreter's exit waits for groups that are being let go: a thread that comes
back from gloo after the interpreter is gone would abort the process."""


def _let_go(held: list[ProcessGroupGloo | None]) -> None:
    """Drop the last reference in a thread of its own, which the interpreter's exit waits for.

    The group comes in a list, so that no caller's frame holds it and has to free it instead.
    """

    def drop() -> None:
        held.clear()
        _closing.discard(threading.current_thread())

    thread = threading.Thread(target=drop, name="gloo-close", daemon=True)
    _closing.add(thread)
    thread.start()


@atexit.register
def _wait_for_closing() -> None:
    ends = time.monotonic() + EXIT_WAIT_S
    for thread in tuple(_closing):
        if thread.is_alive():
            thread.join(max(0.0, ends - time.monotonic()))


def join_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    cancelled: threading.Event | None = None,
) -> GlooGroup:
    """Join the group at ``master_address:master_port`` and return once every rank is there.

    Rank 0 opens the port and must be able to bind it; the others may come earlier and wait.
    `master_address` must be spelled alike on all ranks: it is part of the keys in the store.
    `timeout_s` bounds this call as a whole, and afterwards each broadcast. Setting `cancelled`
    from another thread ends the wait, and frees the port unless all ranks had just arrived.

    Raises `GlooTimeoutError` when not all ranks came in time, `GlooError` when the rendezvous
    was cancelled or failed otherwise (such as a port in use), and ValueError for a rank outside
    the group.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a group of {world_size}")
    meeting = Meeting(master_address, master_port, rank, world_size, timeout_s)
    began = time.monotonic()
    try:
        backend = meeting.run(cancelled or threading.Event())
    except RuntimeError as error:
        raise _join_error(meeting, time.monotonic() - began, error) from error
    return GlooGroup(backend, rank, world_size, timeout_s)


def _join_error(meeting: Meeting, elapsed_s: float, cause: RuntimeError) -> GlooError:
    what = (
        f"rank {meeting.rank} could not join the gloo group of {meeting.world_size} "
        f"at {meeting.uri}"
    )
    if _is_timeout(cause):
        return GlooTimeoutError(
            f"{what}: not all ranks came within {elapsed_s:.1f} s ({_first_line(cause)})"
        )
    return GlooError(f"{what}: {_first_line(cause)}")


def _broadcast_error(group: GlooGroup, elapsed_s: float, cause: RuntimeError) -> GlooError:
    what = f"{group!r}: broadcast failed after {elapsed_s:.1f} s"
    if _is_timeout(cause):
        return GlooTimeoutError(f"{what}, a peer did not take part: {_first_line(cause)}")
    return GlooError(f"{what}: {_first_line(cause)}")


def _is_timeout(cause: RuntimeError) -> bool:
    text = str(cause).lower()  # torch has no class of its own for it
    return "timed out" in text or "timeout" in text


def _first_line(cause: RuntimeError) -> str:
    return str(cause).strip().partition("\n")[0]
