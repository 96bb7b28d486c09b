"""Generation on a simulated engine: one `SimRequest` for each prompt and choice.

A request asks the engine before every step. It waits while a pause or a collective holds it, ends
when it was aborted, and **kills the engine** when it steps, not paused, inside an update session
or after an update that failed (both seen on real servers), or arrives while the engine sleeps.

It knows no HTTP; `rollout.py` turns its steps into answers.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleet.sim.errors import EngineDead, Unavailable
from fleet.sim.generation import Context, logprob_of, prompt_digest, token_at

if TYPE_CHECKING:
    from fleet.sim.engine import SimEngine

_BURST_S = 0.004  # timers cost more than tokens: sleep at least this long, give what is due


@dataclass(frozen=True)
class Span:
    """Output tokens `start` to `end` (exclusive) and the weights that made them."""

    version: str
    checksum: str
    start: int
    end: int


@dataclass
class SimRequest:
    """One running generation; its tokens so far, and which weights made each of them."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    choice: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    digest: str = ""
    kv: str = ""
    kv_epoch: int | None = None  # the cache generation that `kv` belongs to
    admitted: bool = False
    aborted: bool = False

    def __post_init__(self) -> None:
        self.digest = prompt_digest(self.prompt)

    @property
    def finish_reason(self) -> str | None:
        """As vLLM names it: ``length``, ``abort``, or None while it runs."""
        if self.aborted:
            return "abort"
        return "length" if len(self.token_ids) >= self.max_tokens else None

    def add_token(self, weights: str, version: str, context: Context) -> None:
        """Compute one more token with these weights."""
        index = len(self.token_ids)
        self.token_ids.append(token_at(weights, context, index))
        self.logprobs.append(logprob_of(weights, context, index))
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.version, last.checksum) == (version, weights):
            self.spans[-1] = Span(version, weights, last.start, index + 1)
        else:
            self.spans.append(Span(version, weights, index, index + 1))


async def run(engine: "SimEngine", batch: Sequence[SimRequest]) -> AsyncIterator[None]:
    """Generate for the prompts and choices of one HTTP request, in step; yields after each step.

    Closing the iterator, or cancelling it, takes the batch off the engine. Raises `EngineDead` if
    the engine is or gets killed, and `Unavailable` if the paused server rejects requests.
    """
    await _arrive(engine, batch)
    try:
        while running := [request for request in batch if request.finish_reason is None]:
            await _delay(engine, running)
            for request in await _may_step(engine, running):
                _step(engine, request)
            yield
    finally:
        for request in batch:
            engine.requests.pop(id(request), None)
        engine.notify()


async def _arrive(engine: "SimEngine", batch: Sequence[SimRequest]) -> None:
    rejects = engine.options.pause_behaviour == "reject"
    if rejects and engine.paused in ("abort", "wait"):
        raise Unavailable("The server is paused and does not accept new requests.")
    if engine.in_collective:
        await engine.until(lambda: not engine.in_collective)
    engine.check_alive()
    if engine.sleeping and engine.options.asleep_behaviour == "die":
        engine.die()
        raise EngineDead
    for request in batch:
        engine.requests[id(request)] = request
        if engine.paused is None and not engine.sleeping:
            _context(engine, request)  # prefilled on arrival, so a pause finds it running


async def _delay(engine: "SimEngine", running: Sequence[SimRequest]) -> None:
    delay_s = engine.options.token_delay_ms / 1000
    if delay_s > 0:
        left = max(request.max_tokens - len(request.token_ids) for request in running)
        await asyncio.sleep(min(_burst(delay_s), left) * delay_s)


def _burst(delay_s: float) -> int:
    return max(1, math.ceil(_BURST_S / delay_s))


async def _may_step(engine: "SimEngine", running: list[SimRequest]) -> list[SimRequest]:
    """Wait until the scheduler runs these requests; those aborted meanwhile are left out."""

    def wanted() -> list[SimRequest]:
        return [request for request in running if not request.aborted]

    def free() -> bool:
        return not any(_held(engine, request) for request in wanted())

    if not free():
        await engine.until(free)
    engine.check_alive()
    if wanted() and engine.in_pieces:  # not paused, between start and finish
        engine.die()
        raise EngineDead
    return wanted()


def _held(engine: "SimEngine", request: SimRequest) -> bool:
    if engine.in_collective or engine.paused == "keep" or engine.sleeping:
        return True
    return engine.paused is not None and not request.admitted


def _step(engine: "SimEngine", request: SimRequest) -> None:
    """Compute the tokens that are due, prefilling first if this request's KV is not there."""
    context = _context(engine, request)
    delay_s = engine.options.token_delay_ms / 1000
    due = _burst(delay_s) if delay_s > 0 else request.max_tokens
    for _ in range(min(due, request.max_tokens - len(request.token_ids))):
        request.add_token(engine.checksum, engine.version, context)


def _context(engine: "SimEngine", request: SimRequest) -> Context:
    if request.kv_epoch != engine.cache_epoch:
        request.kv = engine.cache.prefill(request.prompt, engine.checksum)
        request.kv_epoch = engine.cache_epoch
    request.admitted = True
    return Context(request.digest, request.kv, request.choice)
