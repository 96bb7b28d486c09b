"""The entry point through which vLLM learns of the gloo backends (group ``vllm.general_plugins``).

vLLM calls `register` in the server, in every worker and in the trainer, possibly more than once
in a process. Nothing is imported here before that, and the engines themselves only when one is
made: they are registered by name (`WeightTransferEngineFactory`, vLLM 0.32 and 0.33,
``vllm/distributed/weight_transfer/factory.py``).
"""

import contextlib
import logging
from typing import Any

BACKEND = "gloo"
SPARSE_BACKEND = "sparse_gloo"

_WORKERS = {
    BACKEND: ("fleet.backends.gloo_worker", "GlooWeightTransferEngine"),
    SPARSE_BACKEND: ("fleet.backends.sparse_gloo_worker", "SparseGlooWeightTransferEngine"),
}
_TRAINERS = {
    BACKEND: ("fleet.backends.gloo", "GlooTrainerWeightTransferEngine"),
    SPARSE_BACKEND: ("fleet.backends.sparse_gloo", "SparseGlooTrainerWeightTransferEngine"),
}

_log = logging.getLogger(__name__)


def register() -> None:
    """Make both backends and their trainers known to this process; idempotent.

    A vLLM without weight-transfer factories (before 0.32) is left as it is, with a warning: this
    runs at the start of every vLLM process here, most of which will never use gloo.
    """
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError:
        _log.warning("this vLLM has no weight-transfer factories; gloo is not registered")
        return
    _register(factory.WeightTransferEngineFactory, _WORKERS)
    _register(factory.WeightTransferTrainerFactory, _TRAINERS)


def _register(into: Any, engines: dict[str, tuple[str, str]]) -> None:
    for name, (module, engine) in engines.items():
        with contextlib.suppress(ValueError):  # registered before
            into.register_engine(name, module, engine)
