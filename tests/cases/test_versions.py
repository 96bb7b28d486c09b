"""Weight versions: who names them, what may be a name, when they move and when they do not."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.cases.conftest import (
    FINISH,
    NAMES,
    START,
    UPDATE,
    all_of,
    case_of,
    check_error,
    nccl,
    outcomes_of,
    posts,
)
from tests.waiting import wait_until

DRAFT = "/start_draft_weight_update"
RELABEL = "/update_weight_version"


async def test_versions_are_counted_when_the_trainer_names_none() -> None:
    """1, 2, 3, written on every replica."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        for number in ("1", "2", "3"):
            await case.sync()
            assert await case.version() == number
            assert [r.engine.version for r in case.replicas] == [number] * 3


async def test_a_number_of_the_trainers_own_moves_the_counter() -> None:
    """A higher one does; a lower one and a name do not."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        for label, committed in [
            ("10", "10"),
            (None, "11"),
            ("step-3", "step-3"),
            (None, "12"),
            ("5", "5"),
            (None, "13"),
        ]:
            await case.sync(label)
            assert await case.version() == committed


async def test_without_auto_version_the_label_stays_what_it_was() -> None:
    """vLLM's own behaviour, if an operator wants it."""
    async with case_of(auto_version=False) as case:
        await case.first_sync("mine")
        await case.sync()
        assert await case.version() == "mine"
        assert (await case.complete()).headers["X-Weight-Version"] == "mine"
        assert posts(case.replicas[0], FINISH)[-1].body is None


BAD_LABELS: list[Any] = ["", "a b", "naïve", "v\n1", "x" * 129, 7, 1.5, True, [], {}]


async def test_a_label_that_cannot_be_one_is_refused_and_nothing_changes() -> None:
    """1 to 128 printable ASCII characters without spaces; the round stays open for a better one."""
    async with case_of() as case:
        await case.first_sync("good")
        assert (await case.start()).status_code == 200
        assert (await case.update()).status_code == 200
        before = await case.fleet()
        case.forget_logs()
        for label in BAD_LABELS:
            check_error(await case.post(FINISH, {"weight_version": label}), 400)
            check_error(await case.post(RELABEL, {"new_version": label}), 400)
        assert case.all_sent() == [[], [], []]
        assert await case.fleet() == before
        assert (await case.finish("x" * 128)).status_code == 200
        assert await case.version() == "x" * 128


async def test_relabelling_reaches_all_and_commits() -> None:
    """The same weights under another name; rollouts carry it from then on."""
    async with case_of() as case:
        await case.first_sync()
        answer = await case.ok(RELABEL, {"new_version": "renamed"})
        assert (answer["success"], answer["new_version"]) == (True, "renamed")
        assert await case.version() == "renamed"
        assert [r.engine.version for r in case.replicas] == ["renamed"] * 3
        assert await case.states() == ["ready"] * 3
        assert (await case.complete()).headers["X-Weight-Version"] == "renamed"


async def test_relabelling_that_one_refuses_is_set_back_on_the_others() -> None:
    """424, and the old label everywhere."""
    async with case_of() as case:
        await case.first_sync("old")
        case.replicas[1].faults.add(RELABEL, "status")
        answer = await case.post(RELABEL, {"new_version": "new"})
        check_error(answer, 424, case.replicas[1].id, "set back")
        assert outcomes_of(answer)[case.replicas[1].id] == "failed"
        assert await case.version() == "old"
        assert [r.engine.version for r in case.replicas] == ["old"] * 3
        assert await case.states() == ["ready"] * 3


async def test_relabelling_whose_answer_was_lost_is_set_back_there_too() -> None:
    """Whether that replica took the new label is unknown, so it is told the old one as well."""
    async with case_of() as case:
        await case.first_sync("old")
        case.replicas[1].faults.add(RELABEL, "lie", when="after")
        check_error(await case.post(RELABEL, {"new_version": "new"}), 424, case.replicas[1].id)
        assert [r.engine.version for r in case.replicas] == ["old"] * 3
        assert await case.version() == "old"


