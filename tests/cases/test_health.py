"""Who counts as failed: never one that rests or thinks for long, and one that is dead at once."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest

from fleet.sim import SimReplica
from gateway import rollouts, upstream
from gateway.metrics import Metrics
from gateway.rollouts import Rollouts
from gateway.settings_model import Settings
from tests.cases.conftest import UPDATE, Case, case_of, check_error, fast, nccl
from tests.waiting import wait_until

COMPLETIONS = "/v1/completions"
SERVER = """
from fleet.sim import SimOptions, serve
serve(SimOptions(replicas=1, backend="nccl", token_delay_ms=5))
"""
PROBES = 5
"""So many probes must have seen a resting replica before a test believes that they spare it."""


# -- never a failure -------------------------------------------------------------------------------


async def test_a_pause_is_no_failure_however_long_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Frozen rollouts are silent, held ones wait; nobody is suspected, and all are answered."""
    async with case_of(nccl(2, token_delay_ms=20), timeouts=fast(probe_s=0.05)) as case:
        frozen = [asyncio.ensure_future(case.complete(max_tokens=20)) for _ in range(6)]
        await _until_running(case, 6)
        await case.ok("/pause?mode=keep")
        held = [asyncio.ensure_future(case.complete()) for _ in range(4)]
        await case.await_held(4)
        await _probed(case)
        assert await case.states() == ["paused"] * 2
        await case.ok("/resume")
        answers = await asyncio.gather(*frozen, *held)
        assert [answer.status_code for answer in answers] == [200] * 10
        assert _warnings(caplog) == []


async def test_sleep_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever sleeps through many probes is asleep, and serves once it is awake."""
    async with case_of(nccl(2), timeouts=fast(probe_s=0.05)) as case:
        await case.ok("/sleep?level=1")
        await _probed(case)
        assert await case.states() == ["asleep"] * 2
        await case.ok("/wake_up")
        assert (await case.complete()).status_code == 200
        assert _warnings(caplog) == []


async def test_a_weight_update_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Between its calls members are probed, inside a collective they are silent: both are fine."""
    async with case_of(nccl(2), timeouts=fast(probe_s=0.05, probe_timeout_s=0.5)) as case:
        await case.init()
        await case.start()
        await _probed(case)
        assert await case.states() == ["updating"] * 2
        for replica in case.replicas:
            replica.faults.add(UPDATE, "delay", seconds=1.5)
            replica.faults.add("/weight_info", "hang", times=0)
            replica.faults.add("/health", "hang", times=0)
        updating = asyncio.ensure_future(case.update())
        while not updating.done():
            assert await case.states() == ["updating"] * 2
            await asyncio.sleep(0.05)
        for replica in case.replicas:
            replica.faults.clear()
        assert (await case.finish()).status_code == 200
        await case.await_states("ready", "ready")
        assert _warnings(caplog) == []


async def test_a_long_answer_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """A replica may think for many probe times before its first byte."""
    times = fast(probe_s=0.05, probe_timeout_s=0.5)
    async with case_of(nccl(1), timeouts=times) as case:
        case.replicas[0].faults.add(COMPLETIONS, "delay", seconds=1.5, times=0)
        answers = [asyncio.ensure_future(case.complete()) for _ in range(20)]
        while not all(answer.done() for answer in answers):
            assert await case.states() == ["ready"]
            await asyncio.sleep(0.02)
        assert {answer.result().status_code for answer in answers} == {200}
        assert _warnings(caplog) == []


