"""The sending end of the gloo backend: vLLM's trainer loop, unchanged, on CPUs.

``WeightTransferTrainerFactory.trainer_init(GlooTrainerInitInfo(...), client=..., source=...)``
and ``send_weights()`` do what they do with NCCL (vLLM 0.32 and 0.33,
``vllm/distributed/weight_transfer/nccl_engine.py``); importing this module registers the backend.

It differs in how it fails. NCCL's trainer sits in the collective for ever when the other side
refused to enter it. Here an answer that says no ends the wait, and that answer is what is raised.

Rank 0 is the only sender. Other trainer ranks run the source's own collectives and nothing else.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from fleet.backends import gloo_plugin
from fleet.backends.gloo_calls import answer_or_breakage, call_beside, meet_workers
from fleet.backends.gloo_group import DEFAULT_TIMEOUT_S, GlooError, GlooGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """Where the trainer's group meets: on rank 0, at ``master_address:master_port``.

    `world_size` counts the trainer's one sender and all workers. `timeout_s` bounds the
    rendezvous and each broadcast after it; the workers get it too unless it is the default.
    """

    backend: ClassVar[str] = gloo_plugin.BACKEND

    master_address: str
    master_port: int
    world_size: int
    rank: int = field(default=0, kw_only=True)
    timeout_s: float = field(default=DEFAULT_TIMEOUT_S, kw_only=True)

    def worker_payload(self) -> dict[str, Any]:
        """The init body for the workers, who come after the single sender."""
        payload: dict[str, Any] = {
            "master_address": self.master_address,
            "master_port": self.master_port,
            "rank_offset": 1,
            "world_size": self.world_size,
        }
        if self.timeout_s != DEFAULT_TIMEOUT_S:
            payload["timeout_s"] = self.timeout_s
        return payload


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """Sends a `WeightSource` to all workers, once for each `send_weights()`."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool = True
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._source = source
        self._group: GlooGroup | None = None
        self._sent: list[ParamMeta] | None = None  # what the workers already know

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Meet the workers and return a ready engine; on ranks other than 0 only the latter.

        Raises what `client` raised if the other side refused, GlooError if the group failed.
        """
        if source is None:
            raise ValueError("gloo weight transfer sends a WeightSource; none was given")
        _check_single_sender(_declared(source))
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._group = meet_workers(client, init_info)
        return engine

    def send_weights(self) -> None:
        """One full round: start, update while the tensors go out, finish.

        Raises what the client raised; GlooError for a broken group, after which a new
        `trainer_init` is needed; ValueError if the source yields other than it declares.
        """
        declared = _declared(self._source)
        if not self.is_sender:
            for _ in _stream(self._source):
                pass
            return
        group = self._group
        if group is None or group.closed:
            raise GlooError("gloo weight transfer: the group is closed, trainer_init() again")
        self.client.start_weight_update()
        self._transfer(group, declared)
        self.client.finish_weight_update()
        self._sent = declared

    def shutdown(self) -> None:
        """Leave the group; the workers notice at their next broadcast."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _transfer(self, group: GlooGroup, declared: list[ParamMeta]) -> None:
        update_info = _update_info([] if declared == self._sent else declared)
        answer = call_beside(
            lambda: self.client.update_weights(update_info), on_failure=group.close
        )
        try:
            for tensor in _checked(self._source, declared):
                group.broadcast(tensor, src=0)
        except GlooError as error:
            raise answer_or_breakage(answer, error) from error
        except BaseException:
            group.close()  # the workers wait for tensors that will not come
            raise
        answer.result()


def _declared(source: WeightSource) -> list[ParamMeta]:
    """A method in 0.32, a cached property since 0.33."""
    metadata = cast("Any", source).metadata
    return cast("list[ParamMeta]", metadata() if callable(metadata) else metadata)


def _stream(source: WeightSource) -> "Iterator[tuple[str, torch.Tensor]]":
    """The full tensors: `iter_full()` since 0.33, the source itself in 0.32."""
    iter_full: Any = getattr(source, "iter_full", None)
    return iter(source) if iter_full is None else iter_full()


def _check_single_sender(declared: list[ParamMeta]) -> None:
    """Since 0.33 a parameter can belong to other ranks than 0, which nobody would send here."""
    for meta in declared:
        owners = getattr(meta, "owners", None)
        if owners is not None and owners[0] != 0:
            raise ValueError(
                f"{meta.name!r} is owned by trainer rank {owners[0]}; gloo sends from rank 0 only"
            )


def _checked(source: WeightSource, declared: list[ParamMeta]) -> "Iterator[torch.Tensor]":
    """Yield the tensors, as long as they are what the workers were told to expect."""
    expected = iter(declared)
    for name, tensor in _stream(source):
        meta = next(expected, None)
        if meta is None:
            raise ValueError(f"the source yields {name!r} beyond what its metadata declares")
        if (name, tensor.dtype, tuple(tensor.shape)) != (meta.name, meta.dtype, tuple(meta.shape)):
            raise ValueError(
                f"the source declares {meta.name!r} {meta.dtype} {tuple(meta.shape)} but yields "
                f"{name!r} {tensor.dtype} {tuple(tensor.shape)}"
            )
        yield tensor
    if (missing := next(expected, None)) is not None:
        raise ValueError(f"the source declares {missing.name!r} but does not yield it")


def _update_info(declared: list[ParamMeta]) -> dict[str, Any]:
    """The update body; empty lists stand for the previous round's."""
    return {
        "names": [meta.name for meta in declared],
        "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in declared],
        "shapes": [list(meta.shape) for meta in declared],
    }


gloo_plugin.register()
