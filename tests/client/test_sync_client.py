"""The trainer's client against a real gateway over simulated replicas, and against broken wires."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys

import pytest
from pydantic import SecretStr

from fleet.client import AsyncFleetClient, FleetError, FleetWeightSyncClient, Timeouts
from fleet.client.answers import Membership
from fleet.client.errors import (
    AnswerLost,
    BadInput,
    DeadlinePassed,
    Forbidden,
    MemberFailed,
    MembershipChanged,
    PauseNotReached,
    Unauthenticated,
    Unreachable,
    WorldSizeMismatch,
    WrongPhase,
)
from fleet.facts.outcome import Result
from gateway import settings_model
from tests.cases.conftest import START, UPDATE, case_of, fast, nccl, posts
from tests.client.conftest import aside, init_info, join, send, url_of
from tests.client.listener import listener, reply
from tests.ports import free_port


async def test_a_trainer_moves_the_fleet_from_version_to_version() -> None:
    """With its own label, with one set for an engine that gives none, and with the fleet's own."""
    async with case_of() as case:
        with FleetWeightSyncClient(url_of(case)) as client:
            assert await aside(client.weight_info) == "default"
            await aside(join, client)
            await aside(send, client, "step-7")
            assert await case.version() == "step-7"
            client.next_weight_version = "step-8"
            await aside(send, client)
            assert await case.version() == "step-8"
            await aside(send, client)
            assert await aside(client.weight_info) == "1"
            assert (await aside(client.fleet))["weight_version"] == "1"
            await aside(client.shutdown_weight_transfer_engine)


async def test_every_control_call_reaches_every_replica_and_its_answer_comes_back() -> None:
    """Pausing, aborting, sleeping, labels, caches, numbers."""
    async with case_of() as case:
        with FleetWeightSyncClient(url_of(case)) as client:
            assert await aside(client.get_world_size) == 3
            await aside(client.pause, "wait")
            assert await aside(client.is_paused)
            await aside(client.resume)
            assert not await aside(client.is_paused)
            assert await aside(client.abort) == 0
            assert await aside(client.reset_prefix_cache)
            await aside(client.update_weight_version, "seven")
            assert await aside(client.weight_info) == "seven"
            await aside(client.sleep, 1)
            await aside(client.wake_up, ["weights"])
            assert await aside(client.is_sleeping)
            await aside(client.wake_up, ["kv_cache"])
            assert not await aside(client.is_sleeping)
            assert len(await aside(client.checksums)) > 0
        queries = [call.query for call in posts(case.replicas[2], "/sleep")]
        assert queries == [{"level": ["1"], "mode": ["keep"]}]


async def test_a_wrong_world_size_names_the_right_one_as_a_number() -> None:
    """Nothing was sent to a replica."""
    async with case_of() as case:
        with FleetWeightSyncClient(url_of(case)) as client:
            with pytest.raises(WorldSizeMismatch) as refusal:
                await aside(client.init_weight_transfer_engine, init_info(33))
            assert (refusal.value.status, refusal.value.world_size) == (409, 4)
            assert client.membership == Membership(changed=True, world_size=4)
            with pytest.raises(WrongPhase, match="init"):
                await aside(client.start_weight_update)


async def test_a_changed_membership_is_one_exception_and_the_number_of_the_next_group() -> None:
    """A member died since init; and a newcomer shows in every answer before it is needed."""
    async with case_of() as case:
        with FleetWeightSyncClient(url_of(case)) as client:
            await aside(join, client)
            assert not client.membership.changed
            newcomer = await case.sim.add()
            await case.ok("/fleet/replicas", {"url": newcomer.url})
            await aside(client.weight_info)
            assert (client.membership.changed, client.membership.world_size) == (True, 5)
            await case.replicas[1].die()
            with pytest.raises(MembershipChanged) as refusal:
                await aside(client.start_weight_update)
            assert refusal.value.world_size == 4
            assert client.membership == Membership(changed=True, world_size=4)


