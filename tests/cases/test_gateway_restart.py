"""Promise 6, as far as one gateway goes: what is in Redis survives it."""

from __future__ import annotations

from fleet.sim import SimFleet
from gateway.settings_model import Settings
from tests.cases.conftest import Case, check_error, fast, nccl
from tests.gateway.serving import serve


async def test_a_new_gateway_on_the_same_redis_goes_on_where_the_old_one_was(
    redis_url: str,
) -> None:
    """Version, fences, generation, group and records survive; the trainer's next start works."""
    async with SimFleet(nccl(3)) as sim:
        settings = Settings(replicas=tuple(sim.urls), store=redis_url, timeouts=fast())
        async with serve(settings) as served:
            old = Case(sim, served)
            await old.first_sync("seven")
            await old.sync("8")
            await old.ok(f"/fleet/replicas/{sim.replicas[2].id}/fence")
            before = await old.fleet()
            layout = (await old.http.get("/fleet/layout")).json()
        async with serve(settings) as served:
            new = Case(sim, served)
            after = await new.fleet()
            for key in ("generation", "weight_version", "phase", "replicas", "kv"):
                assert after[key] == before[key], key
            assert (await new.http.get("/fleet/layout")).json() == layout
            assert [r["version"] for r in await new.rounds()] == ["8", "seven"]
            assert await new.states() == ["ready", "ready", "fenced"]
            assert (await new.complete()).headers["X-Weight-Version"] == "8"
            await new.sync(names=["embed"])  # the fullest round is known too: this is a partial one
            assert await new.version() == "9"
            assert await new.states() == ["ready", "ready", "fenced"]
            await new.sync()
            assert await new.states() == ["ready", "ready", "ready"]


async def test_a_gateway_that_stopped_after_an_init_is_replaced_before_the_start(
    redis_url: str,
) -> None:
    """The group and its generation are the same; a member that restarted meanwhile is found out."""
    async with SimFleet(nccl(3)) as sim:
        settings = Settings(replicas=tuple(sim.urls), store=redis_url, timeouts=fast())
        async with serve(settings) as served:
            old = Case(sim, served)
            assert (await old.init()).status_code == 200
            generation = (await old.fleet())["generation"]
        async with serve(settings) as served:
            new = Case(sim, served)
            assert (await new.fleet())["generation"] == generation
            await new.sync("1")
        await sim.replicas[1].restart()
        async with serve(settings) as served:
            newest = Case(sim, served)
            check_error(await newest.start(), 409, sim.replicas[1].id, "restarted")
            assert await newest.version() == "1"
            assert await newest.states() == ["ready", "stale", "ready"]
            await newest.first_sync("2")
            assert (await newest.fleet())["generation"] > generation
            assert await newest.states() == ["ready", "ready", "ready"]


async def test_the_trainers_pause_survives_the_gateway(redis_url: str) -> None:
    """A new gateway holds rollouts from its first moment, until the trainer resumes."""
    async with SimFleet(nccl(2)) as sim:
        settings = Settings(replicas=tuple(sim.urls), store=redis_url, timeouts=fast())
        async with serve(settings) as served:
            await Case(sim, served).ok("/pause?mode=keep")
        async with serve(settings) as served:
            new = Case(sim, served)
            assert await new.states() == ["paused", "paused"]
            assert (await new.fleet())["gate"]["state"] == "closed"
            await new.ok("/resume")
            assert await new.states() == ["ready", "ready"]


async def test_sleepers_are_known_to_a_new_gateway_before_it_serves(redis_url: str) -> None:
    """Case 20: nobody wakes a server by killing it."""
    async with SimFleet(nccl(2)) as sim:
        settings = Settings(replicas=tuple(sim.urls), store=redis_url, timeouts=fast())
        async with serve(settings) as served:
            await Case(sim, served).ok("/sleep")
        async with serve(settings) as served:
            new = Case(sim, served)
            assert await new.states() == ["asleep", "asleep"]
            await new.ok("/wake_up")
            assert (await new.complete()).status_code == 200
        assert [r.log.outcomes["killed"] for r in sim.replicas] == [0, 0]


async def test_a_new_gateway_with_an_empty_store_does_not_route_to_a_sleeper() -> None:
    """Case 20 without a memory: the servers themselves say that they do not run."""
    async with SimFleet(nccl(2)) as sim:
        settings = Settings(replicas=tuple(sim.urls), timeouts=fast())
        async with serve(settings) as served:
            await Case(sim, served).ok("/sleep")
        async with serve(settings) as served:
            new = Case(sim, served)
            assert set(await new.states()) <= {"asleep", "paused"}
            await new.ok("/wake_up")
            await new.ok("/resume")
            assert (await new.complete()).status_code == 200
        assert [r.log.outcomes["killed"] for r in sim.replicas] == [0, 0]