async def test_relabelling_is_refused_in_an_open_round() -> None:
    """409: the round names the version."""
    async with case_of() as case:
        await case.first_sync("old")
        assert (await case.start()).status_code == 200
        case.forget_logs()
        check_error(await case.post(RELABEL, {"new_version": "new"}), 409)
        assert case.all_sent() == [[], [], []]


async def test_a_draft_round_changes_no_version_and_lifts_nothing() -> None:
    """Replicas get the draft start, a bare finish, and go on under the same label."""
    async with case_of() as case:
        await case.first_sync("7")
        await case.ok(f"/fleet/replicas/{case.replicas[2].id}/fence")
        case.forget_logs()
        answer = await case.ok(DRAFT)
        assert answer["message"] == "Draft weight update started"
        assert (await case.update()).status_code == 200
        check_error(await case.finish("8"), 409, "draft")
        assert (await case.finish()).status_code == 200
        assert case.sent(0) == ["/pause", DRAFT, UPDATE, FINISH, "/resume"]
        assert posts(case.replicas[0], FINISH)[0].body is None
        assert await case.version() == "7"
        assert await case.states() == ["ready", "ready", "fenced"]
        await case.sync()
        assert await case.version() == "8"  # the counter did not move either


async def test_a_round_without_an_update_leaves_the_weights_and_lifts_no_fence() -> None:
    """Start and finish alone commit a label over the weights that were there."""
    async with case_of() as case:
        await case.first_sync("1")
        await case.ok(f"/fleet/replicas/{case.replicas[2].id}/fence")
        weights = [r.checksum for r in case.replicas]
        assert (await case.start()).status_code == 200
        assert (await case.finish()).status_code == 200
        assert await case.version() == "2"
        assert [r.checksum for r in case.replicas] == weights
        assert await case.states() == ["ready", "ready", "fenced"]
        assert (await case.complete()).headers["X-Weight-Version"] == "2"


async def test_a_partial_round_lifts_no_fence_and_admits_no_stale_replica() -> None:
    """Names that do not cover the fullest round so far: a patch fits only who was current."""
    async with case_of() as case:
        await case.first_sync("1")
        await case.ok(f"/fleet/replicas/{case.replicas[2].id}/fence")
        await case.sync(names=NAMES[:2])
        assert await case.version() == "2"
        assert await case.states() == ["ready", "ready", "fenced"]
        assert not (await case.rounds())[0]["full"]
        await case.sync(names=NAMES)
        assert await case.states() == ["ready"] * 3
        assert (await case.rounds())[0]["full"]


async def test_chunks_that_together_name_everything_are_a_full_round() -> None:
    """Bucketed updates heal like one big one."""
    async with case_of() as case:
        await case.first_sync("1")
        await case.ok(f"/fleet/replicas/{case.replicas[2].id}/fence")
        assert (await case.start()).status_code == 200
        for name in NAMES:
            assert (await case.update([name])).status_code == 200
        assert (await case.finish()).status_code == 200
        assert await case.states() == ["ready"] * 3
        assert (await case.rounds())[0]["updates"] == len(NAMES)


async def test_empty_metadata_stands_for_the_round_before() -> None:
    """From the second round on the stock trainer names nothing: full if the last one was."""
    async with case_of() as case:
        await case.first_sync("1")
        await case.ok(f"/fleet/replicas/{case.replicas[2].id}/fence")
        await case.sync(names=[])
        assert await case.states() == ["ready"] * 3
        await case.sync(names=NAMES[:1])
        await case.ok(f"/fleet/replicas/{case.replicas[2].id}/fence")
        await case.sync(names=[])
        assert await case.states() == ["ready", "ready", "fenced"]


async def test_empty_metadata_right_after_an_init_is_refused() -> None:
    """A replica that missed the previous call would load nothing: 409, nothing is sent."""
    async with case_of() as case:
        await case.first_sync()
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        case.forget_logs()
        check_error(await case.update([]), 409, "names no tensors")
        assert case.all_sent() == [[], [], []]
        assert (await case.update()).status_code == 200
        assert (await case.update([])).status_code == 200
        assert (await case.finish()).status_code == 200