async def test_a_refusal_tells_the_membership_as_well_as_an_answer_does() -> None:
    """`client.membership` is what the last control answer said, also where that was no."""
    async with case_of() as case:
        with FleetWeightSyncClient(url_of(case)) as client:
            await aside(join, client)
            await case.replicas[1].die()
            with pytest.raises(MembershipChanged):
                await aside(client.start_weight_update)
            assert client.membership == Membership(changed=True, world_size=3)
            await aside(join, client)
            assert not client.membership.changed
            case.replicas[0].faults.add(UPDATE, "status", status=500)
            with pytest.raises(MemberFailed, match="world_size=3"):
                await aside(send, client)
            assert client.membership == Membership(changed=False, world_size=3)
            with pytest.raises(BadInput):
                await aside(client.update_weight_version, "no spaces")
            assert client.membership == Membership(changed=False, world_size=3)


async def test_a_failure_carries_every_replicas_outcome_and_the_hint() -> None:
    """Who failed and who merely waited, as values; and what a trainer does next."""
    async with case_of() as case:
        first, second, third = (replica.id for replica in case.replicas)
        with FleetWeightSyncClient(url_of(case)) as client:
            await aside(join, client)
            case.replicas[1].faults.add(UPDATE, "status", status=500)
            with pytest.raises(MemberFailed) as failure:
                await aside(send, client)
        outcomes = failure.value.outcomes
        assert outcomes[second].outcome is Result.FAILED
        assert outcomes[second].status == 500
        assert set(outcomes) == {first, second, third}
        assert failure.value.hint is not None
        assert "re-init" in failure.value.hint


async def test_a_call_that_had_no_effect_is_made_again() -> None:
    """One replica did not pause: the gateway resumed the others and asked to try again."""
    async with case_of() as case:
        case.replicas[0].faults.add("/pause", "status", status=500)
        with FleetWeightSyncClient(url_of(case)) as client:
            await aside(join, client)
            await aside(send, client, "1")
        assert len(posts(case.replicas[0], "/pause")) == 2
        assert len(posts(case.replicas[0], START)) == 1
        case.replicas[0].faults.add("/pause", "status", status=500)
        with FleetWeightSyncClient(url_of(case), patience_s=0) as client:
            with pytest.raises(PauseNotReached) as refusal:
                await aside(client.start_weight_update)
            assert refusal.value.retry_after_s == 1


async def test_a_call_whose_answer_was_lost_is_never_made_again() -> None:
    """It may have had its effect, and a second one would enter a collective alone."""
    async with listener(None) as silent:
        with FleetWeightSyncClient(silent.url) as client:
            for call in (client.start_weight_update, client.finish_weight_update):
                with pytest.raises(AnswerLost, match="GET /fleet"):
                    await aside(call)
            with pytest.raises(AnswerLost):
                await aside(client.update_weights, {})
        assert len(silent.seen) == 3


@pytest.mark.parametrize("status", ["500 Oops", "502 Bad Gateway", "503 Service Unavailable"])
async def test_what_a_proxy_says_is_no_invitation_to_repeat_a_call(status: str) -> None:
    """Only the gateway knows that nothing was sent; a proxy's 503 may hide an update."""
    async with listener(reply(status, b"<html>", "retry-after: 0")) as proxy:
        with FleetWeightSyncClient(proxy.url) as client:
            with pytest.raises(FleetError) as refusal:
                await aside(client.update_weights, {})
            assert refusal.value.status == int(status[:3])
        assert len(proxy.seen) == 1


async def test_a_gateway_that_is_not_there_is_waited_for_but_not_for_ever() -> None:
    """No connection, nothing sent: the call may be repeated."""
    port = free_port()
    with (
        FleetWeightSyncClient(f"http://127.0.0.1:{port}", patience_s=0) as client,
        pytest.raises(Unreachable),
    ):
        await aside(client.weight_info)
    with FleetWeightSyncClient(f"http://127.0.0.1:{port}") as client:
        asking = asyncio.ensure_future(aside(client.weight_info))
        answer = reply("200 OK", b'{"weight_version":"7"}')
        async with listener(answer, port):
            assert await asking == "7"


@pytest.mark.parametrize("client", [FleetWeightSyncClient, AsyncFleetClient])
@pytest.mark.parametrize(
    ("base_url", "advice"),
    [
        ("127.0.0.1:8000", "write http://127.0.0.1:8000"),
        ("gateway", "write http://gateway"),
        ("trainer:t-secret@gateway:8000", "write http://gateway:8000"),
        ("ftp://gateway", "write http://gateway:8000"),
        ("", "write http://gateway:8000"),
    ],
)
def test_what_is_no_url_is_refused_at_once_and_not_waited_for(
    client: type, base_url: str, advice: str
) -> None:
    """Without a scheme nothing can ever be reached; what to write is said, without the token."""
    with pytest.raises(ValueError, match="is not the URL of a gateway") as refusal:
        client(base_url)
    assert str(refusal.value).endswith(advice)
    assert "t-secret" not in str(refusal.value)


