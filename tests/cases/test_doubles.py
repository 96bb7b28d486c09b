"""One server under two URLs counts once, wherever the second one comes from."""

from __future__ import annotations

from fleet.rules.membership import membership
from fleet.sim import SimFleet, SimReplica
from gateway.settings_model import Settings
from tests.cases.conftest import Case, case_of, check_error, fast, nccl
from tests.gateway.serving import serve
from tests.waiting import wait_until

MANY = 100


def by_name(replica: SimReplica) -> str:
    """Return the replica's URL with the host's name in place of its address."""
    return f"http://localhost:{replica.port}"


def id_by_name(replica: SimReplica) -> str:
    """Return the id that follows from that URL."""
    return f"localhost:{replica.port}"


async def seen(case: Case, replica_id: str) -> tuple[str, str] | None:
    """Return state and reason of a replica, None if there is none."""
    listed = (await case.http.get("/fleet/replicas")).json()["replicas"]
    return next(((r["state"], r["reason"]) for r in listed if r["id"] == replica_id), None)


async def await_seen(case: Case, replica_id: str, *expected: str) -> None:
    """Wait until a replica is in one of these states."""

    async def reached() -> bool:
        found = await seen(case, replica_id)
        return found is not None and found[0] in expected

    await wait_until(reached)


async def size(case: Case) -> int:
    """Return what a trainer counts."""
    return (await case.http.get("/get_world_size")).json()["world_size"]


async def test_adding_a_server_that_is_there_under_another_name_is_refused() -> None:
    """409 with the name that it has already, and nothing is changed."""
    async with case_of(nccl(2)) as case:
        first = case.replicas[0]
        before = await case.fleet()
        answer = await case.post("/fleet/replicas", {"url": by_name(first)})
        body = check_error(answer, 409, "is the same server as", first.id, "nothing was changed")
        assert body["error"]["type"] == "Refused"
        assert await seen(case, id_by_name(first)) is None
        assert (await case.fleet())["replicas"] == before["replicas"]
        again = await case.ok("/fleet/replicas", {"url": first.url})
        assert again["state"] == "ready", "its own name may be told again"


async def test_a_list_with_one_server_twice_counts_it_once() -> None:
    """No second place in the group, no second call, no rollouts; the reason is told."""
    async with SimFleet(nccl(2)) as sim:
        first = sim.replicas[0]
        listed = (first.url, by_name(first), sim.replicas[1].url)
        async with serve(Settings(replicas=listed, timeouts=fast())) as served:
            case = Case(sim, served)
            double = id_by_name(first)
            told = ("fenced", f"the same server as {first.id}")
            assert await seen(case, double) == told
            assert await size(case) == 2
            case.forget_logs()
            await case.first_sync("1")
            await case.ok("/pause")
            assert case.all_sent()[0] == case.all_sent()[1]
            await case.ok("/resume")
            answer = await case.post("/fleet/replicas", {"url": by_name(first)})
            check_error(answer, 409, "is the same server as", first.id)
            assert await seen(case, double) == told


async def test_a_restart_of_a_server_with_two_names_counts_it_once_all_along() -> None:
    """Whichever name tells the new boot first, one of them still stands for it."""
    async with SimFleet(nccl(1)) as sim:
        server = sim.replicas[0]
        both = (server.url, by_name(server))
        async with serve(Settings(replicas=both, timeouts=fast())) as served:
            case, ledger = Case(sim, served), served.gateway.ledger
            sizes: set[int] = set()
            ledger.watch(lambda state: sizes.add(membership(state).workers))
            for name in (server.id, id_by_name(server)):
                await case.first_sync()
                await server.restart()
                await served.gateway.registry.suspect(name)
                await await_seen(case, id_by_name(server), "fenced")
                assert (await served.states())[server.id] == "stale"
            assert sizes <= {0, 1}
            assert await size(case) == 1


async def test_a_second_name_is_let_in_when_the_first_is_removed() -> None:
    """The server serves on under the name that is left, once it was looked at."""
    async with SimFleet(nccl(1)) as sim:
        server = sim.replicas[0]
        both = (server.url, by_name(server))
        async with serve(Settings(replicas=both, timeouts=fast())) as served:
            case = Case(sim, served)
            await case.first_sync("1")
            await case.ok(f"/fleet/replicas/{server.id}/fence")
            assert (await case.http.delete(f"/fleet/replicas/{server.id}")).status_code == 200
            await await_seen(case, id_by_name(server), "fenced")
            found = await seen(case, id_by_name(server))
            assert found is not None
            assert "an operator asked for it" in found[1], "what it was fenced for goes with it"
            await case.first_sync("2")
            assert await seen(case, id_by_name(server)) == ("ready", "")


async def test_two_servers_that_tell_one_instance_by_accident_both_count() -> None:
    """Five hex digits are too few among hundreds: the starts of their processes tell them apart."""
    async with SimFleet(nccl(3)) as sim:
        for replica in sim.replicas[:2]:
            replica.engine.instance_id = "3fa2c"
        for replica in sim.replicas:
            replica.faults.add("/metrics", "delay", seconds=0.0, times=MANY)
        async with serve(Settings(replicas=tuple(sim.urls), timeouts=fast())) as served:
            case = Case(sim, served)
            assert await size(case) == 3
            await case.first_sync("1")
            assert await case.states() == ["ready"] * 3
            left = [replica.faults.as_json()[0]["times"] for replica in sim.replicas]
            asked = [MANY - times for times in left]
            assert asked == [1, 1, 0], "once each, and only where two tell one instance"
