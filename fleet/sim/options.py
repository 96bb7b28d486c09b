"""What a simulated fleet is made of: one frozen value, shared by the CLI, the demo and the tests.

It holds choices only. Ports, boot-time identities and everything that changes live elsewhere.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Backend = Literal["gloo", "nccl", "ipc", "sharded_rdt", "nccl_m2n", "sparse_nccl", "modelexpress"]
Topology = Literal["independent", "dense_dp", "moe_dp"]
PauseBehaviour = Literal["queue", "reject"]
AsleepBehaviour = Literal["die", "queue"]


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """How many simulated replicas there are and how each behaves; times in seconds.

    `world_sizes` gives replicas of unequal size and wins over `world_size`. `base_port` 0 takes
    free ports. `control_port` None opens no control port, 0 a free one.

    `topology` says what /get_world_size and /server_info tell: `independent` servers; one
    `dense_dp` deployment started with --data-parallel-rank (vLLM then reports a data parallel
    size of 1 and a `data_parallel_index` of the server's own); or one `moe_dp` deployment, where
    every server reports the world size of all of them.

    `weight_endpoints` False leaves out the weight transfer routes, as a server without vLLM's
    development mode does. `draft_model` and `lora` say whether those are configured. Of several
    `api_processes` each names an instance of its own, and one after the other answers.
    """

    replicas: int = 1
    world_size: int = 1
    world_sizes: tuple[int, ...] | None = None
    host: str = "127.0.0.1"
    base_port: int = 0
    control_port: int | None = None
    backend: Backend = "gloo"
    topology: Topology = "independent"
    model: str = "sim"
    seed: int = 0
    hidden_size: int = 32
    max_model_len: int = 32768
    block_size: int = 16
    token_delay_ms: float = 1.0
    init_timeout_s: float = 300.0
    keep_alive_s: float = 5.0
    pause_latency_s: float = 0.02
    death_grace_s: float = 0.3
    pause_behaviour: PauseBehaviour = "queue"
    asleep_behaviour: AsleepBehaviour = "die"
    weight_endpoints: bool = True
    draft_model: bool = True
    lora: bool = True
    vllm_version: str = "0.32.0+sim"
    api_processes: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        if self.world_sizes is not None and len(self.world_sizes) != self.replicas:
            raise ValueError(f"{len(self.world_sizes)} world sizes for {self.replicas} replicas")
        least = min(self.world_sizes or (self.world_size,))
        if least < 1:
            raise ValueError(f"world_size must be at least 1, got {least}")
        if self.backend not in get_args(Backend):
            known = ", ".join(get_args(Backend))
            raise ValueError(f"backend must be one of {known}, got {self.backend!r}")
        if not 0 <= self.token_delay_ms < math.inf:
            raise ValueError(f"token_delay_ms must be 0 or more, got {self.token_delay_ms}")

    def workers_of(self, index: int) -> int:
        """Workers (TP times PP) of replica `index`."""
        return self.world_size if self.world_sizes is None else self.world_sizes[index]

    def data_parallel_size(self) -> int:
        """What a replica calls its data parallel size; only a MoE deployment counts siblings."""
        return self.replicas if self.topology == "moe_dp" else 1

    def data_parallel_index(self, index: int) -> int:
        """Which data parallel rank replica `index` has inside its deployment."""
        return 0 if self.topology == "independent" else index
