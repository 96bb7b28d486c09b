"""A whole RL loop, small enough for CPUs: a model learns to add, from nothing but rewards.

    python examples/rl_loop.py --model MODEL --backend gloo --steps 40

Rollout workers ask for answers without a break, while the trainer makes new versions; so a batch
has answers of several versions. Each answer says which weights made it: the ratio of then and now
corrects for their age (PPO's clipped objective), and what is too old is thrown away.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from common import arguments, init_info, load_model
from transformers import AutoTokenizer

from fleet.client import AsyncFleetClient, FleetWeightSyncClient
from fleet.client.elastic import ElasticSession

STALENESS = 2  # versions that an answer may be behind
GROUPS, ANSWERS = 16, 16  # questions in a batch, answers to each
WORKERS = 8
HIGHEST = 4  # summands are less than this
CLIP, ENTROPY, RATE = 0.2, 0.03, 0.005


@dataclass(frozen=True)
class Group:
    """The answers to one question, made by one version."""

    version: int
    mixed: bool  # an update came in between
    prompt: list[int]
    tokens: torch.Tensor  # [answers]
    logprobs: torch.Tensor  # [answers], as of the version that made them
    rewards: torch.Tensor  # [answers]


def reward(text: str, total: int) -> float:
    """Right is 1; a number at all is better than nothing."""
    return 1.0 if text.strip() == str(total) else 0.2 if text.strip().isdigit() else 0.0


async def ask(client: AsyncFleetClient, tokenizer: Any, oldest: int) -> Group:
    """Let a replica answer one question several times."""
    a, b = random.randrange(HIGHEST), random.randrange(HIGHEST)
    prompt = tokenizer.encode(f"{a}+{b}=")
    body = {"prompt": prompt, "n": ANSWERS, "max_tokens": 1, "temperature": 1.0, "logprobs": 0}
    made = await client.complete({**body, "return_token_ids": True}, min_version=str(oldest))
    choices = made.body["choices"]
    return Group(
        version=int(made.weight_version),
        mixed=not made.made_by_one_version,
        prompt=prompt,
        tokens=torch.tensor([choice["token_ids"][0] for choice in choices]),
        logprobs=torch.tensor([choice["logprobs"]["token_logprobs"][0] for choice in choices]),
        rewards=torch.tensor([reward(choice["text"], a + b) for choice in choices]),
    )


class Learner:
    """The trainer: weights in fp32, and a copy in bf16 that travels."""

    def __init__(self, args: Any) -> None:
        self.sent = load_model(args.model, args.backend)
        self.model = load_model(args.model, args.backend).float()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE)

    def learn(self, batch: list[Group]) -> None:
        """One step of the clipped objective over all groups."""
        loss = torch.stack([self._loss(group) for group in batch]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for mine, copy in zip(self.model.parameters(), self.sent.parameters(), strict=True):
                copy.copy_(mine)

    def _loss(self, group: Group) -> torch.Tensor:
        ids = torch.tensor([group.prompt], device=self.model.device)
        now = self.model(ids).logits[0, -1].log_softmax(-1)
        ratio = (now[group.tokens] - group.logprobs.to(now.device)).exp()
        gain = (group.rewards - group.rewards.mean()).to(now.device)
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        entropy = -(now.exp() * now).sum()
        return -torch.minimum(ratio * gain, clipped * gain).mean() - ENTROPY * entropy


class Loop:
    """Answers come in on one side, versions go out on the other."""

    def __init__(self, args: Any) -> None:
        from vllm.distributed.weight_transfer.base import ModuleSource

        self.args = args
        self.version = 0
        self.learner = Learner(args)
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.trainer = FleetWeightSyncClient(args.url, token=args.token)
        self.session = ElasticSession(
            self.trainer,
            lambda size: init_info(args.backend, args.address, size),
            ModuleSource(self.learner.sent),
        )
        self.answers: asyncio.Queue[Group] = asyncio.Queue(maxsize=GROUPS + GROUPS // 4)
        self.stale = 0

    async def run(self) -> list[float]:
        """Train; return the mean reward of each step."""
        await self._publish()
        async with AsyncFleetClient(self.args.url, token=self.args.token) as client:
            workers = [asyncio.create_task(self._work(client)) for _ in range(WORKERS)]
            try:
                return [await self._step() for _ in range(self.args.steps)]
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                self.session.close()
                self.trainer.close()

    async def _work(self, client: AsyncFleetClient) -> None:
        while True:
            oldest = max(0, self.version - STALENESS)
            await self.answers.put(await ask(client, self.tokenizer, oldest))

    async def _step(self) -> float:
        batch = [await self._fresh() for _ in range(GROUPS)]
        await asyncio.to_thread(self.learner.learn, batch)
        self.version += 1
        await self._publish()
        mean = float(torch.stack([group.rewards for group in batch]).mean())
        versions = dict(sorted(Counter(group.version for group in batch).items()))
        mixed = sum(group.mixed for group in batch)
        print(
            f"version {self.version}: reward {mean:.3f}, answers by version {versions}, "
            f"{mixed} across an update, {self.stale} too old so far",
            flush=True,
        )
        return mean

    async def _fresh(self) -> Group:
        while True:
            group = await self.answers.get()
            if self.version - group.version <= STALENESS:
                return group
            self.stale += 1

    async def _publish(self) -> None:
        version = str(self.version)
        await asyncio.to_thread(self.session.send_weights, weight_version=version)


def main() -> None:
    """Train, and hold the reward to its promise."""
    args = arguments(str(__doc__).splitlines()[0])
    random.seed(0)
    rewards = asyncio.run(Loop(args).run())
    first, last = (sum(part) / len(part) for part in (rewards[:3], rewards[-8:]))
    print(f"reward went from {first:.3f} to {last:.3f}")
    assert last > first + 0.1, "the reward did not go up"


if __name__ == "__main__":
    main()
