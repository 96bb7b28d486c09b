"""One GPU's memory, shared by trainer and replicas: who has it when, over the whole fleet.

Colocated training alternates. While the trainer trains, the replicas sleep (level 1 keeps their
weights on the host, level 2 nothing); then they wake their weights' memory only, take the new
weights, and wake the KV cache last, when the trainer has given back what it needed to send.

The fleet is paused from before the first replica sleeps until after the last one is awake, so the
gate is shut throughout: rollouts wait, none meets a server that would die of it. If any step
fails, everything is taken back as far as it can be: replicas are woken, and the fleet resumes if
it was running before. What holds unknown weights afterwards (level 2, or an update that broke off)
stays fenced by the gateway until a full update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from fleet.client.errors import FleetError
from fleet.client.ranks import TrainerRanks
from fleet.client.sync import FleetWeightSyncClient

log = logging.getLogger(__name__)

PauseMode = Literal["keep", "wait", "abort"]


def colocated_update(
    client: FleetWeightSyncClient,
    send: Callable[[], object],
    *,
    train: Callable[[], object] | None = None,
    level: Literal[1, 2] = 1,
    mode: PauseMode = "keep",
    ranks: TrainerRanks | None = None,
) -> None:
    """Sleep, `train`, wake the weights, `send` them, wake the rest: all of it, or taken back.

    `send` is one whole round (an engine's or an elastic session's `send_weights`), `train` what
    needs the memory meanwhile. With several trainer ranks, all of them call this with their
    `ranks`; only the sender speaks to the gateway. Raises what the step raised that failed.
    """
    ranks = ranks or TrainerRanks()
    was_paused = ranks.on_sender(client.is_paused)
    try:
        ranks.on_sender(lambda: _fall_asleep(client, level, mode))
        if train is not None:
            ranks.on_all(train)
        ranks.on_sender(lambda: client.wake_up(["weights"]))
        send()
        ranks.on_sender(lambda: client.wake_up(["kv_cache"]))
        if not was_paused:
            ranks.on_sender(client.resume)
    except BaseException as error:
        if ranks.is_sender:
            _take_back(client, error, resume=not was_paused)
        raise


def _fall_asleep(client: FleetWeightSyncClient, level: int, mode: PauseMode) -> None:
    client.pause(mode)
    client.sleep(level, mode)


def _take_back(client: FleetWeightSyncClient, error: BaseException, *, resume: bool) -> None:
    """Wake everyone and open the gate again; what cannot be undone is added to the error."""
    log.warning("a colocated update failed; waking the fleet", extra={"why": str(error)})
    steps: list[Callable[[], object]] = [client.wake_up]
    if resume:
        steps.append(client.resume)
    for step in steps:
        try:
            step()
        except FleetError as left:
            error.add_note(f"not taken back: {left}")
