"""The entry point through which vLLM learns of the gloo backend (group ``vllm.general_plugins``).

vLLM calls `register` in the server, in every worker and in the trainer, possibly more than once
in a process. Nothing is imported here before that, and the engines themselves only when one is
made: they are registered by name (`WeightTransferEngineFactory`, vLLM 0.32 and 0.33,
``vllm/distributed/weight_transfer/factory.py``).
"""

import contextlib
import logging

BACKEND = "gloo"

_log = logging.getLogger(__name__)


def register() -> None:
    """Make ``--weight-transfer-config '{"backend":"gloo"}'`` known, and its trainer; idempotent.

    A vLLM without weight-transfer factories (before 0.32) is left as it is, with a warning: this
    runs at the start of every vLLM process here, most of which will never use gloo.
    """
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError:
        _log.warning("this vLLM has no weight-transfer factories; gloo is not registered")
        return
    with contextlib.suppress(ValueError):  # registered before
        factory.WeightTransferEngineFactory.register_engine(
            BACKEND, "fleet.backends.gloo_worker", "GlooWeightTransferEngine"
        )
    with contextlib.suppress(ValueError):
        factory.WeightTransferTrainerFactory.register_engine(
            BACKEND, "fleet.backends.gloo", "GlooTrainerWeightTransferEngine"
        )
