"""What a trainer's sender tells its other ranks, between two real processes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from fleet.client.ranks import SenderFailed, TrainerRanks
from fleet.sim.trainer import free_port

BEGINNING = """
import os, sys
from torch import distributed
from fleet.client.ranks import SenderFailed, TrainerRanks

rank = int(sys.argv[1])
distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2
)
ranks = TrainerRanks.of_torch(timeout_s=30)

def attempt(work):
    try:
        print(work(), flush=True)
    except (SenderFailed, ZeroDivisionError) as error:
        print(type(error).__name__, str(error), flush=True)
"""


def started(script: str) -> list[subprocess.Popen[str]]:
    """Run the same lines on both ranks."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, "-c", BEGINNING + script, str(rank), port],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def test_what_fails_on_the_sender_fails_everywhere_and_the_next_thing_may_go_well() -> None:
    """Work of the sender alone, and work of all that fails there; nobody waits for ever."""
    ranks = started(
        """
attempt(lambda: ranks.on_sender(lambda: 7))
attempt(lambda: ranks.on_sender(lambda: 1 // 0))
attempt(lambda: ranks.on_all(lambda: 1 // 0 if rank == 0 else 8))
if rank == 1:
    attempt(lambda: ranks.on_sender(lambda: 9))
attempt(lambda: ranks.on_sender(lambda: 10))
"""
    )
    sender, other = (rank.communicate(timeout=60)[0].splitlines() for rank in ranks)
    zero = "integer division or modulo by zero"
    assert sender == ["7", f"ZeroDivisionError {zero}", f"ZeroDivisionError {zero}", "10"]
    failed = f"SenderFailed ZeroDivisionError: {zero}"
    assert other == ["None", failed, "8", failed, "None"]


def test_a_sender_that_dies_is_noticed_at_once() -> None:
    """Long before the bound on waiting for its word."""
    sender, other = started(
        """
if rank == 0:
    ranks.tell("up")
    import signal; signal.pause()
attempt(ranks.hear)
attempt(ranks.hear)
os._exit(0)
"""
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "up\n"
    began = time.monotonic()
    sender.kill()
    assert other.stdout.readline().startswith("SenderFailed no word from trainer rank 0")
    assert time.monotonic() - began < 15
    for rank in (sender, other):
        rank.communicate(timeout=60)


def test_a_trainer_of_one_rank_needs_nobody_and_no_torch() -> None:
    """Nobody to tell, nobody to hear."""
    alone = TrainerRanks()
    assert alone.on_sender(lambda: 7) == alone.on_all(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        alone.on_sender(lambda: 1 // 0)
    assert issubclass(SenderFailed, RuntimeError)
