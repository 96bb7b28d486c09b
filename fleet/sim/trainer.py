"""A torch trainer that speaks the stock weight-sync protocol over gloo, for the demo and tests.

It does what vLLM's ``HTTPVLLMWeightSyncClient`` and ``NCCLTrainerWeightTransferEngine`` do
(``distributed/weight_transfer/{clients,nccl_engine}.py``): worker payload with ``rank_offset`` 1,
init posted from a thread while rank 0 joins, then for each round start, update_weights from a
thread while rank 0 broadcasts, finish; from the second round on with empty metadata if it has not
changed (0.33). It neither pauses nor resumes. Unlike the stock one, it never waits for ever: a
failed call ends the broadcast beside it, by leaving the group.

Synchronous throughout, as trainers are; from a test's loop, call it in a thread.
"""

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import httpx
import torch

from fleet.backends.gloo_group import GlooGroup, join_group


class TrainerError(RuntimeError):
    """A control call failed; the message carries the answer's status and body."""

    def __init__(self, path: str, status: int | None, text: str) -> None:
        self.path = path
        self.status = status
        self.text = text
        super().__init__(f"POST {path}: {status or 'no answer'}: {text}")


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


@dataclass
class Rendezvous:
    """Where a trainer's single sender meets its workers, as a stock trainer's init info says it."""

    world_size: int
    rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = field(default_factory=free_port)
    timeout_s: float = 20.0

    def worker_payload(self) -> dict[str, Any]:
        """The init body for the workers, who come after the sender."""
        return {
            "master_address": self.master_address,
            "master_port": self.master_port,
            "rank_offset": 1,
            "world_size": self.world_size,
        }


class SimTrainer:
    """Rank 0 of the group; `base_url` is a gateway's, or one replica's.

    `timeout_s` bounds every HTTP call and every collective.
    """

    def __init__(
        self,
        base_url: str,
        *,
        master_address: str = "127.0.0.1",
        master_port: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.master_address = master_address
        self.master_port = master_port
        self.timeout_s = timeout_s
        self.world_size = 0
        # a fresh connection for each call, as the stock client has
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(timeout=timeout_s, trust_env=False, limits=limits)
        self._group: GlooGroup | None = None
        self._sent: dict[str, Any] | None = None

    @property
    def group(self) -> GlooGroup:
        """The group, for a test that broadcasts by itself. Raises RuntimeError outside of one."""
        if self._group is None:
            raise RuntimeError("init() comes first")
        return self._group

    def init(self, world_size: int | None = None) -> None:
        """Form the group with all workers; `world_size` None asks the server for their number.

        May be called again for a new group. Raises `TrainerError` and `GlooError`.
        """
        self._leave()
        self.world_size = world_size or self.get("/get_world_size")["world_size"] + 1
        port, self.master_port = self.master_port or free_port(self.master_address), None
        meeting = Rendezvous(self.world_size, master_address=self.master_address, master_port=port)
        self._together(
            "/init_weight_transfer_engine",
            {"init_info": meeting.worker_payload()},
            lambda: self._join(port),
        )

    def send_weights(
        self, state: Mapping[str, torch.Tensor], weight_version: str | None = None
    ) -> None:
        """One round: every tensor of `state` to all workers, then finish with this version.

        Raises `TrainerError` and `GlooError`; after either the group is left and needs `init`,
        unless start was refused, which changes nothing.
        """
        self.post("/start_weight_update")
        self.update(state)
        body = None if weight_version is None else {"weight_version": weight_version}
        self.post("/finish_weight_update", body)

    def update(self, state: Mapping[str, torch.Tensor]) -> None:
        """The update call of a round alone, broadcasting beside it."""
        metadata = describe(state)
        unchanged = metadata == self._sent
        info = {key: [] for key in metadata} if unchanged else metadata
        self._together("/update_weights", {"update_info": info}, lambda: self._broadcast(state))
        self._sent = metadata

    def close(self) -> None:
        """Leave the group and drop connections."""
        self._leave()
        self._http.close()

    def get(self, path: str) -> Any:
        """The JSON of a GET. Raises `TrainerError`."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of a POST. Raises `TrainerError`."""
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            reply = self._http.request(method, self.base_url + path, json=body)
        except httpx.HTTPError as error:
            raise TrainerError(path, None, f"{type(error).__name__}: {error}") from error
        if not reply.is_success:
            raise TrainerError(path, reply.status_code, reply.text)
        return reply.json()

    def _together(self, path: str, body: Mapping[str, Any], collective: Callable[[], None]) -> None:
        """Post a call and run this rank's side of its collective, both to the end.

        A call that fails ends the wait at once: the collective's thread is left to its timeout,
        since nothing can free a rank that waits for peers which never come.
        """
        ended: SimpleQueue[tuple[str, BaseException | None]] = SimpleQueue()
        _spawn("call", lambda: self.post(path, body), ended)
        _spawn("collective", collective, ended)
        try:
            for _ in range(2):
                _, error = _next(ended, self.timeout_s + 5, path)
                if error is not None:
                    raise _worst(error, ended)
        except BaseException:
            self._leave()
            raise

    def _join(self, port: int) -> None:
        self._group = join_group(
            self.master_address, port, 0, self.world_size, timeout_s=self.timeout_s
        )

    def _broadcast(self, state: Mapping[str, torch.Tensor]) -> None:
        group = self.group
        for tensor in state.values():
            group.broadcast(tensor, src=0)

    def _leave(self) -> None:
        self._sent = None
        group, self._group = self._group, None
        if group is not None:
            group.close()


def describe(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The update metadata of a state dict: names, dtype names and shapes, in order."""
    return {
        "names": list(state),
        "dtype_names": [str(tensor.dtype).rpartition(".")[2] for tensor in state.values()],
        "shapes": [list(tensor.shape) for tensor in state.values()],
    }


def _spawn(
    name: str,
    work: Callable[[], object],
    ended: "SimpleQueue[tuple[str, BaseException | None]]",
) -> None:
    def run() -> None:
        try:
            work()
        except BaseException as error:  # carried to the caller's thread, whatever it is
            ended.put((name, error))
        else:
            ended.put((name, None))

    threading.Thread(target=run, daemon=True, name=f"trainer-{name}").start()


def _next(
    ended: "SimpleQueue[tuple[str, BaseException | None]]", timeout_s: float, path: str
) -> tuple[str, BaseException | None]:
    try:
        return ended.get(timeout=timeout_s)
    except Empty:
        raise TrainerError(path, None, f"nothing ended within {timeout_s} s") from None


def _worst(
    error: BaseException, ended: "SimpleQueue[tuple[str, BaseException | None]]"
) -> BaseException:
    """The call's own answer says more than the broken collective it caused, if it comes soon."""
    if isinstance(error, TrainerError):
        return error
    try:
        _, other = ended.get(timeout=1.0)
    except Empty:
        return error
    return other if isinstance(other, TrainerError) else error
