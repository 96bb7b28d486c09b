"""Rollouts that nobody wrote for this gateway, and one that outlives the weights it began with."""

import json
import os
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.gateway_process import RunningGateway
from tests.e2e.real_vllm import MODEL_NAME, RealFleet
from tests.e2e.tiny_model import build_model, made_by
from tests.e2e.trainer import TinyTrainer, joined_trainer

REQUESTS = 240
PER_S = 12  # so that they come for some 20 s, and updates find the time to be in between
BENCH_S = 300.0
PROMPT = [7, 300, 12, 45]
TOKENS = 3000  # of the stream: seconds, so that an update comes in its middle
CROWD = 16  # prompts of each rollout beside it
CROWD_TOKENS = 200
SOME = 5
OLD, NEW = 101, 102  # seeds of weights
LABEL = "X-Weight-Version"
QUIET_S = 1.0  # hundreds of tokens would have come in that time


def test_vllms_own_benchmark_fails_no_request_while_weights_change(
    gateway: RunningGateway, real_fleet: RealFleet, model_dir: Path, tmp_path: Path
) -> None:
    """`vllm bench serve` knows one URL; two updates pass under it, and every answer is whole."""
    gateway.wait_for_states("ready", "ready")
    with joined_trainer(gateway.url, world_size=3) as trainer:
        with benchmark(gateway.url, model_dir, tmp_path) as bench:
            for seed, count in ((91, 40), (92, 80)):
                gateway.wait_until(lambda n=count: answered(gateway) >= n, BENCH_S)
                trainer.send(seed)
            assert bench.poll() is None, "it was over before the updates were"
        assert bench.returncode == 0, (tmp_path / "bench.log").read_text()[-3000:]
    told = json.loads((tmp_path / "bench.json").read_text())
    assert (told["completed"], told["failed"]) == (REQUESTS, 0)
    assert told["total_output_tokens"] == REQUESTS * 32
    assert gateway.version == "2"
    assert real_fleet.alive() == [True, True]
    served = [replica["inflight"] for replica in gateway.get("/fleet/replicas")["replicas"]]
    assert served == [0, 0]


