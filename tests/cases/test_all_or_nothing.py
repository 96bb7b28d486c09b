"""Promise 2: a phase that any member failed answers ≥ 400 with what happened on every replica.

Every phase × every kind of failure, on the second of three replicas. Each time: the status and
shape of the answer, each member's outcome, the version unmoved, the states afterwards, what was
taken back on the others, and that the fleet recovers by a new init and a full update.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx
import pytest

from fleet.rules.events import Event, UpdateFailed
from fleet.sim import SimReplica
from fleet.sim.faults import Action
from tests.cases.conftest import (
    FINISH,
    INIT,
    START,
    UPDATE,
    Case,
    case_of,
    check_error,
    fast,
    outcomes_of,
    posts,
)
from tests.waiting import wait_until

PATHS = {"init": INIT, "pause": "/pause", "start": START, "update": UPDATE, "finish": FINISH}
HANG_S = 1.2
"""The deadline of the phase that hangs: far above what a healthy one takes here."""


@dataclass(frozen=True)
class Row:
    """What the design says of one failure in one phase."""

    status: int
    outcome: str
    after: tuple[str, str, str]
    undone: tuple[str, ...] = ()


READY = ("ready", "ready", "ready")
GONE = ("ready", "gone", "ready")
FENCED = ("fenced", "fenced", "fenced")
BACK = (FINISH, "/resume")

TABLE: dict[tuple[str, Action], Row] = {
    ("init", "status"): Row(424, "failed", READY),
    ("init", "lie"): Row(424, "failed", READY),
    ("init", "drop"): Row(424, "unreachable", READY),
    ("init", "die"): Row(424, "unreachable", GONE),
    ("init", "hang"): Row(504, "wedged", ("ready", "wedged", "ready")),
    ("pause", "status"): Row(503, "failed", READY, ("/resume",)),
    ("pause", "lie"): Row(503, "failed", READY, ("/resume",)),
    ("pause", "drop"): Row(503, "unreachable", READY, ("/resume",)),
    ("pause", "die"): Row(503, "unreachable", GONE, ("/resume",)),
    ("pause", "hang"): Row(503, "timeout", READY, ("/resume",)),
    ("start", "status"): Row(424, "failed", READY, BACK),
    ("start", "lie"): Row(424, "failed", READY, BACK),
    ("start", "drop"): Row(424, "unreachable", READY, BACK),
    ("start", "die"): Row(424, "unreachable", GONE, BACK),
    ("start", "hang"): Row(504, "timeout", READY, BACK),
    ("update", "status"): Row(424, "failed", FENCED, (FINISH,)),
    ("update", "lie"): Row(424, "failed", FENCED, (FINISH,)),
    ("update", "drop"): Row(424, "unreachable", FENCED, (FINISH,)),
    ("update", "die"): Row(424, "unreachable", ("fenced", "gone", "fenced"), (FINISH,)),
    ("update", "hang"): Row(504, "wedged", ("fenced", "wedged", "fenced"), (FINISH,)),
    ("finish", "status"): Row(424, "failed", FENCED),
    ("finish", "lie"): Row(424, "failed", FENCED),
    ("finish", "drop"): Row(424, "unreachable", FENCED),
    ("finish", "die"): Row(424, "unreachable", ("fenced", "gone", "fenced")),
    ("finish", "hang"): Row(504, "timeout", FENCED),
}
COLLECTIVE = ("init", "update")


@pytest.mark.parametrize(("phase", "kind"), TABLE)
async def test_a_failure_of_one_is_told_taken_back_and_healed(phase: str, kind: Action) -> None:
    """One cell of the table, from the first good round to the recovery."""
    row = TABLE[phase, kind]
    limits = {f"{phase}_s": HANG_S} if kind == "hang" else {}
    async with case_of(timeouts=fast(**limits)) as case:
        await case.first_sync("good")
        case.forget_logs()
        # A pause is tried twice, since it may have met a connection that was just being closed.
        times = 2 if (phase, kind) == ("pause", "drop") else 1
        case.replicas[1].faults.add(PATHS[phase], kind, times=times)
        answer = await _until_it_fails(case, phase)
        _check_answer(case, answer, phase, row)
        assert await case.version() == "good"
        await case.await_states(*row.after)
        await _check_others(case, phase, row)
        assert await case.version() == "good"
        await _recover(case)


async def _until_it_fails(case: Case, phase: str) -> httpx.Response:
    if phase == "init":
        return await case.init()
    steps = {"start": case.start, "update": case.update, "finish": lambda: case.finish("bad")}
    failing = "start" if phase == "pause" else phase
    for name, step in steps.items():
        answer = await step()
        if name == failing:
            return answer
        assert answer.status_code == 200, answer.text
    raise AssertionError(phase)


def _check_answer(case: Case, answer: httpx.Response, phase: str, row: Row) -> None:
    culprit = case.replicas[1].id
    body = check_error(answer, row.status, phase, culprit, "weight_version good")
    assert body["hint"]
    found = outcomes_of(answer)
    assert set(found) == {replica.id for replica in case.replicas}
    assert found.pop(culprit) == row.outcome
    fine = {"ok", "wedged"} if phase in COLLECTIVE else {"ok"}  # not in time for a first failure
    assert set(found.values()) <= fine


async def _check_others(case: Case, phase: str, row: Row) -> None:
    """What the healthy members got, in order."""
    before = {
        "init": [INIT],
        "pause": ["/pause"],
        "start": ["/pause", START],
        "update": ["/pause", START, UPDATE],
        "finish": ["/pause", START, UPDATE, FINISH],
    }[phase]
    for index in (0, 2):
        replica = case.replicas[index]
        assert case.sent(index) == [*before, *row.undone]
        assert replica.engine.session is None
        labels = [call.body for call in posts(replica, FINISH)]
        assert labels == (
            [{"weight_version": "bad"}] if phase == "finish" else [None] * len(labels)
        )


async def _recover(case: Case) -> None:
    """Init with the number that is right now, a full update, and everybody in it serves again."""
    members = [
        r for r, state in zip(case.replicas, await case.states(), strict=True) if _fit(state)
    ]
    answer = await case.init(1 + len(members))
    assert answer.status_code == 200, answer.text
    await case.sync("healed")
    assert await case.version() == "healed"
    states = dict(zip([r.id for r in case.replicas], await case.states(), strict=True))
    assert {states[replica.id] for replica in members} == {"ready"}
    await _check_rollouts(case, members)


@pytest.mark.parametrize("kind", ["drop", "lie", "die"])
async def test_a_start_that_took_effect_unheard_is_closed_there_too(kind: Action) -> None:
    """A session left open on a server that is resumed would kill its engine at the next rollout."""
    async with case_of() as case:
        await case.first_sync("good")
        case.replicas[1].faults.add(START, kind, when="after")
        check_error(await case.start(), 424, case.replicas[1].id)
        await case.await_states(*(GONE if kind == "die" else READY))
        for replica in case.replicas:
            assert not replica.alive or replica.engine.session is None
        for _ in range(6):
            assert (await case.complete()).status_code == 200
        assert [r.log.outcomes["killed"] for r in case.replicas] == [0, 0, 0]
        await _recover(case)


async def test_a_start_that_cannot_be_undone_fences_that_replica_and_does_not_resume_it() -> None:
    """Its session may be open, so it stays paused and out until the next full update."""
    async with case_of() as case:
        await case.first_sync("good")
        case.forget_logs()
        case.replicas[1].faults.add(START, "status")
        case.replicas[0].faults.add(FINISH, "status")
        check_error(await case.start(), 424, case.replicas[1].id)
        assert await case.states() == ["fenced", "ready", "ready"]
        assert case.sent(0) == ["/pause", START, FINISH]
        assert case.replicas[0].engine.session == "model"
        assert await case.version() == "good"
        await _recover(case)


async def test_a_finish_that_only_some_completed_is_recorded_member_by_member() -> None:
    """They hold a label that is not committed: the record says who, and none of them serves."""
    async with case_of() as case:
        await case.first_sync("good")
        case.replicas[1].faults.add(FINISH, "status")
        assert (await case.start()).status_code == 200
        assert (await case.update()).status_code == 200
        check_error(await case.finish("bad"), 424)
        [failed, _] = await case.rounds()
        assert (failed["result"], failed["version"]) == ("failed", "bad")
        finishing = next(p for p in failed["phases"] if p["phase"] == "finishing")
        told = {r: outcome["outcome"] for r, outcome in finishing["replicas"].items()}
        assert [told[r.id] for r in case.replicas] == ["ok", "failed", "ok"]
        found = (await case.http.get("/fleet/replicas")).json()["replicas"]
        assert [r["weight_version"] for r in found] == ["bad", "good", "bad"]
        assert {r["state"] for r in found} == {"fenced"}
        assert await case.version() == "good"


async def test_a_session_that_no_finish_has_closed_gets_another_before_the_next_init() -> None:
    """The bare finish after the failure failed as well: the next start must not fall over it."""
    async with case_of() as case:
        await case.first_sync("1")
        await case.start()
        await case.update()
        case.replicas[1].faults.add(FINISH, "status", status=500, times=2)
        assert (await case.finish("2")).status_code == 424
        await wait_until(lambda: _has_posts(case.replicas[1], FINISH, 3))
        assert case.replicas[1].faults.as_json() == []
        await case.first_sync("3")
        assert await case.states() == ["ready"] * 3


async def test_a_bare_finish_that_comes_late_closes_no_session_of_the_next_round() -> None:
    """It is on its way since the failure; whoever inits and starts at once waits for it first."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        slow = case.replicas[1]
        slow.faults.add(FINISH, "delay", seconds=1.0)
        slow.faults.add(UPDATE, "status")
        check_error(await case.update(), 424, slow.id)
        assert (await case.init(4)).status_code == 200
        assert (await case.start()).status_code == 200
        await wait_until(lambda: _has_answered(slow, FINISH))
        assert slow.engine.session is not None
        assert (await case.update()).status_code == 200
        assert (await case.finish("1")).status_code == 200
        assert await case.states() == ["ready"] * 3


