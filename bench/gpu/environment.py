"""What a machine offers, and the variables under which vLLM and NCCL run on it.

vLLM 0.33 needs NCCL 2.29.7 or newer. With an older one its communicator switches itself off
without an error, every call is answered 200, and the servers hold garbage. So where a newer library
is named by BENCH_NCCL, it is preloaded, in the servers and in the trainer.

NVLink multicast stays off: on shared hosts it can put GPUs out of service for others.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

NCCL_LIBRARY = "BENCH_NCCL"

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
LOCAL = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}
GPU_SERVER = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "NCCL_DEBUG": "WARN",
}
CPU_SERVER = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
SHOWN = ("NCCL_", "TORCH_", "NVSHMEM_", "CUDA_", "LD_PRELOAD", "BENCH_", "VLLM_ALLOW")
PACKAGES = ("torch", "vllm", "transformers", "triton", "fastapi", "aiohttp", "vllm-fleet-gateway")


def ranks_on_one_gpu(ctas: int) -> dict[str, str]:
    """Let several NCCL ranks share a GPU: NCCL 2.30 or newer, the same in every rank.

    Each rank's kernel must fit beside the others', so it gets few thread blocks (CTAs), which
    bounds the rate of a broadcast: compare it with a bare one under the same bound.
    """
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": str(ctas)}


def enter(wanted: Mapping[str, str], module: str) -> None:
    """Be a process with these variables and the preloaded NCCL; starts `module` again if not.

    The loader reads LD_PRELOAD before Python runs, so nothing less than a new process will do.
    """
    library = os.environ.get(NCCL_LIBRARY, "")
    missing = {k: v for k, v in wanted.items() if os.environ.get(k) != v}
    preload = {"LD_PRELOAD": library} if library and not _preloads(library) else {}
    if not missing and not preload:
        return
    changed = {**os.environ, **missing, **preload}
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], changed)


def _preloads(library: str) -> bool:
    return os.environ.get("LD_PRELOAD") == library


def gpu_count() -> int:
    """How many GPUs this process would see; asked without initialising CUDA here."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in said.stdout.splitlines())


def facts() -> list[str]:
    """Lines that say what ran where: versions, GPUs, driver, variables, the project's commit."""
    lines = [f"python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"]
    lines += [", ".join(f"{name} {_version(name)}" for name in PACKAGES)]
    lines += [_nccl(), _said(["nvidia-smi", "-L"]) or "no GPU"]
    query = ["--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
    lines += [_said(["nvidia-smi", *query]), f"kernel {platform.release()}"]
    commit = os.environ.get("BENCH_COMMIT") or _said(["git", "rev-parse", "--short", "HEAD"])
    lines += [f"commit {commit or 'unknown'}"]
    set_here = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(SHOWN)]
    return [line for line in [*lines, " ".join(set_here)] if line]


def _nccl() -> str:
    return _or_nothing(
        lambda: f"NCCL {_loaded_nccl()} (the loader's), torch was built with {_of_torch()}"
    )


def _loaded_nccl() -> str:
    import ctypes

    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    found = number.value
    return f"{found // 10000}.{found // 100 % 100}.{found % 100}"


def _of_torch() -> str:
    import torch

    version: object = torch.cuda.nccl.version()  # pyright: ignore[reportAttributeAccessIssue]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _said(command: list[str]) -> str:
    def ask() -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""

    return _or_nothing(ask)


def _or_nothing(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception:  # a fact that cannot be told must not end a measurement
        return ""


def root() -> Path:
    """The checkout, from which child processes import."""
    return Path(__file__).resolve().parents[2]
