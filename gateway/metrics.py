"""Every metric, named once, with its unit; counted where things happen, read at /metrics.

Gauges are computed from the fleet's state when they are read, so they cannot drift from it.
"""

from __future__ import annotations

import os
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from time import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from fleet.facts.replica import ReplicaState
from fleet.facts.state import UNSET_VERSION, FleetState, Phase
from fleet.gateways.gate import Load
from gateway.gate import RolloutGate

SERIES_KEPT = 64
"""How many pairs of version and status class the counter of rollouts shows at once."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """The counters of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = self._shown = CollectorRegistry()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # what is counted lies in files of all workers
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown)
        self._rollouts: dict[tuple[str, int], Counter] = {}
        self.rollouts = Counter(
            "fleet_rollouts",
            "Rollouts answered by a replica, by weight version at dispatch and status class.",
            ["version", "status"],
            registry=self.registry,
        )
        self.rollouts_refused = Counter(
            "fleet_rollouts_refused",
            "Rollouts that no replica answered, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.rollouts_cancelled = Counter(
            "fleet_rollouts_cancelled",
            "Rollouts whose client left before the answer was complete.",
            registry=self.registry,
        )
        self.rollouts_broken = Counter(
            "fleet_rollouts_broken",
            "Rollouts whose replica broke off in the middle of the answer.",
            registry=self.registry,
        )
        self.rollouts_spanning = Counter(
            "fleet_rollouts_spanning",
            "Rollouts whose last token came under another weight version than their first.",
            registry=self.registry,
        )
        self.rollout_held_s = Histogram(
            "fleet_rollout_held_seconds",
            "How long rollouts that were held at the gate waited there.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.control_s = Histogram(
            "fleet_control_seconds",
            "Control calls, from the last byte of the request to the answer, by path and status.",
            ["path", "status"],
            buckets=SECONDS,
            registry=self.registry,
        )

    def count_rollout(self, version: str, status: int) -> None:
        """Count one rollout that a replica has answered."""
        key = (version, status // 100)
        child = self._rollouts.get(key)
        if child is None:
            child = self._rollouts[key] = self.rollouts.labels(version, status // 100 * 100)
            self._forget_old_versions()
        child.inc()

    def _forget_old_versions(self) -> None:
        """Keep the label's values few: a training run commits thousands of versions.

        Several workers count in files, from which the library takes nothing away.
        """
        while self._shown is self.registry and len(self._rollouts) > SERIES_KEPT:
            version, status = next(iter(self._rollouts))
            del self._rollouts[version, status]
            self.rollouts.remove(version, status * 100)

    def observe(
        self,
        state_of: Callable[[], FleetState],
        gate: RolloutGate,
        load_of: Callable[[], Load],
        connections: Mapping[str, int],
    ) -> None:
        """Add what is read off the fleet's state and off what is in hand here."""
        self._shown.register(_FleetCollector(state_of, gate, load_of, connections))

    def render(self) -> bytes:
        """Return the exposition in Prometheus' text format, of all workers if there are several."""
        return generate_latest(self._shown)


class _FleetCollector(Collector):
    def __init__(
        self,
        state_of: Callable[[], FleetState],
        gate: RolloutGate,
        load_of: Callable[[], Load],
        connections: Mapping[str, int],
    ) -> None:
        self._state_of = state_of
        self._gate = gate
        self._load_of = load_of
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        state = self._state_of()
        yield from self._fleet(state)
        yield from self._replicas(state)
        yield from self._rollouts()
        yield from self._calls()

    def _fleet(self, state: FleetState) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "fleet_generation", "Generation of the current group.", state.generation
        )
        yield GaugeMetricFamily(
            "fleet_commits", "Weight versions committed so far.", state.commit_index
        )
        info = InfoMetricFamily("fleet", "Where the fleet stands.")
        version = state.weight_version or UNSET_VERSION
        info.add_metric([], {"weight_version": version, "phase": state.phase, "kv": state.kv})
        yield info
        since = state.pause.since if state.pause else None
        yield GaugeMetricFamily(
            "fleet_trainer_pause_seconds",
            "How long the trainer's own pause has lasted; alarm on it: the trainer may be dead.",
            time() - since if since else 0.0,
        )
        opened = state.round.opened_at if state.round else None
        yield GaugeMetricFamily(
            "fleet_round_open_seconds",
            "How long the current round has been open; alarm on it: the trainer may be dead.",
            time() - opened if opened else 0.0,
        )

        failed = state.round.closed_at if state.round and state.phase is Phase.FAILED else None
        yield GaugeMetricFamily(
            "fleet_round_failed_seconds",
            "How long the fleet has waited for an init after a failed round, 0 if it does not.",
            time() - failed if failed else 0.0,
        )
        yield GaugeMetricFamily(
            "fleet_call_seconds",
            "How long the control call that moves the round has been on its way, 0 without one.",
            time() - state.holder.since if state.holder else 0.0,
        )
        yield GaugeMetricFamily(
            "fleet_gateways", "Gateways that serve this fleet.", len(state.gateways)
        )

    def _replicas(self, state: FleetState) -> Iterator[Metric]:
        tally = Tally(found for _, found, _ in state.states())
        family = GaugeMetricFamily("fleet_replicas", "Replicas by state.", labels=["state"])
        for name in ReplicaState:
            family.add_metric([name.value], tally[name])
        yield family

    def _rollouts(self) -> Iterator[Metric]:
        load = self._load_of()
        yield GaugeMetricFamily("fleet_gate_held", "Rollouts waiting at the gate.", load.held)
        yield GaugeMetricFamily(
            "fleet_gate_held_bytes", "Bytes of rollouts waiting at the gate.", load.held_bytes
        )
        yield GaugeMetricFamily(
            "fleet_gate_oldest_held_seconds",
            "How long the rollout that waits longest at this gateway has waited.",
            self._gate.oldest_held_s,
        )
        yield GaugeMetricFamily(
            "fleet_lease_lapsed",
            "1 if this gateway admits nobody because it cannot see the fleet, else 0.",
            float(self._gate.lease_lapsed),
        )
        closed = self._gate.closed_since
        yield GaugeMetricFamily(
            "fleet_gate_closed_seconds",
            "How long the gate has been closed, 0 while it is open.",
            time() - closed if closed else 0.0,
        )
        family = GaugeMetricFamily(
            "fleet_rollouts_in_flight", "Rollouts at each replica.", labels=["replica"]
        )
        for replica, count in load.inflight.items():
            family.add_metric([replica], count)
        yield family

    def _calls(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "fleet_phase_calls",
            "Calls of this gateway to replicas that must not be repeated, by when their connection "
            "was opened.",
            labels=["opened"],
        )
        for opened, count in self._connections.items():
            family.add_metric([opened], count)
        yield family