async def test_an_answer_that_comes_while_the_failure_is_written_down_still_ends_the_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told before it, the failure would call a replica silent that will never answer again."""
    async with case_of(timeouts=fast(probe_s=60)) as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        failing, late, _ = case.replicas
        failing.faults.add(UPDATE, "status")
        late.faults.add(UPDATE, "delay", seconds=0.5)
        ledger, go_on = case.gateway.ledger, asyncio.Event()
        apply = ledger.apply

        async def apply_late(event: Event) -> object:
            if isinstance(event, UpdateFailed):
                await go_on.wait()
            return await apply(event)

        monkeypatch.setattr(ledger, "apply", apply_late)
        updating = asyncio.ensure_future(case.update())
        await wait_until(lambda: _has_answered(late, UPDATE))
        go_on.set()
        check_error(await updating, 424, failing.id)
        await case.await_states("fenced", "fenced", "fenced")


async def _has_answered(replica: SimReplica, path: str) -> bool:
    calls = posts(replica, path)
    return bool(calls) and all(call.t_end is not None for call in calls)


@pytest.mark.parametrize("words", ["No weight update in progress", "not started"])
async def test_a_refused_start_is_taken_back_in_whatever_words_no_session_is_told(
    words: str,
) -> None:
    """Servers that speak the protocol need not use vLLM's words."""
    async with case_of() as case:
        await case.init()
        for path in (START, FINISH):
            body = {"error": {"message": words, "type": "X", "code": 500}}
            case.replicas[1].faults.add(path, "status", status=500, body=body)
        check_error(await case.start(), 424, "3 ready")
        assert (await case.http.get("/is_paused")).json() == {"is_paused": False}
        assert [replica.engine.paused for replica in case.replicas] == [None] * 3
        await case.sync("1")


