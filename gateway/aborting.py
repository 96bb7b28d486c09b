"""Carrying an abort out: at this gateway's line, at the replicas, and at the other gateways.

Which request is meant, and under which ids a replica runs it, is decided in aborts.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from fleet.controls import Controls
from fleet.facts.outcome import Outcome
from gateway.aborts import Plan, aborted_answer
from gateway.rollouts import Rollouts
from gateway.routes.answers import count_of

if TYPE_CHECKING:
    from fleet.gateways.peers import Peers

ELSEWHERE_S = 1.0
"""How long to wait for other gateways; one that does not answer has its rollouts all the same."""


async def abort(
    rollouts: Rollouts, controls: Controls, peers: Peers, names: Collection[str] | None
) -> tuple[int, dict[str, Outcome]]:
    """Abort these rollouts (None: all) wherever they are; return how many, and the outcomes."""
    plan = _abort_held(rollouts, names)
    known = None if names is None else tuple(names)
    elsewhere = await peers.abort_elsewhere(known, ELSEWHERE_S)
    outcomes = await controls.abort(plan.body_for)
    ended = sum(count_of(o.answer, "aborted") for o in outcomes.values())
    return ended + len(plan.held) + elsewhere, outcomes


async def abort_here(rollouts: Rollouts, controls: Controls, names: Collection[str] | None) -> int:
    """Do this gateway's part for another one; return how many rollouts nobody else counts."""
    plan = _abort_held(rollouts, names)
    plan.unknown.clear()  # the asking gateway tries those itself
    if names is not None and plan.at:
        await controls.abort(plan.body_for)
    return len(plan.held)


def _abort_held(rollouts: Rollouts, names: Collection[str] | None) -> Plan:
    plan = Plan(rollouts.running, names)
    for exchange in plan.held:
        exchange.answer_held(*aborted_answer(exchange.request))
    return plan
