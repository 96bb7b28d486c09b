"""What `fleet pause`, `resume`, `abort` and `status` print, run as an operator runs them."""

from __future__ import annotations

import asyncio

import pytest

from fleet.sim import SimFleet, SimOptions
from tests.cases.conftest import Case, case_of, nccl
from tests.client.listener import listener, reply
from tests.gateway.test_serve import run
from tests.waiting import wait_until


async def told(*arguments: str, url: str) -> str:
    """What a command that succeeds prints."""
    ended = await asyncio.to_thread(run, *arguments, "--url", url)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


async def refused(*arguments: str, url: str) -> str:
    """What a command that fails says, in one line."""
    ended = await asyncio.to_thread(run, *arguments, "--url", url)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    return line


async def test_each_command_says_in_one_line_what_it_did() -> None:
    """How many replicas, and which of them were left as they are and why."""
    async with case_of(nccl(2)) as case:
        first, url = case.replicas[0].id, str(case.http.base_url)
        assert await told("pause", url=url) == "paused 2 replicas, rollouts wait at the gate\n"
        assert await told("resume", url=url) == "resumed 2 replicas\n"
        async with asyncio.TaskGroup() as group:
            rollout = group.create_task(case.complete(max_tokens=30_000))
            await wait_until(lambda: is_answering(case))
            assert await told("abort", url=url) == "aborted 1 rollout\n"
        assert rollout.result().json()["choices"][0]["finish_reason"] == "abort"
        assert await told("abort", "a", "b", url=url) == "aborted 2 ids\n"
        await case.ok(f"/fleet/replicas/{first}/fence")
        line = await told("resume", url=url)
        assert (
            line
            == f"resumed 1 replica; {first} skipped: fenced: stays paused until a full update\n"
        )


async def is_answering(case: Case) -> bool:
    """Whether a rollout is under way."""
    found = (await case.http.get("/fleet/replicas")).json()["replicas"]
    return any(replica["inflight"] for replica in found)


async def test_a_replica_that_is_taken_for_the_gateway_is_said_to_be_none() -> None:
    """Also where it knows the call: then it did it for itself alone."""
    async with SimFleet(SimOptions(replicas=1)) as fleet:
        url = fleet.urls[0]
        line = await refused("status", url=url)
        assert line.startswith(
            f"fleet: what answers GET /fleet at {url} is no gateway, it does not"
        )
        assert line.endswith("; --url or FLEET_URL says where it is")
        line = await refused("pause", url=url)
        assert f"POST /pause?mode=keep at {url} is no gateway, it took it for itself alone" in line


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"detail": "no"}'])
async def test_what_answers_in_other_words_is_no_gateway_and_no_stack_trace(body: bytes) -> None:
    """A page of another server; and the token in the URL is not shown."""
    async with listener(reply("200 OK", body)) as page:
        url = page.url.replace("http://", "http://operator:t-secret@")
        line = await refused("replicas", url=url)
    assert f"at {page.url} is no gateway" in line


async def test_a_gateway_that_is_not_there_is_said_without_the_token() -> None:
    """It may stand in FLEET_URL, and what is printed is seen by others."""
    async with listener(None) as gone:
        line = await refused("status", url=gone.url.replace("http://", "http://o:t-secret@"))
    assert line.startswith(f"fleet: no gateway answers at {gone.url}: ")