async def test_rollouts_that_are_never_answered_condemn_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As long as a replica answers its probes; others serve what comes, the client may give up."""
    times = fast(probe_s=0.05, probe_timeout_s=1.0)
    async with case_of(nccl(2), timeouts=times) as case:
        case.replicas[0].faults.add(COMPLETIONS, "hang", times=0)
        calls = [asyncio.ensure_future(case.complete()) for _ in range(8)]
        await _probed(case)
        assert await case.states() == ["ready", "ready"]
        done, hanging = await asyncio.wait(calls, timeout=0.1)
        assert {call.result().headers["X-Fleet-Replica"] for call in done} == {case.replicas[1].id}
        assert hanging
        for call in hanging:
            call.cancel()
        await wait_until(lambda: _is_idle(case))
        assert _warnings(caplog) == []


# -- dead ------------------------------------------------------------------------------------------


async def test_rollouts_of_a_killed_server_are_answered_by_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A real process and SIGKILL: whatever it had not begun to answer is answered elsewhere."""
    async with _server_process() as (url, process), case_of(nccl(1, token_delay_ms=5)) as case:
        await case.ok("/fleet/replicas", {"url": url})
        await case.await_states("ready")
        calls = [asyncio.ensure_future(case.complete(max_tokens=100)) for _ in range(40)]
        await wait_until(lambda: _runs(url, 20))
        process.send_signal(signal.SIGKILL)
        answers = await asyncio.gather(*calls)
        assert [answer.status_code for answer in answers] == [200] * 40
        assert {a.headers["X-Fleet-Replica"] for a in answers} == {case.replicas[0].id}
        found = await case.served.states()
        assert found == {case.replicas[0].id: "ready", url.removeprefix("http://"): "gone"}
        for what in ("rollouts break", "lost"):  # told, and not once for each of twenty rollouts
            assert 1 <= sum(what in told for told in _warnings(caplog)) <= 3


async def test_a_stopped_server_leaves_within_a_probe_and_its_rollouts_when_it_dies() -> None:
    """It accepts and never answers; only its end proves that what it had will not be answered."""
    times = fast(probe_s=0.2, probe_timeout_s=0.3)
    async with (
        _server_process() as (url, process),
        case_of(nccl(1, token_delay_ms=5), timeouts=times) as case,
    ):
        await case.ok("/fleet/replicas", {"url": url})
        calls = [asyncio.ensure_future(case.complete(max_tokens=100)) for _ in range(10)]
        await wait_until(lambda: _runs(url, 5))
        process.send_signal(signal.SIGSTOP)
        name = url.removeprefix("http://")
        await wait_until(lambda: _is_gone(case, name), timeout_s=2)
        late = await asyncio.gather(*(case.complete() for _ in range(6)))
        assert {a.headers["X-Fleet-Replica"] for a in late} == {case.replicas[0].id}
        done, waiting = await asyncio.wait(calls, timeout=1)
        assert (len(done), len(waiting)) == (5, 5)
        process.send_signal(signal.SIGKILL)
        answers = await asyncio.gather(*calls)
        assert [answer.status_code for answer in answers] == [200] * 10


async def test_a_host_that_drops_packets_leaves_within_a_probe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections to it are never made: those rollouts go elsewhere, and new ones at once."""
    monkeypatch.setattr(upstream, "CONNECT_S", 1.5)
    times = fast(probe_s=0.2, probe_timeout_s=0.3)
    async with case_of(nccl(2), timeouts=times) as case:
        first, second = case.replicas
        await first.die()
        with _black_hole(first):
            calls = [asyncio.ensure_future(case.complete()) for _ in range(10)]
            await case.await_states("gone", "ready", timeout_s=2)
            late = await asyncio.gather(*(case.complete() for _ in range(6)))
            answers = await asyncio.gather(*calls)
            assert [answer.status_code for answer in [*answers, *late]] == [200] * 16
            assert {a.headers["X-Fleet-Replica"] for a in [*answers, *late]} == {second.id}
            assert sum("rollouts break" in told for told in _warnings(caplog)) <= 1


async def test_a_dead_fleet_is_an_answer() -> None:
    """When the only other replica is dead as well, the client hears of it at once.

    Which of them is named depends on whether the look at the first one found the other gone, too.
    """
    async with case_of(nccl(2), timeouts=fast(probe_s=60)) as case:
        for replica in case.replicas:
            await replica.die()
        answer = await case.complete()
        told = "broke the connection before answering"
        message = check_error(answer, 503, told)["error"]["message"]
        assert any(replica.id in message for replica in case.replicas)
        await case.await_states("gone", "gone")


# -- one suspicion ---------------------------------------------------------------------------------


async def test_rollouts_that_break_at_once_are_one_suspicion(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Hundreds may be on one replica: it is looked at once, and told of once."""
    async with case_of(nccl(2)) as case:
        bad = case.replicas[0]
        bad.faults.add(COMPLETIONS, "drop", times=0)
        answers = await asyncio.gather(*(case.complete() for _ in range(60)))
        assert {answer.status_code for answer in answers} == {200}
        assert {a.headers["X-Fleet-Replica"] for a in answers} == {case.replicas[1].id}
        told = [text for text in _warnings(caplog) if "rollouts break" in text]
        assert len(told) == 1


