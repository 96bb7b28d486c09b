"""How the conformance tests talk to their subject: HTTP only, errors and streams made readable."""

import json
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
ANSWER_S = 30.0
# After some 500s vLLM closes the connection without saying so: reuse would meet a reset.
NO_REUSE = httpx.Limits(max_keepalive_connections=0)
LONG = 1000  # tokens: over a second, so that what is done to such an answer is done in its middle
SOME_ROUND_TRIPS = 25  # long enough for several tokens, without a sleep


class Server:
    """An HTTP client for one server."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model
        self._http = httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, limits=NO_REUSE)
        self._pool = ThreadPoolExecutor(8)

    def close(self) -> None:
        """Drop connections and wait for background calls."""
        self._http.close()
        self._pool.shutdown()

    def get(self, path: str, *, timeout_s: float = ANSWER_S, **query: Any) -> httpx.Response:
        """GET with a query."""
        return self._http.get(path, params=query, timeout=timeout_s)

    def post(self, path: str, body: Any = None, **query: Any) -> httpx.Response:
        """POST a JSON body, or none, with a query."""
        return self._http.post(path, json=body, params=query)

    def post_raw(self, path: str, content: str) -> httpx.Response:
        """POST these characters, declared as JSON."""
        headers = {"Content-Type": "application/json"}
        return self._http.post(path, content=content, headers=headers)

    def ok(self, path: str, body: Any = None, **query: Any) -> Any:
        """POST that must succeed; its JSON."""
        reply = self.post(path, body, **query)
        assert reply.status_code == 200, reply.text
        return reply.json() if reply.content else None

    def value(self, path: str, key: str, **query: Any) -> Any:
        """One field of a GET that must succeed."""
        reply = self.get(path, **query)
        assert reply.status_code == 200, reply.text
        return reply.json()[key]

    def checksums(self) -> dict[str, str]:
        """The checksums of all parameters."""
        return self.ok("/weight_checker", {"action": "checksum"})["checksums"]

    def in_background(self, call: Callable[[], T]) -> "Future[T]":
        """Run a call in a thread."""
        return self._pool.submit(call)

    def some_time_passes(self) -> None:
        """A number of round trips: time for a few tokens, if tokens are made at all."""
        for _ in range(SOME_ROUND_TRIPS):
            self.get("/version")

    def completion_body(self, prompt: str | list[int], max_tokens: int, **more: Any) -> Any:
        """A greedy completion request that runs to its full length."""
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    def complete(self, prompt: str | list[int], max_tokens: int = 4, **more: Any) -> Any:
        """The JSON of a greedy completion, which must succeed."""
        return self.ok("/v1/completions", self.completion_body(prompt, max_tokens, **more))

    def logprobs(self, prompt: list[int], max_tokens: int = 4) -> list[float]:
        """The log-probabilities of the greedy tokens after a prompt."""
        choice = self.complete(prompt, max_tokens, logprobs=1)["choices"][0]
        return choice["logprobs"]["token_logprobs"]

    @contextmanager
    def stream(self, rid: str = "stream") -> "Generator[Stream]":
        """A streamed completion of LONG tokens, read by a thread; yielded once the first is here.

        Why so many: a real server makes a tiny model's tokens within a millisecond each, and its
        engine runs ahead of the connection that carries them.
        """
        stream = Stream()
        body = self.completion_body("once upon a time", LONG, stream=True, return_token_ids=True)
        done = self.in_background(lambda: self._read(stream, "/v1/completions", body, rid))
        stream.done = done
        try:
            assert stream.first.wait(ANSWER_S)
            yield stream
        finally:
            done.result(ANSWER_S)

    def _read(self, stream: "Stream", path: str, body: Any, rid: str) -> None:
        headers = {"X-Request-Id": rid}
        with self._http.stream("POST", path, json=body, headers=headers) as reply:
            stream.status = reply.status_code
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    stream.add(json.loads(line.removeprefix("data: ")))
        stream.first.set()


@dataclass
class Stream:
    """What has come of a stream so far."""

    status: int = 0
    tokens: int = 0
    finish_reason: str | None = None
    first: threading.Event = field(default_factory=threading.Event)
    done: "Future[None]" = field(default_factory=Future)

    def add(self, event: Any) -> None:
        """Count one event."""
        for choice in event["choices"]:
            self.tokens += len(choice.get("token_ids") or ())
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.first.set()

    def end(self) -> None:
        """Wait for the end of the stream."""
        self.done.result(ANSWER_S)


def error_of(reply: httpx.Response, status: int) -> str:
    """The message of an error answer of this status in vLLM's shape."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == status
    assert isinstance(error["type"], str)
    assert isinstance(error["message"], str)
    return error["message"]