async def test_a_list_of_updates_is_sliced_by_worker() -> None:
    """Indexed by global worker rank; each replica gets its own part, from 0."""
    async with case_of(nccl(2, world_sizes=(1, 2))) as case:
        assert (await case.init(4)).status_code == 200
        assert (await case.start()).status_code == 200
        items = [{"names": ["w"], "for": number} for number in range(3)]
        case.forget_logs()
        check_error(await case.post(UPDATE, {"update_info": items[:2]}), 400, "3 in all")
        assert case.all_sent() == [[], []]
        await case.ok(UPDATE, {"update_info": items})
        assert posts(case.replicas[0], UPDATE)[0].body == {"update_info": items[:1]}
        assert posts(case.replicas[1], UPDATE)[0].body == {"update_info": items[1:]}


async def test_a_sparse_update_takes_only_those_who_hold_the_committed_version() -> None:
    """A patch fits the weights it was made for; the world size counts exactly those."""
    async with case_of(nccl(3, backend="sparse_nccl")) as case:
        await case.first_sync("1")
        await case.ok(f"/fleet/replicas/{case.replicas[2].id}/fence")
        assert (await case.http.get("/get_world_size")).json()["world_size"] == 2
        check_error(await case.init(4), 409, "world_size=3", case.replicas[2].id)
        assert (await case.init(3)).status_code == 200
        await case.sync("2")
        assert await case.states() == ["ready", "ready", "fenced"]


async def test_two_versions_of_one_name_are_two_commits() -> None:
    """Order comes from commits, never from the string."""
    async with case_of() as case:
        await case.first_sync("a")
        await case.sync("b")
        await case.sync("a")
        assert await case.version() == "a"
        answers = await all_of([case.complete(X_Min_Weight_Version=v) for v in ("a", "b")])
        assert [a.status_code for a in answers] == [200, 200]


async def test_the_record_of_a_round_has_every_phase_and_every_replica() -> None:
    """Newest first, with times; the version, who opened it and how it ended."""
    async with case_of() as case:
        await case.first_sync("1")
        await case.sync("2")
        newest, older = await case.rounds()
        assert (newest["version"], older["version"]) == ("2", "1")
        assert newest["result"] == older["result"] == "committed"
        phases = {p["phase"]: p for p in newest["phases"]}
        assert set(phases) >= {"pausing", "starting", "updating", "finishing"}
        for phase in phases.values():
            assert phase["elapsed_s"] >= 0
            assert set(phase["replicas"]) == {r.id for r in case.replicas}
            assert {r["outcome"] for r in phase["replicas"].values()} == {"ok"}


async def test_a_start_while_another_start_is_on_its_way_joins_it() -> None:
    """Two equal starts at once are one."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        answers = await asyncio.gather(case.start(), case.start())
        assert [a.status_code for a in answers] == [200, 200]
        assert all(sent.count(START) == 1 for sent in case.all_sent())


async def test_a_replica_that_somebody_else_updates_serves_no_more() -> None:
    """It names a version that this fleet has not given it, so nobody knows what its weights are."""
    async with case_of() as case:
        await case.first_sync("1")
        stray = case.replicas[1]
        body = {"new_version": "mine"}
        direct = await case.http.post(f"{stray.url}/update_weight_version", json=body)
        assert direct.status_code == 200
        await case.await_states("ready", "fenced", "ready")
        told = (await case.http.get("/fleet/replicas")).json()["replicas"][1]
        assert "it names version mine, not 1" in told["reason"]
        await case.sync("2")
        assert await case.states() == ["ready"] * 3


async def test_a_label_that_is_slow_to_arrive_everywhere_fences_nobody() -> None:
    """Probes see it at some replicas long before it is committed."""
    async with case_of() as case:
        await case.first_sync("1")
        slow, quick = case.replicas[2], case.replicas[0]
        slow.faults.add("/update_weight_version", "delay", seconds=1.5)
        case.forget_logs()
        relabel = asyncio.ensure_future(
            case.post("/update_weight_version", {"new_version": "renamed"})
        )

        async def looked_at_often() -> bool:
            return len(quick.log.calls("/weight_info")) >= 5

        await wait_until(looked_at_often)
        assert not relabel.done()
        assert await case.states() == ["ready"] * 3
        assert (await relabel).status_code == 200
        assert await case.version() == "renamed"