@pytest.mark.parametrize("paused_by", ["trainer", "round"])
def test_a_stream_that_a_weight_update_interrupts_goes_on_with_the_new_weights(
    gateway: RunningGateway, real_fleet: RealFleet, paused_by: str
) -> None:
    """One stream: tokens of the old weights, silence, tokens of the new ones, and none missing."""
    gateway.wait_for_states("ready", "ready")
    with (
        joined_trainer(gateway.url, world_size=3) as trainer,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        trainer.send(OLD)
        trainer.take(NEW)
        with crowd(gateway) as others, streaming(http) as stream:
            stream.read(until=SOME)
            before = interrupt(stream, trainer, http, paused_by)
        assert {other.status_code for other in others} == {200}
        ends = {(a.headers[LABEL], a.headers.get(f"{LABEL}-End")) for a in others}
        assert ends <= {("1", None), ("1", "2"), ("2", None)}
        assert stream.headers[LABEL] == "1"
        assert gateway.version == "2"
        check_stream(stream, before)
    assert real_fleet.alive() == [True, True]


def interrupt(
    stream: "Stream", trainer: TinyTrainer, http: httpx.Client, paused_by: str
) -> int | None:
    """Update the weights under the stream and read it to its end.

    Returns how many tokens had come before a pause of the trainer's own, None without one.
    """
    if paused_by != "trainer":
        trainer.engine.send_weights()
        stream.read()
        return None
    http.post("/pause?mode=keep").raise_for_status()
    with stream.read_by_a_thread():
        before = stream.wait_until_quiet()
        trainer.engine.send_weights()
        time.sleep(QUIET_S)
        assert len(stream.tokens) == before
        http.post("/resume").raise_for_status()
    return before


def beginning(stream: "Stream") -> int:
    """How many tokens the old weights have made, at most."""
    old, lengths = build_model(OLD), range(1, TOKENS + 1)
    return bisect_left(lengths, True, key=lambda n: not made_by(old, PROMPT, stream.tokens[:n]))


def check_stream(stream: "Stream", before: int | None) -> None:
    """The old weights made a beginning, the new ones the rest, in one stream."""
    assert f"{LABEL}-End" not in stream.headers
    assert len(set(stream.ids)) == 1
    assert (stream.reason, stream.is_over) == ("length", True)
    assert len(stream.tokens) == TOKENS
    count = beginning(stream)
    if before is not None:
        assert before <= count
        count = before
    assert SOME <= count < TOKENS
    assert made_by(build_model(NEW), PROMPT + stream.tokens[:count], stream.tokens[count:])


@dataclass
class Stream:
    """A streamed completion, read on when asked to."""

    headers: httpx.Headers
    lines: Iterator[str]
    tokens: list[int] = field(default_factory=list[int])
    ids: list[str] = field(default_factory=list[str])
    reason: str | None = None
    is_over: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def read(self, until: int = TOKENS + 1) -> None:
        """Read on until so many tokens have come, or to the end."""
        while len(self.tokens) < until and (line := next(self.lines, None)) is not None:
            with self._changed:
                self._take(line.removeprefix("data: "))
                self._changed.notify_all()

    @contextmanager
    def read_by_a_thread(self) -> Generator[None]:
        """Let a thread read to the end; it has when the context is left."""
        thread = threading.Thread(target=self.read)
        thread.start()
        try:
            yield
        finally:
            thread.join(120)
            assert not thread.is_alive()

    def wait_until_quiet(self) -> int:
        """Return how many tokens have come once no more are coming."""
        with self._changed:
            while self._changed.wait(QUIET_S):
                pass
            return len(self.tokens)

    def _take(self, event: str) -> None:
        if event == "[DONE]":
            self.is_over = True
        elif event:
            chunk: Any = json.loads(event)
            [choice] = chunk["choices"]
            self.ids.append(chunk["id"])
            self.tokens += choice["token_ids"] or ()
            self.reason = choice["finish_reason"]


@contextmanager
def streaming(http: httpx.Client) -> Generator[Stream]:
    """A stream under way."""
    body = body_of(PROMPT, TOKENS) | {"stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        yield Stream(answer.headers, answer.iter_lines())


@contextmanager
def crowd(gateway: RunningGateway) -> Generator[list[httpx.Response]]:
    """Keep both servers busy with one large rollout after the other; all have ended at the end."""
    body = body_of([PROMPT] * CROWD, CROWD_TOKENS)
    answers: list[httpx.Response] = []
    enough = threading.Event()

    def keep_asking() -> None:
        with httpx.Client(base_url=gateway.url, timeout=120) as http:
            while not enough.is_set():
                answers.append(http.post("/v1/completions", json=body))

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(keep_asking) for _ in range(2)]
        try:
            gateway.wait_until(lambda: in_flight(gateway) == 2)
            yield answers
        finally:
            enough.set()
        for asker in asking:
            asker.result()


def body_of(prompt: Any, count: int) -> dict[str, Any]:
    """Ask for so many greedy tokens."""
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@contextmanager
def benchmark(url: str, model_dir: Path, results: Path) -> Generator["subprocess.Popen[bytes]"]:
    """Run `vllm bench serve` against a URL, to its end."""
    command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve"]
    command += ["--base-url", url, "--model", MODEL_NAME, "--tokenizer", str(model_dir)]
    command += ["--dataset-name", "random", "--random-input-len", "16"]
    command += ["--random-output-len", "32", "--ignore-eos", "--num-prompts", str(REQUESTS)]
    command += ["--request-rate", str(PER_S), "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(results), "--result-filename", "bench.json"]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with (results / "bench.log").open("wb") as log:
        bench = subprocess.Popen(
            command, env={**os.environ, **quiet}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield bench
        bench.wait(BENCH_S)
    finally:
        bench.kill()
        bench.wait()


def answered(gateway: RunningGateway) -> float:
    """How many rollouts have been answered so far."""
    lines = httpx.get(f"{gateway.url}/metrics", timeout=60).text.splitlines()
    return sum(float(x.split(" ")[-1]) for x in lines if x.startswith("fleet_rollouts_total{"))


def in_flight(gateway: RunningGateway) -> int:
    """How many rollouts the replicas have."""
    return sum(replica["inflight"] for replica in gateway.get("/fleet/replicas")["replicas"])
