"""What every script stands on: servers, a gateway before them, the trainer's weights and engine.

A stage knows what differs between real vLLM on GPUs, real vLLM on CPUs and simulated servers; the
scripts do not. It stops all that it started when its block ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.gpu import environment
from bench.gpu.evidence import Evidence
from bench.gpu.forks import Forks
from bench.gpu.models import Qwen, SimWeights, Weights, count, nbytes
from bench.gpu.options import Options, gigabytes
from bench.gpu.processes import Child, Served, free_port, gateway, spawn
from fleet.client import FleetWeightSyncClient
from fleet.client.calls import Timeouts
from fleet.client.elastic import ElasticSession, Persistence

BOOT_S = {"gpu": 240.0, "gloo": 400.0, "sim": 90.0}
NAME = "tiny"
TIMEOUTS = Timeouts(init_s=120, start_s=120, update_s=180, finish_s=120, pause_s=90, control_s=90)
GATEWAY = {"FLEET_TIMEOUTS__INIT_S": "90", "FLEET_TIMEOUTS__UPDATE_S": "150"}

_GPU_FLAGS = (
    *("--enforce-eager", "--attention-backend", "TRITON_ATTN", "--dtype", "bfloat16"),
    *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "268435456"),
    *("--max-model-len", "1024", "--max-num-seqs", "16", "--max-num-batched-tokens", "1024"),
    "--no-enable-prefix-caching",
)
_CPU_FLAGS = ("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "256")


class Stage:
    """Servers, weights and engines of one kind; made by `staged`."""

    def __init__(self, options: Options, evidence: Evidence) -> None:
        self.options = options
        self.evidence = evidence
        self.scratch = options.scratch / evidence.path.stem
        self.weights = self._make_weights()
        self.children: list[Child] = []
        self.forks = None if options.real else Forks()
        self._seeds: dict[str, int] = {}

    # -- weights -----------------------------------------------------------------------------------

    def _make_weights(self) -> Weights:
        if not self.options.real:
            return SimWeights()
        device = "cuda:0" if self.options.kind == "gpu" else "cpu"
        if device != "cpu":
            import torch

            torch.cuda.set_device(0)
        began = time.monotonic()
        weights = Qwen(self.options.model, device)
        self.evidence.line(
            f"model: {count(self.options.model):,} parameters in bf16, "
            f"{gigabytes(nbytes(weights))}, made in {time.monotonic() - began:.1f} s"
        )
        return weights

    def directory(self, seed: int) -> str:
        """Weights of a seed on disk, by name; the trainer holds them afterwards."""
        self.weights.take(seed)
        return self.saved(f"seed-{seed}", seed)

    def saved(self, name: str, seed: int) -> str:
        """What the trainer holds now, on disk; `seed` is what a simulated server is told."""
        if name not in self._seeds:
            self.weights.save(self.scratch / name)
        self._seeds[name] = seed
        return name

    # -- servers -----------------------------------------------------------------------------------

    def launch(
        self,
        name: str,
        weights: str,
        *,
        gpus: Sequence[int] = (),
        flags: Sequence[str] = (),
        port: int | None = None,
    ) -> Served:
        """Start a server that boots from saved weights; `wait_for` waits for it.

        It has a worker for each of its GPUs.
        """
        port = port or free_port()
        log = self.scratch / f"{name}.log"
        if self.forks is None:
            command = self._vllm(self.scratch / weights, port, flags)
            process = spawn(command, log, self._server_environment(gpus))
        else:
            told = (port, self._seeds[weights], max(1, len(gpus)))
            process = self.forks.start("replica", told, log)
        server = Served(name, port, process, log)
        self.children.append(server)
        return server

    def _vllm(self, directory: Path, port: int, flags: Sequence[str]) -> list[str]:
        on_gpu = self.options.kind == "gpu"
        transfer = json.dumps({"backend": self.options.backend})
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(directory)),
            *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)),
            *("--weight-transfer-config", transfer),
            *(_GPU_FLAGS if on_gpu else _CPU_FLAGS),
            *flags,
        ]

    def _server_environment(self, gpus: Sequence[int]) -> dict[str, str]:
        if self.options.kind != "gpu":
            return {**environment.CPU_SERVER}
        visible = ",".join(map(str, gpus)) or "0"
        return {**environment.GPU_SERVER, "CUDA_VISIBLE_DEVICES": visible}

    def wait_for(self, servers: Sequence[Served]) -> None:
        """Wait until all are healthy, and note how long each took."""
        limit = BOOT_S[self.options.kind]
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.wait_ready(limit), servers))
        told = ", ".join(f"{s.name} {s.booted_s or 0:.0f} s" for s in servers)
        self.evidence.line(f"booted: {told}")

    def before(
        self, servers: Sequence[Served], settings: Mapping[str, str] | None = None
    ) -> Served:
        """A gateway before these servers, ready."""
        log = self.scratch / "gateway.log"
        chosen = {**GATEWAY, **(settings or {})}
        front = gateway([server.url for server in servers], log, chosen)
        self.children.append(front)
        front.wait_ready(60.0)
        return front

    def stop(self, *children: Child) -> None:
        """Stop some of them now."""
        with ThreadPoolExecutor(max(1, len(children))) as pool:
            list(pool.map(lambda child: child.stop(), children))
        self.children = [child for child in self.children if child not in children]

    def close(self) -> None:
        """Stop everything; the logs stay in the scratch folder."""
        self.stop(*self.children)
        if self.forks is not None:
            self.forks.close()

    # -- the trainer's side ------------------------------------------------------------------------

    timeouts = TIMEOUTS

    def client(self, url: str) -> FleetWeightSyncClient:
        """A client of a gateway, or of one server."""
        return FleetWeightSyncClient(url, timeouts=TIMEOUTS)

    def init_info(self, world_size: int, *, packed: bool = True, **more: Any) -> Any:
        """Where a group of this size meets, in the words of the stage's backend."""
        backend, port = self.options.backend, free_port()
        where = {"master_address": "127.0.0.1", "master_port": port, "world_size": world_size}
        if backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            return NCCLTrainerInitInfo(rank=0, packed=packed, **where, **more)
        if backend == "sparse_nccl":
            from vllm.distributed.weight_transfer.sparse_nccl_engine import (
                SparseNCCLTrainerInitInfo,
            )

            return SparseNCCLTrainerInitInfo(rank=0, **where)
        if backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=0, packed=packed, **more)
        if backend == "sparse_gloo":
            from fleet.backends.sparse_gloo import SparseGlooTrainerInitInfo

            return SparseGlooTrainerInitInfo(**where, timeout_s=60)
        from fleet.backends.gloo import GlooTrainerInitInfo

        return GlooTrainerInitInfo(**where, timeout_s=60)

    @property
    def source(self) -> Any:
        """What an engine walks; None for a backend that is given patches."""
        if self.options.backend.startswith("sparse") or not self.options.real:
            return None
        from vllm.distributed.weight_transfer.base import ModuleSource

        assert isinstance(self.weights, Qwen)
        return ModuleSource(self.weights.module)

    def join(self, client: Any, world_size: int, *, packed: bool = True, **more: Any) -> Any:
        """Meet the workers; returns an engine whose communicator is one that works."""
        if not self.options.real:
            return self._sim_init(world_size, client=client)
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        info = self.init_info(world_size, packed=packed, **more)
        engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=self.source)
        group = getattr(engine, "model_update_group", None)
        if getattr(group, "disabled", False):
            raise RuntimeError("NCCL switched itself off: preload 2.29.7 or newer (BENCH_NCCL)")
        return engine

    def session(
        self,
        client: Any,
        *,
        packed: bool = True,
        persistence: Persistence | None = None,
        **more: Any,
    ) -> ElasticSession:
        """An elastic session over this stage's backend."""

        def make(size: int) -> Any:
            return self.init_info(size, packed=packed, **more) if self.options.real else size

        return ElasticSession(
            client,
            make,
            self.source,
            persistence=persistence or Persistence(),
            trainer_init=None if self.options.real else self._sim_init,
        )

    def _sim_init(self, world_size: int, *, client: Any, source: Any = None) -> Any:
        from bench.gpu.sim_engine import SimEngine

        del source
        return SimEngine(client, self.weights, world_size)

    # -- looking -----------------------------------------------------------------------------------

    def checksums(self, servers: Sequence[Served]) -> list[dict[str, str]]:
        """Every server's checksums, asked at the same time.

        vLLM on a CPU keeps the weights of linear layers packed elsewhere, so those never change
        there: only what it does report is returned.
        """
        with ThreadPoolExecutor(len(servers)) as pool:
            found = list(pool.map(lambda server: server.checksums(), servers))
        if self.options.kind != "gloo":
            return found
        return [{k: v for k, v in sums.items() if "norm" in k or "embed" in k} for sums in found]

    def compare(self, servers: Sequence[Served], wanted: Mapping[str, str], what: str) -> bool:
        """Check that each of these servers holds the weights with these checksums."""
        holds = True
        for server, found in zip(servers, self.checksums(servers), strict=True):
            other = sum(found.get(name) != wanted[name] for name in wanted)
            text = f"{server.name}: {len(wanted) - other} of {len(wanted)} checksums equal {what}"
            holds &= self.evidence.check(other == 0 and len(found) == len(wanted), text)
        return holds

    def synchronize(self) -> None:
        """Wait for the trainer's GPU, if it has one."""
        if self.options.kind == "gpu":
            import torch

            torch.cuda.synchronize()


@contextmanager
def staged(options: Options, evidence: Evidence) -> Generator[Stage]:
    """A stage that is cleared at the end, whatever happens."""
    stage = Stage(options, evidence)
    try:
        yield stage
    finally:
        stage.close()
