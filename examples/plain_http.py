"""A trainer in plain HTTP: the calls of a weight update, and what must run beside them.

    fleet sim --replicas 2                      # each in a terminal of its own; no GPU, no vLLM
    fleet serve --replica http://127.0.0.1:9000 --replica http://127.0.0.1:9001
    python examples/plain_http.py

Init and update_weights are collectives: they answer once every worker *and this trainer* have
entered, so each is posted from a thread while this side enters. The other way round, a call that
fails must end this side's wait: else it sits there until gloo's timeout, and its error, which says
what to do, is lost. `docs/http.md` has the routes. `fleet.client` and vLLM's engines do all this.
"""

import argparse
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import httpx
import torch

from fleet.backends.gloo_group import GlooError, GlooGroup, join_group
from fleet.sim.weights import build_state_dict  # the model of simulated servers

PATIENCE_S = 1_900.0  # more than the gateway's own deadlines: its answer says who was late
LAST_WORD_S = 10.0  # the group broke: so long for the call beside it to say why


class CallFailed(RuntimeError):
    """The gateway said no; its message and hint are for whoever runs the trainer."""


def main() -> None:
    """Form a group, send a few versions, show which one answers a rollout."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    parser.add_argument("--steps", type=int, default=3, help="versions to send")
    parser.add_argument(
        "--world-size", type=int, help="ranks of the group, if not what it asks for"
    )
    args = parser.parse_args()
    with httpx.Client(base_url=args.url, timeout=PATIENCE_S, trust_env=False) as gateway:
        try:
            train(gateway, args.steps, args.world_size)
        except (CallFailed, httpx.TransportError) as error:
            sys.exit(str(error))


def train(gateway: httpx.Client, steps: int, world_size: int | None) -> None:
    """One group for all rounds; when the gateway names another world size, begin anew."""
    workers = gateway.get("/get_world_size").json()["world_size"]
    group = join(gateway, world_size or 1 + workers)
    try:
        for step in range(steps):
            send(gateway, group, build_state_dict(seed=step), f"step-{step}")
            body = {"model": "sim", "prompt": "hello", "max_tokens": 5}
            made = gateway.post("/v1/completions", json=body).headers
            print(f"{made['x-weight-version']} answers a rollout, from {made['x-fleet-replica']}")
    finally:
        group.close()


def join(gateway: httpx.Client, world_size: int) -> GlooGroup:
    """Meet all workers. `rank_offset` is how many ranks come before them: this one, rank 0."""
    port, failed = free_port(), threading.Event()
    meeting = {"master_address": "127.0.0.1", "master_port": port}
    body = {"init_info": {**meeting, "rank_offset": 1, "world_size": world_size}}
    answer = post_beside(gateway, "/init_weight_transfer_engine", body, failed.set)
    try:
        group = join_group("127.0.0.1", port, 0, world_size, cancelled=failed)
    except GlooError as broken:
        raise reason(answer, broken) from broken
    try:
        answer.result()
    except BaseException:
        group.close()
        raise
    return group


def send(
    gateway: httpx.Client, group: GlooGroup, state: Mapping[str, torch.Tensor], version: str
) -> None:
    """One round; the tensors go out in the order in which the body names them."""
    post(gateway, "/start_weight_update")
    named = {
        "names": list(state),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in state.values()],
        "shapes": [list(tensor.shape) for tensor in state.values()],
    }
    answer = post_beside(gateway, "/update_weights", {"update_info": named}, group.close)
    try:
        for tensor in state.values():
            group.broadcast(tensor, src=0)
    except GlooError as broken:
        raise reason(answer, broken) from broken
    answer.result()
    post(gateway, "/finish_weight_update", {"weight_version": version})


def post_beside(
    gateway: httpx.Client, path: str, body: Any, end_the_wait: Callable[[], None]
) -> "Future[None]":
    """Post from a thread that no exit waits for; if the call fails, end what runs beside it."""
    answer: Future[None] = Future()

    def run() -> None:
        try:
            post(gateway, path, body)
        except Exception as error:  # whatever it is, it is the other thread's to raise
            answer.set_exception(error)
            end_the_wait()
        else:
            answer.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return answer


def reason(answer: "Future[None]", broken: GlooError) -> BaseException:
    """Why the group broke, if the gateway says so soon: it knows who failed, gloo does not."""
    try:
        return answer.exception(timeout=LAST_WORD_S) or broken
    except TimeoutError:
        return broken


def post(gateway: httpx.Client, path: str, body: Any = None) -> None:
    """Post once. Never again if it failed: who enters a collective twice waits there for ever."""
    answer = gateway.post(path, json=body)
    if answer.is_success:
        return
    told = answer.json()
    message = f"{path}: {answer.status_code} {told['error']['message']}"
    raise CallFailed(f"{message}\nnext: {told['hint']}")


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
