"""The gloo group among threads and processes of one machine; no vLLM.

That vLLM's own group speaks the same on the wire is in tests/e2e.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fleet.backends import gloo_group
from fleet.backends.gloo_group import GlooError, GlooGroup, GlooTimeoutError, join_group
from tests.ports import free_port

HOST = "127.0.0.1"
PEER = """
import os, signal, sys, torch
from fleet.backends.gloo_group import join_group
group = join_group("127.0.0.1", int(sys.argv[1]), int(sys.argv[2]), 3, timeout_s=60)
group.broadcast(torch.zeros(1))
if sys.argv[2] == "2":
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    for _ in range(10):
        group.broadcast(torch.zeros(1_000_000))
except RuntimeError as error:
    kept = error
    print(type(error).__name__, flush=True)
sys.stdin.read()
"""


@contextmanager
def pair(timeout_s: float = 20.0) -> Generator[tuple[GlooGroup, GlooGroup]]:
    """Ranks 0 and 1 of one group, in this process."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        joins = [
            pool.submit(join_group, HOST, port, rank, 2, timeout_s=timeout_s) for rank in (0, 1)
        ]
        groups = joins[0].result(), joins[1].result()
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def exchange(groups: tuple[GlooGroup, GlooGroup], sent: torch.Tensor, got: torch.Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(groups[1].broadcast, got)
        groups[0].broadcast(sent)
        receiving.result()


def test_every_dtype_shape_and_layout_arrives_as_it_was_sent() -> None:
    """Gloo knows few dtypes; bytes travel, so that all do: scalars, views and nothing at all."""
    with pair() as groups:
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool):
            sent = torch.arange(12).reshape(3, 4).to(dtype)
            got = torch.zeros(3, 4).to(dtype)
            exchange(groups, sent, got)
            assert torch.equal(sent.view(torch.uint8), got.view(torch.uint8))
        turned = torch.zeros(4, 3).t()
        exchange(groups, torch.arange(12.0).reshape(3, 4), turned)
        assert torch.equal(turned, torch.arange(12.0).reshape(3, 4))
        exchange(groups, scalar := torch.tensor(7.0, requires_grad=True), got := torch.tensor(0.0))
        assert got == scalar
        exchange(groups, torch.zeros(0, 3), torch.zeros(0, 3))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_join_that_nobody_answers_ends_at_its_timeout(rank: int) -> None:
    """It says so with its own error, which is a TimeoutError too."""
    began = time.monotonic()
    with pytest.raises(GlooTimeoutError, match="not all ranks came") as refusal:
        join_group(HOST, free_port(), rank, 2, timeout_s=1)
    assert isinstance(refusal.value, TimeoutError)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cancelled_join_ends_at_once_and_frees_its_port(rank: int) -> None:
    """A trainer whose init was refused may try again at the same address."""
    port, cancelled = free_port(), threading.Event()
    threading.Timer(0.3, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(GlooError, match="cancelled"):
        join_group(HOST, port, rank, 4, timeout_s=60, cancelled=cancelled)
    assert time.monotonic() - began < 5
    socket.create_server((HOST, port)).close()


def test_a_port_in_use_is_an_error_and_no_timeout() -> None:
    """The reason is in the message, long before the timeout."""
    with socket.create_server((HOST, 0)) as taken, pytest.raises(GlooError, match="in use"):
        join_group(HOST, taken.getsockname()[1], 0, 2, timeout_s=60)


def test_a_rank_outside_its_group_is_refused() -> None:
    """Before anything is opened."""
    with pytest.raises(ValueError, match="rank 2 is outside a group of 2"):
        join_group(HOST, free_port(), 2, 2)


def test_a_broadcast_that_nobody_answers_ends_at_its_timeout_and_closes_the_group() -> None:
    """The group cannot be used after that, and says so."""
    with pair(timeout_s=1) as (trainer, _):
        with pytest.raises(GlooTimeoutError, match="did not take part"):
            trainer.broadcast(torch.zeros(4))
        assert trainer.closed
        with pytest.raises(GlooError, match="closed"):
            trainer.broadcast(torch.zeros(4))


def test_closing_a_group_from_another_thread_ends_its_broadcast() -> None:
    """Gloo itself would wait for the timeout."""
    with pair() as (trainer, _):
        threading.Timer(0.3, trainer.close).start()
        with pytest.raises(GlooError, match="closed meanwhile"):
            trainer.broadcast(torch.zeros(4))


def test_whoever_learns_that_a_group_is_closed_may_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exit waits for gloo's threads by then: one that came back later would abort it."""
    entered, may_go_on, let_go = threading.Event(), threading.Event(), gloo_group._let_go

    def slowly(held: list[Any]) -> None:
        entered.set()
        may_go_on.wait(20)
        let_go(held)

    with pair() as (trainer, _), ThreadPoolExecutor(3) as pool:
        broadcasting = pool.submit(trainer.broadcast, torch.zeros(4))
        monkeypatch.setattr(gloo_group, "_let_go", slowly)
        pool.submit(trainer.close)
        assert entered.wait(20)
        closing_too = pool.submit(trainer.close)
        done, _ = wait((broadcasting, closing_too), timeout=0.5)
        may_go_on.set()
        assert not done
        with pytest.raises(GlooError, match="closed"):
            broadcasting.result(20)
        closing_too.result(20)


def test_when_one_rank_dies_every_other_one_is_told_at_once() -> None:
    """Also the one that had no part in the broken connection, while the others live on."""
    port = str(free_port())
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", PEER, port, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        os.waitid(os.P_PID, peers[2].pid, os.WSTOPPED | os.WNOWAIT)
        peers[2].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        said = [peer.stdout.readline().strip() for peer in peers[:2] if peer.stdout]
        assert said == ["GlooError", "GlooError"]
        assert time.monotonic() - killed < 10
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()
