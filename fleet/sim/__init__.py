"""Simulated vLLM replicas on real sockets with real tensors, and a trainer to drive them.

For tests, the demo and trying a gateway out without a GPU. The replicas behave as vLLM 0.32
was seen to (tests/conformance runs against both), killing and wedging included; what they leave
out is said in each module. They run no model: `generation.py` says what their answers are made of.
"""

from fleet.sim.fleet import SimFleet, serve
from fleet.sim.options import SimOptions
from fleet.sim.replica import SimReplica

__all__ = ["SimFleet", "SimOptions", "SimReplica", "serve"]