async def _has_posts(replica: SimReplica, path: str, count: int) -> bool:
    return len(posts(replica, path)) == count


async def test_a_reset_ends_a_round_whose_update_hangs() -> None:
    """Its call is told so; who is silent is left out; the others go on, with equal bodies too."""
    async with case_of() as case:
        await case.first_sync("good")
        case.replicas[1].faults.add(UPDATE, "hang")
        assert (await case.start()).status_code == 200
        hanging = asyncio.ensure_future(case.update())
        await wait_until(lambda: _all_were_asked(case))
        said = await case.ok("/fleet/reset")
        assert set(said["wedged"]) == {case.replicas[1].id}
        assert await case.version() == "good"
        await case.await_states("fenced", "wedged", "fenced")
        assert (await case.init(3)).status_code == 200
        await case.sync("healed")
        assert await case.states() == ["ready", "wedged", "ready"]
        await case.replicas[1].die()  # only now does its call end
        check_error(await hanging, 409, "taken over")
        await case.replicas[1].start()
        await case.await_states("ready", "stale", "ready")
        await case.first_sync("whole")
        assert await case.states() == ["ready"] * 3


async def _all_were_asked(case: Case) -> bool:
    return all(len(posts(replica, UPDATE)) == 2 for replica in case.replicas)


def _fit(state: str) -> bool:
    return state not in ("gone", "wedged")


async def _check_rollouts(case: Case, members: list[SimReplica]) -> None:
    served: set[str] = set()
    for _ in range(2 * len(members)):
        answer = await case.complete()
        assert answer.headers["X-Weight-Version"] == "healed"
        assert answer.json()["sim"]["version"] == "healed"
        served.add(answer.headers["X-Fleet-Replica"])
    assert served == {replica.id for replica in members}
