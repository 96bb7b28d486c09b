"""New weights in the middle of a generation: paused with `keep`, updated, resumed.

    python examples/asynchronous.py --model MODEL [--backend gloo]

A long answer is streamed. After its first tokens the fleet is paused, which freezes the answer, and
gets other weights; after the resume the same answer goes on with them. It prints the tokens made
before and after, and checks that each side is what `transformers` makes with those weights.
"""

import asyncio
from typing import Any

from common import arguments, explains, init_info, load_model, shake

from fleet.client import AsyncFleetClient, FleetWeightSyncClient
from fleet.client.elastic import ElasticSession

PROMPT = [7, 300, 12, 45]
FIRST = 8  # tokens to wait for before the pause
ALL = 240
ATTEMPTS = 10  # a small model may be done before the pause is there
STILL_S = 1.0  # no token for so long after the pause: all that were made are here


async def main() -> None:
    """One answer, two versions."""
    from vllm.distributed.weight_transfer.base import ModuleSource

    args = arguments(str(__doc__).splitlines()[0])
    model, old = (load_model(args.model, args.backend) for _ in range(2))
    with FleetWeightSyncClient(args.url, token=args.token) as trainer:
        session = ElasticSession(
            trainer,
            lambda size: init_info(args.backend, args.address, size),
            ModuleSource(model),
        )
        await asyncio.to_thread(session.send_weights, weight_version="before")
        async with AsyncFleetClient(args.url, token=args.token) as rollouts:
            before, after = await one_answer(rollouts, trainer, session, model)
        session.close()
    print(f"{len(before)} tokens before: {before}")
    print(f"{len(after)} tokens after: {after}")
    assert explains(old, PROMPT, before), "the tokens before are not the old weights'"
    assert explains(model, PROMPT + before, after), "the tokens after are not the new weights'"
    assert not explains(old, PROMPT + before, after), "the old weights would have gone on the same"
    print("before: as transformers with the old weights; after: as transformers with the new ones")


async def one_answer(
    rollouts: AsyncFleetClient,
    trainer: FleetWeightSyncClient,
    session: ElasticSession,
    model: Any,
) -> tuple[list[int], list[int]]:
    """Stream one answer across an update; return the tokens before and after it."""
    body = {"prompt": PROMPT, "max_tokens": ALL, "temperature": 0, "ignore_eos": True}
    for _ in range(ATTEMPTS):
        tokens: list[int] = []
        async with rollouts.stream("/v1/completions", {**body, "return_token_ids": True}) as stream:
            begun = asyncio.Event()
            reading = asyncio.create_task(read(stream.events(), tokens, begun))
            await begun.wait()
            await asyncio.to_thread(trainer.pause, "keep")
            await until_still(tokens)
            before = len(tokens)
            if before < ALL:
                shake(model, step=1)
                await asyncio.to_thread(session.send_weights, weight_version="after")
                assert len(tokens) == before, "a paused answer went on"
            await asyncio.to_thread(trainer.resume)
            await reading
        if before < ALL:
            return tokens[:before], tokens[before:]
    raise RuntimeError(f"{ATTEMPTS} answers were complete before the pause was there")


async def read(events: Any, into: list[int], begun: asyncio.Event) -> None:
    """Keep the tokens of a stream as they come; say when the first few are there."""
    async for event in events:
        for choice in event["choices"]:
            into.extend(choice["token_ids"] or ())
        if len(into) >= FIRST:
            begun.set()


async def until_still(tokens: list[int]) -> None:
    """Wait until no token has come for a while."""
    seen = -1
    while seen != len(tokens):
        seen = len(tokens)
        await asyncio.sleep(STILL_S)


if __name__ == "__main__":
    asyncio.run(main())
