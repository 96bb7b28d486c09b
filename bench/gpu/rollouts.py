"""Rollouts through the gateway: one, or as many as keep every replica busy, each accounted for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

PROMPTS = ([7, 300, 12, 45], [40, 41, 42, 43, 44, 45, 46], [100, 7, 300, 12, 9, 88])
ANSWER_S = 120.0


@dataclass(frozen=True)
class Answer:
    """What became of one rollout; `error` is None if it is whole."""

    tokens: int = 0
    version: str = ""
    ended: str = ""
    replica: str = ""
    error: str | None = None
    known: tuple[int, int] = (0, 0)


def ask(url: str, count: int, number: int = 0, known: Callable[[], int] = lambda: 0) -> Answer:
    """Ask for `count` tokens; `known` tells how many versions have been committed."""
    prompt = PROMPTS[number % len(PROMPTS)]
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
    }
    before = known()
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_S, trust_env=False)
        answer.raise_for_status()
        tokens = int(answer.json()["usage"]["completion_tokens"])
    except (httpx.HTTPError, KeyError, ValueError) as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    told = answer.headers
    return Answer(
        tokens=tokens,
        version=told.get("x-weight-version", ""),
        ended=told.get("x-weight-version-end", told.get("x-weight-version", "")),
        replica=told.get("x-fleet-replica", ""),
        error=None if tokens == count else f"{tokens} of {count} tokens",
        known=(before, known()),
    )


@dataclass
class Crowd:
    """Rollouts in flight all the time, and the versions that were committed meanwhile, in order."""

    url: str
    tokens: int
    versions: list[str] = field(default_factory=lambda: ["default"])
    answers: list[Answer] = field(default_factory=list[Answer])
    stopped: threading.Event = field(default_factory=threading.Event)

    def keep_asking(self, number: int) -> None:
        """Ask one after the other until it is stopped."""
        while not self.stopped.is_set():
            self.answers.append(ask(self.url, self.tokens, number, lambda: len(self.versions)))
            number += 1

    @property
    def lost(self) -> list[str]:
        """Why each rollout failed that did."""
        return [answer.error for answer in self.answers if answer.error is not None]

    def mislabelled(self) -> list[Answer]:
        """Answers whose label cannot be: not committed yet, or an older one than was in force.

        A version is known here only after its commit was answered, so one more may be in force.
        """
        wrong: list[Answer] = []
        for answer in self.answers:
            earliest, latest = answer.known[0] - 1, answer.known[1]
            possible = self.versions[earliest : latest + 1]
            if answer.error is None and not {answer.version, answer.ended} <= set(possible):
                wrong.append(answer)
        return wrong


@contextmanager
def crowd(url: str, *, in_flight: int, tokens: int) -> Generator[Crowd]:
    """Keep that many rollouts in flight; all have ended when the block is left."""
    asking = Crowd(url, tokens)
    with ThreadPoolExecutor(in_flight) as pool:
        askers = [pool.submit(asking.keep_asking, number) for number in range(in_flight)]
        try:
            yield asking
        finally:
            asking.stopped.set()
    for asker in askers:
        asker.result()
