"""Clients of a gateway, for trainers and rollout workers; they need neither torch nor vLLM.

- `FleetWeightSyncClient` is what vLLM's trainer engines take as `client=`, and controls the fleet.
- `AsyncFleetClient` asks for rollouts, and says which weights made them.
- `FleetError` is what both raise; its tree is in `errors.py`.

`elastic.py` keeps a trainer's group in step with a fleet that changes, `colocated.py` shares one
GPU's memory between trainer and replicas.
"""

from fleet.client.calls import Timeouts
from fleet.client.errors import FleetError
from fleet.client.rollouts import AsyncFleetClient
from fleet.client.sync import FleetWeightSyncClient

__all__ = ["AsyncFleetClient", "FleetError", "FleetWeightSyncClient", "Timeouts"]