async def test_a_suspicion_is_per_replica_and_does_not_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another replica is looked at as well, and the same one again a little later."""
    async with case_of(nccl(2)) as case:
        looked: list[str] = []
        shared = Rollouts(case.gateway.gate, Metrics(), Settings(), looked.append)
        for _ in range(100):
            for replica in ("a", "b"):
                shared.suspect(replica, "reset")
        assert looked == ["a", "b"]
        monkeypatch.setattr(rollouts, "SUSPECTED_S", 0.0)
        shared.suspect("a", "reset")
        assert looked == ["a", "b", "a"]


async def test_the_system_watches_for_hosts_that_vanish() -> None:
    """Silence is allowed without end, so only TCP's own signs of life can tell; on both sides."""
    async with case_of(nccl(1, token_delay_ms=5)) as case:
        call = asyncio.ensure_future(case.complete(max_tokens=5000))
        await _until_running(case, 1)
        watched = _watched_sockets()
        call.cancel()
        await asyncio.wait([call])
        clients = {local for local, _ in watched}
        upstreams = {remote for _, remote in watched}
        assert httpx.URL(case.served.url).port in clients
        assert case.replicas[0].port in upstreams


# -- words -----------------------------------------------------------------------------------------


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as a warning or worse: the message, and which facts came with it."""
    return [
        " ".join([record.message, *(name for name in ("lost", "wedged") if hasattr(record, name))])
        for record in caplog.records
        if record.levelname in ("WARNING", "ERROR") and record.name.startswith(("gateway", "fleet"))
    ]


async def _probed(case: Case) -> None:
    """Wait until every replica has been probed several times more."""
    before = [len(replica.log.calls("/weight_info")) for replica in case.replicas]

    async def seen() -> bool:
        after = [len(replica.log.calls("/weight_info")) for replica in case.replicas]
        return all(b >= a + PROBES for a, b in zip(before, after, strict=True))

    await wait_until(seen)


async def _until_running(case: Case, count: int) -> None:
    async def reached() -> bool:
        return sum(replica.stats()["running"] for replica in case.replicas) == count

    await wait_until(reached)


async def _is_idle(case: Case) -> bool:
    found = (await case.http.get("/fleet/replicas")).json()["replicas"]
    return not any(replica["inflight"] for replica in found)


async def _is_gone(case: Case, name: str) -> bool:
    return (await case.served.states())[name] == "gone"


async def _runs(url: str, count: int) -> bool:
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(f"{url}/sim/stats")).json()["running"] == count


@asynccontextmanager
async def _server_process() -> AsyncGenerator[tuple[str, asyncio.subprocess.Process]]:
    """A simulated server in a process of its own, which can be stopped and killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        yield line.split(" listening on ")[1].split(" ")[0], process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextmanager
def _black_hole(replica: SimReplica) -> Generator[None]:
    """Let the address of a dead replica drop the packets of whoever wants to connect.

    A listener that never accepts, whose queue is full: its system ignores what comes.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((replica.options.host, replica.port))
        listener.listen(0)
        for _ in range(10):
            caller = stack.enter_context(socket.socket())
            caller.settimeout(0.1)
            try:
                caller.connect(listener.getsockname())
            except TimeoutError:
                break
        else:
            pytest.skip("this system does not drop what a full queue cannot take")
        yield


def _watched_sockets() -> set[tuple[int, int]]:
    """Local and remote ports of this machine's connections on which a keepalive timer runs."""
    found: set[tuple[int, int]] = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, _, timer, *_ = line.split()
        if timer.startswith("02:"):
            found.add((int(local.split(":")[1], 16), int(remote.split(":")[1], 16)))
    return found
