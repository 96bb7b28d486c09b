"""The trainer's client: vLLM's `VLLMWeightSyncClient`, and what a fleet has beyond that.

`WeightTransferTrainerFactory.trainer_init(…, client=FleetWeightSyncClient(url))` takes it as it
is; the protocol is structural (``vllm/distributed/weight_transfer/base.py``, 0.32 and 0.33), so
neither vLLM nor torch is imported here.

A call is repeated only if it is certain that it had no effect: no connection came about, or the
gateway said so itself (503 with a time). Everything else is raised at once, init, update and
finish above all: whoever repeats one of those enters a collective that nobody else enters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from fleet.client import calls
from fleet.client.answers import (
    Membership,
    body_of,
    error_of,
    field_of,
    membership_after,
    membership_of,
)
from fleet.client.calls import Call, Timeouts
from fleet.client.connection import lost, options_of, request_of
from fleet.client.errors import Unavailable, Unreachable

log = logging.getLogger(__name__)


class FleetWeightSyncClient:
    """Talks to one gateway; blocking, and safe to use from several threads.

    `timeouts` outlast the gateway's own deadlines. `patience_s` is how long a call may be
    repeated that had no effect; 0 raises at once. Every method raises a `FleetError`, and
    ValueError is raised here for a `base_url` that is none. `membership` is as `Membership` says.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        patience_s: float = 30.0,
    ) -> None:
        self.timeouts = timeouts
        self.patience_s = patience_s
        self.next_weight_version: str | None = None
        self.membership = Membership()
        self._asked: int | None = None  # the world size of the last init
        # A fresh connection for each call: a reset on a used one could not be told from a lost
        # answer.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(**options_of(base_url, token, timeouts), limits=limits)

    def __repr__(self) -> str:
        return f"<FleetWeightSyncClient {self._http.base_url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connections; the fleet is left as it is."""
        self._http.close()

    # -- the protocol of vLLM's trainer engines ----------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let all workers join; returns when the whole group has met."""
        self._asked = init_info.get("world_size")
        self.call(calls.init(init_info))

    def shutdown_weight_transfer_engine(self) -> None:
        """Let all workers leave the group."""
        self.call(calls.shutdown())

    def start_weight_update(self) -> None:
        """Pause the fleet and open a round."""
        self.call(calls.start())

    def start_draft_weight_update(self) -> None:
        """The same for the draft model, which changes no version."""
        self.call(calls.start(draft=True))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let all workers receive; returns when the last one has, or when the first one failed."""
        self.call(calls.update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit the round under this version, else `next_weight_version`, else a number.

        `next_weight_version` is for engines whose `send_weights()` finishes without a version;
        it is used up by the finish that commits it.
        """
        version = self.next_weight_version if weight_version is None else weight_version
        self.call(calls.finish(version))
        self.next_weight_version = None

    # -- the fleet ---------------------------------------------------------------------------------

    def get_world_size(self, *, include_dp: bool = True) -> int:
        """Return how many workers the next init would find."""
        return field_of(self.call(calls.world_size(include_dp=include_dp)), "world_size", int)

    def weight_info(self) -> str:
        """Return the committed version, "default" before the first commit."""
        return field_of(self.call(calls.weight_info()), "weight_version", str)

    def update_weight_version(self, new_version: str) -> None:
        """Give the committed weights another label, on every replica."""
        self.call(calls.relabel(new_version))

    def checksums(self) -> dict[str, str]:
        """Return the checksum of every parameter; MemberFailed if the replicas differ."""
        return field_of(self.call(calls.checksums()), "checksums", dict)

    def pause(self, mode: str = "keep", *, clear_cache: bool = True) -> None:
        """Shut the gate and pause every replica, until `resume`.

        `mode` is vLLM's: `keep` freezes running requests, `wait` lets them end, `abort` ends them.
        """
        self.call(calls.pause(mode, clear_cache=clear_cache))

    def resume(self) -> None:
        """Resume every replica whose weights are known, and open the gate."""
        self.call(calls.resume())

    def is_paused(self) -> bool:
        """Whether rollouts wait because of a pause or an update."""
        return field_of(self.call(calls.is_paused()), "is_paused", bool)

    def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Abort rollouts, by the ids that their senders know, or all; return how many.

        Of named ones that is the number of names, as vLLM counts: also of those that match nothing.
        """
        return field_of(self.call(calls.abort(request_ids)), "aborted", int)

    def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Let every replica give its memory back: 1 keeps the weights on the host, 2 does not."""
        self.call(calls.sleep(level, mode))

    def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Wake parts (`weights`, `kv_cache`) of every replica, or all of it."""
        self.call(calls.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Whether any replica is not wholly awake."""
        return field_of(self.call(calls.is_sleeping()), "is_sleeping", bool)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Drop every prefix cache; False if a replica still holds blocks for running requests."""
        call = calls.reset_prefix_cache(reset_running_requests=reset_running_requests)
        return field_of(self.call(call), "success", bool)

    def fleet(self) -> Mapping[str, Any]:
        """Return the operators' summary (GET /fleet)."""
        return self.call(calls.fleet())

    # -- one call ----------------------------------------------------------------------------------

    def call(self, call: Call) -> Any:
        """Make one call, and again while it had no effect; return the JSON of its answer."""
        gives_up = time.monotonic() + self.patience_s
        while True:
            try:
                return self._once(call)
            except (Unavailable, Unreachable) as error:
                wait_s = error.retry_after_s
                if time.monotonic() + wait_s > gives_up:
                    raise
                log.info("call had no effect, once more", extra={"call": str(call), "why": error})
                time.sleep(wait_s)

    def _once(self, call: Call) -> Any:
        try:
            answer = self._http.request(**request_of(call, self.timeouts))
        except httpx.HTTPError as error:
            raise lost(str(call), error) from error
        error = error_of(str(call), answer.status_code, answer.headers, answer.content)
        if error is not None:
            self.membership = membership_after(error, self._asked) or self.membership
            raise error
        if call.path != "/fleet":  # the operators' routes do not tell
            self.membership = membership_of(answer.headers)
        return body_of(answer.content)
