"""Each way to be stuck: shown, alarmed, and ended if the operator has set a limit (case 13)."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.settings_model import RestartHook, Timeouts
from tests.cases.conftest import UPDATE, Case, case_of, check_error, fast, nccl
from tests.waiting import wait_until

QUICK = {"probe_s": 0.1, "probe_timeout_s": 0.3}


def script(folder: Path, words: str) -> str:
    """Return a command that runs this Python code with the replica's id as its argument."""
    file = folder / "restart.py"
    file.write_text(f"import sys\n{words}\n")
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(file))} {{id}}"


async def until(case: Case, **facts: Any) -> None:
    """Wait until GET /fleet shows these facts."""

    async def shown() -> bool:
        fleet = await case.fleet()
        return all(fleet[key] == value for key, value in facts.items())

    await wait_until(shown)


async def test_a_pause_that_nothing_follows_is_resumed_after_its_lease() -> None:
    """The trainer died: rollouts go on after the time that the operator has set."""
    async with case_of(nccl(2), timeouts=fast(pause_lease_s=0.5)) as case:
        await case.ok("/pause?mode=keep")
        waiting = asyncio.ensure_future(case.complete())
        await case.await_held(1)
        assert (await waiting).status_code == 200
        assert (await case.http.get("/is_paused")).json() == {"is_paused": False}


async def test_a_pause_that_is_asked_for_again_and_again_stays() -> None:
    """Asking again renews the lease; what is shown is still when the pause began."""
    async with case_of(nccl(1), timeouts=fast(pause_lease_s=1.0)) as case:
        await case.ok("/pause?mode=keep")
        since = (await case.fleet())["pause"]["since"]
        renewed = 0.0
        while renewed < since + 2:
            await case.ok("/pause?mode=keep")
            fleet = await case.fleet()
            assert fleet["pause"]["since"] == since
            renewed = fleet["pause"]["renewed"]


async def test_without_a_lease_a_pause_lasts_and_is_alarmed() -> None:
    """Case 13: how long, and by whom."""
    async with case_of(nccl(1)) as case:
        await case.ok("/pause?mode=keep")
        assert (await case.fleet())["pause"]["by"].startswith("127.0.0.1:")

        async def alarmed() -> bool:
            metrics = (await case.http.get("/metrics")).text
            line = next(x for x in metrics.splitlines() if x.startswith("fleet_trainer_pause_s"))
            return float(line.split()[1]) > 0.3

        await wait_until(alarmed)


def gauge(metrics: str, name: str) -> float:
    """The value of a gauge without labels."""
    line = next(x for x in metrics.splitlines() if x.startswith(f"{name} "))
    return float(line.split()[1])


async def test_each_way_to_be_stuck_has_a_gauge_to_alarm_on() -> None:
    """A call on its way, a held rollout, a round left open, a failed round: each counts up."""
    async with case_of(nccl(2), timeouts=Timeouts(update_s=1.5, **QUICK)) as case:

        async def all_above_zero(*names: str) -> bool:
            text = (await case.http.get("/metrics")).text
            return all(gauge(text, name) > 0 for name in names)

        await case.first_sync("1")
        text = (await case.http.get("/metrics")).text
        for name in ("call", "round_open", "round_failed", "gate_oldest_held", "gate_closed"):
            assert gauge(text, f"fleet_{name}_seconds") == 0
        assert gauge(text, "fleet_lease_lapsed") == 0
        assert gauge(text, "fleet_gateways") == 1
        await case.start()
        held = asyncio.ensure_future(case.complete())
        await case.await_held(1)
        case.replicas[1].faults.add(UPDATE, "hang")
        update = asyncio.ensure_future(case.update())
        names = ("call", "round_open", "gate_oldest_held", "gate_closed")
        await wait_until(lambda: all_above_zero(*(f"fleet_{name}_seconds" for name in names)))
        assert (await update).status_code == 504
        await wait_until(lambda: all_above_zero("fleet_round_failed_seconds"))
        held.cancel()


