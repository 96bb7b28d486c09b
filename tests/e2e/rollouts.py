"""Rollouts as an RL job has them: several at a time, without a break, half of them streamed.

What they are for: to be in flight while a test changes the weights, and to tell afterwards what
became of every one of them. They ask for greedy tokens, so that an answer can be held against
the weights that its label names.
"""

import json
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.real_vllm import MODEL_NAME

IN_FLIGHT = 6
TOKENS = 96
ANSWER_S = 120.0


@dataclass(frozen=True)
class Answer:
    """One complete answer; `ended` is the version under which it was completed, if it was told."""

    prompt: list[int]
    tokens: list[int]
    streamed: bool
    version: str
    ended: str
    replica: str

    @property
    def made_by_one_version(self) -> bool:
        """Whether its headers, sent with its last byte, say that no update came between."""
        return not self.streamed and self.version == self.ended


@dataclass
class Rollouts:
    """All rollouts of a test; `lost` says of each one that failed how it did."""

    url: str
    answers: list[Answer] = field(default_factory=list[Answer])
    lost: list[str] = field(default_factory=list[str])
    _stop: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for_more(self, count: int) -> None:
        """Return once `count` more rollouts have been answered."""
        with self._changed:
            wanted = self._ended() + count
            assert self._changed.wait_for(lambda: self._ended() >= wanted, ANSWER_S)

    def keep_asking(self, number: int) -> None:
        """Ask one after the other until told to stop."""
        asked = 0
        with httpx.Client(base_url=self.url, timeout=ANSWER_S, trust_env=False) as http:
            while not self._stop:
                asked += 1
                prompt = [7 + number, 40 + asked % 400, 12, 45]
                self._note(lambda p=prompt: ask(http, p, TOKENS, streamed=number % 2 == 0))

    def stop(self) -> None:
        """Let those under way be the last."""
        self._stop = True

    def _note(self, call: Any) -> None:
        try:
            answer = call()
        except (httpx.HTTPError, AssertionError, ValueError, KeyError) as error:
            with self._changed:
                self.lost.append(repr(error))
                self._changed.notify_all()
        else:
            with self._changed:
                self.answers.append(answer)
                self._changed.notify_all()

    def _ended(self) -> int:
        return len(self.answers) + len(self.lost)


@contextmanager
def rollouts_through(url: str) -> Generator[Rollouts]:
    """Keep IN_FLIGHT rollouts in flight; all of them have ended when the context is left."""
    rollouts = Rollouts(url)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        askers = [pool.submit(rollouts.keep_asking, number) for number in range(IN_FLIGHT)]
        try:
            yield rollouts
        finally:
            rollouts.stop()
    for asker in askers:
        asker.result()


def ask(http: httpx.Client, prompt: list[int], count: int, *, streamed: bool = False) -> Answer:
    """Ask for `count` greedy tokens; anything but a complete answer is an error."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": streamed,
    }
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = list(response.iter_lines())
    assert response.status_code == 200, f"{response.status_code}: {lines}"
    tokens, reason = _streamed(lines) if streamed else _whole(lines)
    assert reason == "length", f"ended by {reason}"
    assert len(tokens) == count, f"{len(tokens)} of {count} tokens"
    version = response.headers["X-Weight-Version"]
    return Answer(
        prompt=prompt,
        tokens=tokens,
        streamed=streamed,
        version=version,
        ended=response.headers.get("X-Weight-Version-End", version),
        replica=response.headers["X-Fleet-Replica"],
    )


def _whole(lines: list[str]) -> tuple[list[int], str | None]:
    choice = json.loads("".join(lines))["choices"][0]
    return choice["token_ids"], choice["finish_reason"]


def _streamed(lines: list[str]) -> tuple[list[int], str | None]:
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]", f"the stream broke off after {events[-1]}"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    tokens = [token for choice in choices for token in choice["token_ids"] or ()]
    return tokens, choices[-1]["finish_reason"]
