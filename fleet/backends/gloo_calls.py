"""The trainer's HTTP calls beside its collectives, for both gloo trainers.

Init and update block until every worker has entered the collective that this side must enter too,
so they run in a thread. A call that fails ends the collective, and what it said is what is raised.

It imports torch, never vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from fleet.backends.gloo_group import GlooError, GlooGroup, join_group

_LAST_WORD_S = 10.0  # after a broken collective: how long the other side may take to say why


class Meeting(Protocol):
    """Where a group meets; a trainer's init info has it."""

    master_address: str
    master_port: int
    world_size: int
    rank: int
    timeout_s: float

    def worker_payload(self) -> dict[str, Any]:
        """The init body for the workers."""
        ...


class InitClient(Protocol):
    """As much of vLLM's client as a meeting needs."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join."""
        ...


def meet_workers(client: InitClient, meeting: Meeting) -> GlooGroup:
    """Join the group while the other side is told to; raise what the client raised if it refused.

    Raises GlooError if the group failed by itself.
    """
    refused = threading.Event()
    answer = call_beside(
        lambda: client.init_weight_transfer_engine(meeting.worker_payload()),
        on_failure=refused.set,
    )
    try:
        group = join_group(
            meeting.master_address,
            meeting.master_port,
            meeting.rank,
            meeting.world_size,
            timeout_s=meeting.timeout_s,
            cancelled=refused,
        )
    except GlooError:
        if refused.is_set():
            answer.result()
        raise
    try:
        answer.result()
    except BaseException:
        group.close()
        raise
    return group


def call_beside(function: Callable[[], None], *, on_failure: Callable[[], None]) -> Future[None]:
    """Run `function` beside the collective, in a thread that no exit waits for."""
    answer: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            answer.set_exception(error)
            on_failure()
        else:
            answer.set_result(None)

    threading.Thread(target=run, name="gloo-call", daemon=True).start()
    return answer


def answer_or_breakage(answer: Future[None], broken: GlooError) -> BaseException:
    """Return why the other side failed, if it says so soon, else that the group broke."""
    try:
        return answer.exception(timeout=_LAST_WORD_S) or broken
    except TimeoutError:
        return broken