async def test_a_round_left_open_is_abandoned_after_its_deadline() -> None:
    """Members may hold half an update: they are fenced, and the next full update heals them."""
    async with case_of(nccl(2), timeouts=fast(round_s=0.5)) as case:
        await case.first_sync("1")
        await case.start()
        await case.update()
        await until(case, phase="idle")
        assert await case.states() == ["fenced", "fenced"]
        newest = (await case.rounds())[0]
        assert newest["result"] == "abandoned"
        check_error(await case.finish("2"), 409, "init")
        await case.first_sync("2")
        assert await case.states() == ["ready", "ready"]


async def test_a_restart_is_asked_of_the_command_and_the_replica_comes_back_stale(
    tmp_path: Path,
) -> None:
    """The words of the command stand for the replica; nothing passes through a shell."""
    told = tmp_path / "told"
    command = script(tmp_path, f"open({str(told)!r}, 'w').write(sys.argv[1])")
    async with case_of(nccl(2), restart=RestartHook(command=command)) as case:
        await case.first_sync("1")
        name = case.replicas[1].id
        await case.ok(f"/fleet/replicas/{name}/restart")
        assert told.read_text() == name
        await case.replicas[1].restart()
        await case.await_states("ready", "stale")


async def test_a_command_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    """503, since it may be tried again; the fleet is as it was."""
    command = script(tmp_path, "sys.exit('no such unit: ' + sys.argv[1])")
    async with case_of(nccl(1), restart=RestartHook(command=command)) as case:
        name = case.replicas[0].id
        answer = await case.post(f"/fleet/replicas/{name}/restart")
        check_error(answer, 503, "status 1", f"no such unit: {name}")
        assert await case.states() == ["ready"]


@asynccontextmanager
async def hook(status: int) -> AsyncGenerator[tuple[str, list[bytes]]]:
    """A web server that takes POSTs and answers this status; yields its URL and the bodies."""
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        bodies.append(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook", bodies


async def test_a_wedged_replica_is_restarted_unasked_after_its_time() -> None:
    """Only if the operator has said so; the hook reads which one and why."""
    times = Timeouts(update_s=0.5, **QUICK)
    async with hook(202) as (url, bodies):
        restart = RestartHook(webhook=url, wedged_s=0.5)
        async with case_of(nccl(2), timeouts=times, restart=restart) as case:
            await case.first_sync("1")
            await case.start()
            case.replicas[1].faults.add(UPDATE, "hang")
            check_error(await case.update(), 504, case.replicas[1].id)

            async def asked() -> bool:
                return bool(bodies)

            await wait_until(asked)
            told = msgspec.json.decode(bodies[0])
            assert told["id"] == case.replicas[1].id
            assert "silent inside update" in told["reason"]
            await case.replicas[1].restart()
            await case.await_states("fenced", "stale")
            await case.first_sync("2")


async def test_a_hook_that_refuses_is_told() -> None:
    """503 with the hook's status."""
    async with hook(500) as (url, _), case_of(nccl(1), restart=RestartHook(webhook=url)) as case:
        answer = await case.post(f"/fleet/replicas/{case.replicas[0].id}/restart")
        check_error(answer, 503, "answered 500")


async def test_without_a_hook_a_restart_says_what_to_set() -> None:
    """403: the door is shut until somebody configures it."""
    async with case_of(nccl(1)) as case:
        name = case.replicas[0].id
        check_error(
            await case.post(f"/fleet/replicas/{name}/restart"), 403, "FLEET_RESTART__COMMAND"
        )
        check_error(await case.post("/fleet/replicas/nobody:1/restart"), 404)


async def test_a_member_of_an_open_round_is_not_restarted(tmp_path: Path) -> None:
    """It would be lost in mid-update; the message says when."""
    command = script(tmp_path, "pass")
    async with case_of(nccl(1), restart=RestartHook(command=command)) as case:
        await case.first_sync("1")
        await case.start()
        answer = await case.post(f"/fleet/replicas/{case.replicas[0].id}/restart")
        check_error(answer, 409, "member of the open round", "after the round")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"command": "a", "webhook": "http://h"}, "not both"),
        ({"webhook": "ftp://h"}, "http or https"),
        ({"command": "  "}, "empty"),
        ({"wedged_s": 0}, "greater than 0"),
    ],
)
def test_a_restart_hook_that_cannot_work_is_refused_at_the_start(
    fields: dict[str, Any], told: str
) -> None:
    """One line, before anything is served."""
    with pytest.raises(ValueError, match=told):
        RestartHook(**fields)
