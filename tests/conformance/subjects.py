"""The two subjects of the conformance suite, each as a context manager that yields a `Subject`.

The simulator runs on a loop in a thread of its own, so that both subjects are another party on
the far side of a socket and the tests are plain synchronous code.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from fleet.sim import SimFleet
from fleet.sim.weights import build_state_dict

StateDict = dict[str, torch.Tensor]
SIM_BLOCK_SIZE = 128  # as vLLM has on CPUs
CONTEXT = 4096  # as the tiny model has


@dataclass(frozen=True)
class Subject:
    """A running server: where it is, what its model is called, and weights that fit it."""

    url: str
    model: str
    weights: Callable[[int], StateDict]


class StartSubject(Protocol):
    """Starts a server that may keep logs and models in a directory."""

    def __call__(self, directory: Path) -> AbstractContextManager[Subject]:
        """Start it; leaving the context stops it."""
        ...


def chosen() -> str:
    """``sim`` or ``vllm``. Raises ValueError for anything else."""
    name = os.environ.get("CONFORMANCE_SUBJECT", "sim")
    if name not in STARTERS:
        raise ValueError(f"CONFORMANCE_SUBJECT must be one of {sorted(STARTERS)}, got {name!r}")
    return name


@contextmanager
def simulated(directory: Path) -> Generator[Subject]:
    """A simulated replica that is configured as the real one is."""
    del directory
    fleet = SimFleet(
        block_size=SIM_BLOCK_SIZE,
        max_model_len=CONTEXT,
        token_delay_ms=1.0,
        draft_model=False,
        lora=False,
        model="tiny",
    )
    with _on_its_own_loop(fleet):
        yield Subject(fleet.urls[0], fleet.options.model, build_state_dict)


@contextmanager
def _on_its_own_loop(fleet: SimFleet) -> Generator[None]:
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with fleet:
            started.set()
            await stop.wait()

    def run_loop() -> None:
        try:
            loop.run_until_complete(run())
        finally:
            loop.close()

    thread = threading.Thread(target=run_loop, name="simulated subject")
    thread.start()
    try:
        assert started.wait(30)
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@contextmanager
def real(directory: Path) -> Generator[Subject]:
    """A real vLLM server on the CPU, with a tiny random model."""
    # Imported here: the environment of the simulator has no transformers.
    from tests.e2e.real_vllm import MODEL_NAME, running_fleet
    from tests.e2e.tiny_model import save_model, weights

    model = save_model(directory / "model", seed=0)
    with on_one_cpu(), running_fleet(model, directory, count=1) as servers:
        yield Subject(servers.urls[0], MODEL_NAME, weights)


@contextmanager
def on_one_cpu() -> Generator[None]:
    """What this thread starts shares one CPU with it, and so takes turns with it.

    A virtual machine may park a CPU on which only a light process waits: while a real engine
    computed on the other one, a test was seen to stand still for seconds, until all was over
    that it wanted to watch. Processes on the same CPU wait milliseconds for each other.
    """
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, everywhere)


STARTERS: dict[str, StartSubject] = {"sim": simulated, "vllm": real}