async def test_a_client_that_is_told_nothing_in_time_says_so() -> None:
    """Its own deadline, for the case that the gateway's does not come."""

    async def never(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asleep.wait()
        writer.close()

    asleep = asyncio.Event()
    async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        timeouts = Timeouts(start_s=0.1)
        with (
            FleetWeightSyncClient(f"http://127.0.0.1:{port}", timeouts=timeouts) as client,
            pytest.raises(AnswerLost, match="ReadTimeout"),
        ):
            await aside(client.start_weight_update)
        asleep.set()


def test_timeouts_outlast_the_gateways_own() -> None:
    """Its answer says who was late; a client that hangs up first never learns it."""
    gateway, gate = settings_model.Timeouts(), settings_model.Gate()
    mine = Timeouts()
    undoing = 2 * gateway.control_s
    assert mine.init_s > gateway.init_s + gateway.control_s
    assert mine.update_s > gateway.update_s
    assert mine.pause_s > gate.timeout_s + gateway.control_s
    assert mine.start_s > gate.timeout_s + gateway.start_s + undoing
    assert mine.finish_s > gateway.finish_s + undoing
    assert mine.control_s > undoing
    assert mine.rollout_s > gate.timeout_s


async def test_a_deadline_that_passes_at_the_gateway_is_a_typed_answer() -> None:
    """Not a client's timeout."""
    async with case_of(nccl(2), timeouts=fast(update_s=0.2)) as case:
        with FleetWeightSyncClient(url_of(case)) as client:
            await aside(join, client)
            for replica in case.replicas:
                replica.faults.add(UPDATE, "hang")
            with pytest.raises(DeadlinePassed) as late:
                await aside(send, client)
            assert {o.outcome for o in late.value.outcomes.values()} == {Result.WEDGED}


@pytest.mark.parametrize("in_url", [True, False])
async def test_a_token_comes_as_an_argument_or_in_the_url(in_url: bool) -> None:
    """And never shows in a message or a repr."""
    auth = settings_model.Auth(trainer_token=SecretStr("t-secret"))
    async with case_of(auth=auth) as case:
        url = url_of(case)
        bare = url.replace("http://", "http://trainer:t-secret@") if in_url else url
        with FleetWeightSyncClient(bare, token=None if in_url else "t-secret") as client:
            assert await aside(client.weight_info) == "default"
            assert "t-secret" not in repr(client)
            with pytest.raises(Forbidden) as refusal:
                await aside(client.fleet)
            assert "t-secret" not in str(refusal.value)
        with (
            FleetWeightSyncClient(url, token="wrong") as client,
            pytest.raises(Unauthenticated, match="Authorization"),
        ):
            await aside(client.pause)


async def test_a_gateway_may_live_under_a_path() -> None:
    """As behind an ingress."""
    async with listener(reply("200 OK", b'{"weight_version":"7"}')) as ingress:
        with FleetWeightSyncClient(f"{ingress.url}/team/a/") as client:
            assert await aside(client.weight_info) == "7"
        assert ingress.seen == [b"GET /team/a/weight_info HTTP/1.1"]


def test_it_has_the_methods_and_arguments_of_vllms_protocol() -> None:
    """vLLM itself is asked in tests/e2e; this is its protocol of 0.32 and 0.33 by hand."""
    protocol = {
        "init_weight_transfer_engine": ["init_info"],
        "start_weight_update": [],
        "update_weights": ["update_info"],
        "finish_weight_update": ["weight_version"],
        "shutdown_weight_transfer_engine": [],
    }
    for name, arguments in protocol.items():
        found = inspect.signature(getattr(FleetWeightSyncClient, name)).parameters
        assert list(found)[1:] == arguments


def test_it_needs_neither_torch_nor_vllm() -> None:
    """Rollout workers and plain scripts have neither."""
    script = (
        "import sys\n"
        "sys.modules.update(torch=None, vllm=None, numpy=None)\n"
        "import fleet.client, fleet.client.elastic, fleet.client.colocated\n"
        "fleet.client.FleetWeightSyncClient('http://127.0.0.1:1').close()\n"
        "fleet.client.AsyncFleetClient('http://127.0.0.1:1')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
