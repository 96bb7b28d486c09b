"""`fleet sim` as a process: what it refuses, and what it keeps to itself."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from fleet.backends.gloo_group import GlooError, join_group
from tests.ports import free_port

FLEET = str(Path(sys.executable).with_name("fleet"))
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("FLEET_", "TORCH_"))}


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ("--replicas 0", "replicas must be at least 1, got 0"),
        ("--replicas 1 --world-size 0", "world_size must be at least 1, got 0"),
        ("--replicas 1 --backend foo", "backend must be one of gloo, nccl, "),
        ("--replicas 1 --token-delay-ms -1", "token_delay_ms must be 0 or more, got -1.0"),
        ("--replicas 1 --token-delay-ms nan", "token_delay_ms must be 0 or more, got nan"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_in_one_line_without_talk_of_ports(
    arguments: str, fact: str
) -> None:
    """What is wrong and where to look; other ports would not help."""
    ended = _ended(*arguments.split())
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"fleet: {fact}")
    assert ended.stderr.endswith("; fleet sim --help says what there is\n")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("--base-port 65535", "choose other ports with --base-port"),
        ("--base-port 0 --control-port 65536", "ports with --base-port or --control-port"),
    ],
)
def test_ports_that_cannot_be_had_are_one_line_that_says_which_option(
    arguments: str, advice: str
) -> None:
    """Here other ports do help."""
    ended = _ended("--replicas", "2", *arguments.split())
    assert ended.returncode == 2
    assert ended.stderr.endswith(f"{advice}\n")
    assert len(ended.stderr.splitlines()) == 1


def test_a_join_that_was_abandoned_leaves_no_stack_trace_on_the_terminal() -> None:
    """Torch's C++ would print twenty lines for each; what failed is in the call's answer."""
    with _running("--replicas", "1", "--base-port", "0") as (process, url):
        port, answers = free_port(), list[httpx.Response]()
        info = {"master_address": "127.0.0.1", "master_port": port}
        body = {"init_info": {**info, "rank_offset": 1, "world_size": 3}}

        def init() -> None:
            path = f"{url}/init_weight_transfer_engine"
            answers.append(httpx.post(path, json=body, timeout=30, trust_env=False))

        calling = threading.Thread(target=init)
        calling.start()
        with pytest.raises(GlooError):
            join_group("127.0.0.1", port, 0, 3, timeout_s=1)
        calling.join(30)
        process.terminate()
        _, told = process.communicate(timeout=20)
    assert [answer.status_code for answer in answers] == [500]
    assert told == ""


def _ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [FLEET, "sim", *arguments]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False
    )


@contextmanager
def _running(*arguments: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """Run it; yields the process and the URL of its first replica."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [FLEET, "sim", *arguments], env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"listening on (\S+)", process.stdout.readline())
            assert found is not None
            yield process, found.group(1)
        finally:
            process.kill()
