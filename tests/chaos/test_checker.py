"""Each rule of the checker finds what it is there for, in a history made by hand, and only that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fleet.facts.layout import lay_out
from fleet.facts.state import FleetState, Phase, Round
from fleet.rules.membership import form_group
from tests.chaos.checker import FINISH, START, check
from tests.chaos.history import Called, Did, History, Made, Outage, Rollout, Served, Written
from tests.fleets import NOW, change, fleet_of, replica

OLD, NEW = Made(version="1", checksum="w1"), Made(version="2", checksum="w2")


def states() -> list[Written]:
    """A full round from version 1 to 2 on two replicas, one of them fenced before."""
    one, two = replica("a", holds=1), replica("b", holds=None, fence="restarted in an update")
    fleet = fleet_of(one, two, weight_version="1", commits=("1",), commit_index=1)
    members = [one, two]
    group = form_group(fleet, members, {}, lay_out(members, base=1), "trainer", NOW)
    opened = Round(id=2, generation=2, opened_by="trainer", opened_at=NOW, full=True, version="2")
    started = change(fleet, generation=2, group=group, round=opened, phase=Phase.STARTED)
    finishing = change(started, phase=Phase.FINISHING)
    committed = change(finishing.with_commit("2"), phase=Phase.COMMITTED)
    healed = [change(r, holds=2, fence=None) for r in members]
    committed = committed.with_replicas(healed)
    over = change(committed, phase=Phase.INITIALIZED, round=None)
    found = (fleet, started, finishing, committed, over)
    return [Written(at=10.0 * n, revision=n, state=state) for n, state in enumerate(found, 1)]


def did(name: str, path: str, began: float, **more: Any) -> Did:
    """One call that a replica answered at once."""
    facts: dict[str, Any] = {"boot": 1, "ended": began + 0.5, "status": 200}
    return Did(replica=name, path=path, began=began, **(facts | more))


def rollout(began: float, *made: Made, **more: Any) -> Rollout:
    """A good answer to a rollout."""
    facts: dict[str, Any] = {"gateway": "gateway 0", "ended": began + 1, "status": 200}
    facts |= {"label": made[0].version, "replica": "a", "made": made}
    return Rollout(began=began, **(facts | more))


def call(**more: Any) -> Called:
    """A control call that was answered in time."""
    facts: dict[str, Any] = {"gateway": "gateway 0", "path": START, "began": 19.0, "ended": 20.0}
    facts |= {"deadline_s": 30.0, "status": 200}
    return Called(**(facts | more))


def good() -> History:
    """A history without any fault."""
    return History(
        rollouts=[
            rollout(11.0, OLD),
            rollout(18.0, OLD, NEW, ended=41.0, end_label="2"),
            rollout(42.0, NEW, is_stream=True),
        ],
        calls=[call()],
        did=[did(name, START, 21.0) for name in "ab"]
        + [did(name, FINISH, 35.0, version="2") for name in "ab"],
        served=[
            Served(replica="a", began=11.0, ended=12.0, outcome="finished"),
            Served(replica="a", began=18.0, ended=41.0, outcome="finished"),
        ],
        states=states(),
        weights={"default": "w0", "1": "w1", "2": "w2"},
    )


def broken(history: History) -> set[str]:
    """The rules that a history breaks."""
    return {rule for rule, found in check(history).items() if found}


def test_a_good_history_breaks_no_rule() -> None:
    """A rollout may span an update, be streamed, and end under another label, if it says so."""
    assert broken(good()) == set()


def with_rollout(one: Rollout) -> Callable[[History], None]:
    """A history with one rollout more."""
    return lambda history: history.rollouts.append(one)


def with_state(at: int, **facts: Any) -> Callable[[History], None]:
    """A history in which one state had other facts."""

    def act(history: History) -> None:
        state: FleetState = history.states[at].state
        history.states[at] = replace(history.states[at], state=change(state, **facts))

    return act


def without_finish_of_b(history: History) -> None:
    """The second member never finished."""
    history.did = [d for d in history.did if (d.replica, d.path) != ("b", FINISH)]


def with_late_finish_of_b(history: History) -> None:
    """The second member finished after the commit."""
    without_finish_of_b(history)
    history.did.append(did("b", FINISH, 41.0, version="2"))


def with_failed_finish_of_b(history: History) -> None:
    """The second member refused to finish."""
    without_finish_of_b(history)
    history.did.append(did("b", FINISH, 35.0, version="2", status=500))


def with_partial_round(history: History) -> None:
    """The round that lifted the fence was not a full one."""
    for at in (1, 2, 3):
        opened = history.states[at].state.round
        assert opened is not None
        with_state(at, round=change(opened, full=False))(history)


def with_fence_lifted_early(history: History) -> None:
    """The fence went when the round began."""
    healed = change(history.states[1].state.replicas["b"], fence=None)
    with_state(1, replicas=history.states[1].state.replicas | {"b": healed})(history)


def with_rollout_in_session(history: History) -> None:
    """A replica answered between its start and its finish."""
    history.served.append(Served(replica="b", began=25.0, ended=26.0, outcome="finished"))


def with_second_commit_of_2(history: History) -> None:
    """The same version was committed once more."""
    history.states.append(
        Written(at=60.0, revision=9, state=history.states[-1].state.with_commit("2"))
    )


LABEL = "a_rollout_is_served_by_the_weights_of_its_label"
BACK = "labels_never_go_back"
SESSION = "no_rollout_inside_start_and_finish"
LOST = "every_rollout_is_answered"
COMMIT = "a_version_commits_only_when_every_member_has_arrived"
FENCE = "a_fence_is_lifted_only_by_a_full_update"
VERSION = "the_version_never_goes_back"
TIME = "every_call_is_answered_in_time"
BAD: dict[str, tuple[str, Callable[[History], None]]] = {
    "other weights": (LABEL, with_rollout(rollout(11.0, Made(version="1", checksum="w2")))),
    "new weights, old label": (LABEL, with_rollout(rollout(12.0, NEW, label="1"))),
    "old weights, new label": (LABEL, with_rollout(rollout(50.0, OLD, label="2"))),
    "never committed": (LABEL, with_rollout(rollout(50.0, Made(version="3", checksum="w3")))),
    "nobody made it": (LABEL, with_rollout(rollout(50.0, NEW, made=()))),
    "end not told": (LABEL, with_rollout(rollout(18.0, OLD, NEW, ended=41.0))),
    "older than seen": (BACK, with_rollout(rollout(50.0, OLD, replica="b"))),
    "in session": (SESSION, with_rollout_in_session),
    "engine killed": (SESSION, lambda history: history.engines_killed.append(("a", 22.0))),
    "no answer": (LOST, with_rollout(rollout(50.0, NEW, status=None))),
    "an error": (LOST, with_rollout(rollout(50.0, NEW, status=503))),
    "a broken stream": (LOST, with_rollout(rollout(50.0, NEW, broken=True, is_stream=True))),
    "one did not finish": (COMMIT, without_finish_of_b),
    "one finished too late": (COMMIT, with_late_finish_of_b),
    "one refused": (COMMIT, with_failed_finish_of_b),
    "not a full round": (FENCE, with_partial_round),
    "fence lifted by a start": (FENCE, with_fence_lifted_early),
    "older version": (VERSION, with_state(4, weight_version="1")),
    "older generation": (VERSION, with_state(4, generation=1)),
    "committed twice": (VERSION, with_second_commit_of_2),
    "late answer": (TIME, lambda history: history.calls.append(call(ended=60.0))),
    "never answered": (TIME, lambda history: history.calls.append(call(status=None))),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_breaks_the_rule_that_is_there_for_it(name: str) -> None:
    """Each rule is seen red."""
    rule, spoil = BAD[name]
    history = good()
    spoil(history)
    assert rule in broken(history)


def outage(target: str, **more: Any) -> Outage:
    """A fault around second 50."""
    facts: dict[str, Any] = {"kind": "any", "began": 49.0, "ended": 50.0}
    return Outage(target=target, **(facts | more))


@pytest.mark.parametrize("target", ["gateway 0", "a", "store"])
def test_a_rollout_that_a_fault_explains_is_no_violation(target: str) -> None:
    """Its gateway, a replica or the store was hit at that time."""
    history = good()
    history.rollouts.append(rollout(50.0, NEW, status=None))
    history.outages.append(outage(target))
    assert broken(history) == set()


@pytest.mark.parametrize("found", [outage("gateway 1"), outage("a", began=1.0, ended=2.0)])
def test_another_gateways_or_an_old_fault_excuses_nothing(found: Outage) -> None:
    """What was hit must have something to do with the rollout."""
    history = good()
    history.rollouts.append(rollout(50.0, NEW, status=None))
    history.outages.append(found)
    assert broken(history) == {LOST}


def test_a_call_at_a_gateway_that_died_is_no_violation() -> None:
    """Nobody could answer it."""
    history = good()
    history.calls.append(call(status=None))
    history.outages.append(outage("gateway 0", began=19.5, ended=19.6, kind="gateway killed"))
    assert broken(history) == set()


def test_a_call_whose_gateway_lost_only_its_store_must_be_answered() -> None:
    """Then it answers that it does not know."""
    history = good()
    history.calls.append(call(status=None))
    history.outages.append(outage("gateway 0", began=19.5, ended=19.6, kind="store slow"))
    assert broken(history) == {TIME}


def test_a_gateway_that_stood_still_may_not_know_of_the_last_commit() -> None:
    """It passes an answer on that it could not see the end of."""
    history = good()
    history.rollouts.append(rollout(18.0, OLD, NEW, ended=41.0))
    history.outages.append(outage("gateway 0", began=30.0, ended=41.0, kind="gateway frozen"))
    assert broken(history) == set()


@pytest.mark.parametrize(("restores", "found"), [(True, set[str]()), (False, {VERSION})])
def test_what_a_gateway_brings_back_counts_once_it_is_built_on(
    restores: bool, found: set[str]
) -> None:
    """A gateway that slept may bring an old state back to an empty store; others overrule it."""
    history = good()
    old = replace(history.states[0], at=55.0, revision=9, restores=restores)
    history.states += [old, replace(history.states[-1], at=56.0, revision=10)]
    assert broken(history) & {VERSION} == found


def test_a_restarted_replica_may_lose_its_fence() -> None:
    """It is another server then; it is stale instead."""
    history = good()
    born = replica("b", instance="boot-2-of-b", holds=None)
    with_state(1, replicas=history.states[1].state.replicas | {"b": born})(history)
    assert broken(history) == set()
