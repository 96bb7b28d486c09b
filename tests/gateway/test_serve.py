"""`fleet serve` as a process: how it starts, how it stops, what it says when it cannot."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version as installed_version
from pathlib import Path

import httpx
import pytest
from redis import Redis

from fleet.sim import SimFleet
from gateway.accounts import try_file
from gateway.checks import check_what_is_named
from gateway.settings_model import RestartHook, Settings
from gateway.version import gateway_version
from tests.redis_server import RedisServer
from tests.waiting import wait_until

FLEET = str(Path(sys.executable).with_name("fleet"))
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("FLEET_")}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `fleet` to its end."""
    return subprocess.run(
        [FLEET, *arguments],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@asynccontextmanager
async def served(
    *arguments: str, **environment: str
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """Run `fleet serve` on a free port; yields the process and its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        FLEET, "serve", "--host", "127.0.0.1", "--port", str(port), *arguments,
        env=ENVIRONMENT | environment, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_gateway_that_stops_sends_away_who_would_wait_for_ever() -> None:
    """Held rollouts get 503 with Retry-After, event streams end, and the process is gone soon."""
    async with (
        SimFleet(replicas=1, backend="nccl") as fleet,
        served("--replica", fleet.urls[0]) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http,
        asyncio.timeout(30),
    ):

        async def healthy() -> bool:
            try:
                return (await http.get("/health")).status_code == 200
            except httpx.HTTPError:
                return False

        async def held() -> bool:
            return (await http.get("/fleet")).json()["gate"]["held"] == 1

        await wait_until(healthy)
        await http.post("/pause?mode=keep")
        rollout = {"model": "sim", "prompt": "x"}
        async with asyncio.TaskGroup() as group, http.stream("GET", "/fleet/events") as events:
            waiting = group.create_task(http.post("/v1/completions", json=rollout))
            await wait_until(held)
            process.send_signal(signal.SIGTERM)
            async for _ in events.aiter_raw():
                pass
        assert waiting.result().status_code == 503
        assert waiting.result().headers["retry-after"]
        assert await process.wait() in (0, -signal.SIGTERM)
        assert process.stderr is not None
        assert b"Traceback" not in await process.stderr.read()


async def lines_of(process: asyncio.subprocess.Process) -> list[str]:
    """End the process as an operator would, and return what it has logged."""
    process.terminate()
    _, told = await process.communicate()
    return told.decode().splitlines()


async def test_a_gateway_says_where_it_serves_and_for_which_fleet(own_server: RedisServer) -> None:
    """One line: URL, fleet, store, how many replicas from where, version; and no password."""
    redis = Redis(port=own_server.port)
    redis.config_set("requirepass", "s3cret")
    redis.close()
    store = own_server.url.replace("redis://", "redis://:s3cret@")
    async with (
        SimFleet(replicas=2, backend="nccl") as fleet,
        served("--store", store, *(f"--replica={url}" for url in fleet.urls)) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http,
    ):
        await wait_until(lambda: answers(http, 1))
        lines = await lines_of(process)
    assert not [line for line in lines if "s3cret" in line]
    (told,) = [line for line in lines if " serving " in line]
    _, _, fields = told.partition("serving ")
    assert dict(field.split("=", 1) for field in fields.split()) == {
        "url": url,
        "listening": url.removeprefix("http://"),
        "fleet": "fleet",
        "store": own_server.url,
        "replicas": "2",
        "discovery": "static",
        "version": installed_version("vllm-fleet-gateway"),
    }


async def test_several_workers_say_once_where_they_serve(redis_url: str) -> None:
    """They are one gateway to whoever starts them."""
    async with (
        served("--store", redis_url, "--workers", "2") as (process, url),
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http,
    ):
        await wait_until(lambda: answers(http, 2))
        lines = await lines_of(process)
    assert len([line for line in lines if " serving " in line]) == 1
    told = [line for line in lines if "Application startup complete" in line]
    ids = {found.group(1) for line in told if (found := re.search(r"INFO +\[(\d+)\] ", line))}
    assert len(ids) == 2
    assert str(process.pid) not in ids


async def test_the_url_that_is_said_can_be_opened_where_the_gateway_listens_on_all_addresses() -> (
    None
):
    """0.0.0.0 is no address to call; where it listens is said beside it."""
    async with served("--host", "0.0.0.0") as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
            await wait_until(lambda: answers(http, 1))
        lines = await lines_of(process)
    (told,) = [line for line in lines if " serving " in line]
    assert f" url={url} listening={url.replace('http://127.0.0.1', '0.0.0.0')} " in told


@pytest.mark.parametrize(
    ("host", "token", "warned"),
    [
        ("0.0.0.0", {}, True),
        ("0.0.0.0", {"FLEET_AUTH__REPLICA_TOKEN": "guards-no-route"}, True),
        ("0.0.0.0", {"FLEET_AUTH__ROLLOUT_TOKEN": "a-rollout-token"}, False),
        ("127.0.0.1", {}, False),
    ],
)
async def test_a_gateway_that_is_open_to_all_says_so_once_and_how_to_guard_it(
    host: str, token: dict[str, str], warned: bool
) -> None:
    """Whoever reaches the port may reset and remove; on this machine alone that is its owner."""
    async with served("--host", host, **token) as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
            await wait_until(lambda: reached(http))
        lines = [line for line in await lines_of(process) if "no token is set" in line]
    assert len(lines) == warned
    for line in lines:
        assert " WARNING " in line
        assert "FLEET_AUTH__TRAINER_TOKEN" in line


async def reached(http: httpx.AsyncClient) -> bool:
    """Whether a gateway is ready for calls."""
    try:
        return (await http.get("/readyz")).status_code == 200
    except httpx.HTTPError:
        return False


async def answers(http: httpx.AsyncClient, gateways: int) -> bool:
    """Whether a gateway answers, and so many share the fleet."""
    try:
        return len((await http.get("/fleet")).json()["gateways"]) == gateways
    except httpx.HTTPError:
        return False


def test_a_store_that_is_not_there_is_one_line() -> None:
    """The start stops before anything else; it says where it looked, and what to do."""
    ended = run("serve", "--store", "redis://user:s3cret@127.0.0.1:1/0")
    assert ended.returncode == 2
    assert ended.stderr.startswith("fleet: the store redis://127.0.0.1:1/0 cannot be used: ")
    assert ended.stderr.endswith("; start it there, or correct --store (FLEET_STORE)\n")
    assert "s3cret" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("setting", "value", "fact"),
    [
        ("maxmemory", "1", "not allowed when used memory > 'maxmemory'"),
        ("replicaof", "127.0.0.1 1", "write against a read only replica"),
    ],
)
def test_a_store_that_only_reads_is_one_line(
    own_server: RedisServer, setting: str, value: str, fact: str
) -> None:
    """Full, or no primary: it answers, so only a write shows it; what it was asked expires."""
    with Redis.from_url(own_server.url) as redis:
        if setting == "maxmemory":
            redis.config_set(setting, value)
        else:
            redis.execute_command("REPLICAOF", *value.split())
        ended = run("serve", "--store", own_server.url)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"fleet: the store {own_server.url} takes no writes: ")
    assert fact in ended.stderr
    assert "script" not in ended.stderr
    assert "--store (FLEET_STORE)" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


async def test_what_the_start_writes_to_see_whether_it_may_is_gone_soon(
    own_server: RedisServer,
) -> None:
    """Nothing of it is left for good."""
    await check_what_is_named(Settings(store=own_server.url))
    with Redis.from_url(own_server.url) as redis:
        (key,) = redis.scan_iter()
        assert 0 < redis.pttl(key) <= 1000


@pytest.mark.parametrize("value", ["/", "/proc/nobody-can-write-here"])
def test_an_access_log_that_cannot_be_written_is_one_line(value: str) -> None:
    """A folder, or a place where nobody may write: told at the start, and not as a stack trace."""
    ended = run("serve", "--port", "0", FLEET_LOG__ACCESS=value)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"fleet: FLEET_LOG__ACCESS: '{value}' cannot be written to: ")
    assert len(ended.stderr.splitlines()) == 1


def test_trying_an_access_log_leaves_a_pipe_to_its_reader(tmp_path: Path) -> None:
    """Nobody reads yet, so opening it would wait; who read it would take the try for the end."""
    pipe = tmp_path / "access"
    os.mkfifo(pipe)
    try_file(str(pipe))


def test_a_restart_command_that_is_no_program_is_one_line() -> None:
    """Else only the first wedged replica would show it."""
    ended = run("serve", "--port", "0", FLEET_RESTART__COMMAND="/no/such/program {id}")
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "fleet: FLEET_RESTART__COMMAND: '/no/such/program' is no program"
    )
    assert len(ended.stderr.splitlines()) == 1


async def test_a_restart_command_whose_program_has_the_replica_in_its_name_is_not_looked_for() -> (
    None
):
    """Which program that is, only a restart tells."""
    await check_what_is_named(Settings(restart=RestartHook(command="/no/such/restart-{host} now")))


def test_a_port_in_use_is_one_line_that_says_what_to_do() -> None:
    """No stack trace, no six lines of log."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run("serve", "--host", "127.0.0.1", "--port", str(port))
    assert ended.returncode == 2
    assert ended.stderr.strip().endswith("choose another --port")
    assert len(ended.stderr.splitlines()) == 1


def test_an_address_that_is_not_this_machines_is_one_line_that_says_what_to_do() -> None:
    """Another port would not help."""
    ended = run("serve", "--host", "192.0.2.1", "--port", "0")
    assert ended.returncode == 2
    assert ended.stderr.strip().endswith("choose another --host, an address of this machine")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "fact", "command"),
    [
        ("serve --nonsense", "No such option: --nonsense", "fleet serve"),
        ("serve --replicas URL", "(Possible options: --replica)", "fleet serve"),
        ("serve --port many", "'--port': must be a valid integer;", "fleet serve"),
        ("demo --replicas 0", "'--replicas': must be greater than or equal to 1;", "fleet demo"),
        ("serve extra", "unexpected extra argument(s) (extra)", "fleet serve"),
        ("sim", "Missing option '--replicas'", "fleet sim"),
        ("serv", "No such command 'serv'. Did you mean 'serve'?", "fleet"),
    ],
)
def test_a_wrong_use_of_the_command_line_is_one_plain_line(
    arguments: str, fact: str, command: str
) -> None:
    """As a wrong setting is: no box, no usage; what is wrong, and where to look."""
    ended = run(*arguments.split())
    assert ended.returncode == 2
    assert ended.stderr.startswith("fleet: ")
    assert fact in ended.stderr
    assert ended.stderr.endswith(f"; {command} --help says what there is\n")
    assert len(ended.stderr.splitlines()) == 1


def test_no_command_at_all_gets_the_help_and_nothing_else() -> None:
    """And the status of wrong use, so that a script notices."""
    ended = run()
    assert ended.returncode == 2
    assert "Usage: fleet" in ended.stdout + ended.stderr
    assert "fleet: " not in ended.stderr


def test_the_clients_url_is_no_setting_of_the_gateway() -> None:
    """FLEET_URL may stand in the environment that `fleet serve` is started from."""
    ended = run("serve", "--port", "99999", FLEET_URL="http://gateway:8000")
    assert "FLEET_URL" not in ended.stderr


def test_an_unknown_setting_stops_the_start_with_one_line() -> None:
    """It names the nearest one."""
    ended = run("serve", FLEET_GATE_MODE="hold")
    assert ended.returncode == 2
    assert "FLEET_GATE__MODE" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_bare_checkout_serves_though_it_has_no_version() -> None:
    """Benchmarks and containers run the code from where it lies."""
    assert gateway_version("a-distribution-that-nobody-installs") == "unknown"
    assert gateway_version()[0].isdigit()
