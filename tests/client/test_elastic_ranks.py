"""An elastic session on a trainer of two ranks, each a process of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fleet.sim import SimOptions
from fleet.sim.trainer import free_port
from fleet.sim.weights import build_state_dict, replica_checksum
from tests.cases.conftest import UPDATE, Case, case_of
from tests.client.conftest import url_of

REPLY_S = 60


@dataclass
class TwoRanks:
    """The trainer's processes, and the fleet."""

    case: Case
    ranks: list[asyncio.subprocess.Process]

    async def sync(self, seed: int) -> list[str]:
        """Let both send the weights of a seed; what each of them says."""
        sender = self.ranks[0].stdin
        assert sender is not None
        sender.write(f"{seed}\n".encode())
        await sender.drain()
        async with asyncio.timeout(REPLY_S):
            return [await self._says(rank) for rank in self.ranks]

    async def _says(self, rank: asyncio.subprocess.Process) -> str:
        assert rank.stdout is not None
        line = (await rank.stdout.readline()).decode().strip()
        return line.partition(": ")[2]

    def check_weights(self, seed: int, *replicas: int) -> None:
        """These replicas hold the weights of this seed."""
        held = {self.case.replicas[index].checksum for index in replicas}
        assert held == {replica_checksum(build_state_dict(seed))}


@asynccontextmanager
async def two_ranks(replicas: int) -> AsyncGenerator[TwoRanks]:
    """Both have started; they end by themselves when their input does."""
    async with case_of(SimOptions(replicas=replicas, backend="gloo")) as case:
        port = str(free_port())
        ranks = [await start(url_of(case), str(rank), port) for rank in range(2)]
        try:
            yield TwoRanks(case, ranks)
            assert ranks[0].stdin is not None
            ranks[0].stdin.close()
            async with asyncio.timeout(REPLY_S):
                assert [await rank.wait() for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                if rank.returncode is None:
                    rank.kill()
                    await rank.wait()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    """Start one rank."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.client.elastic_rank", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def test_all_ranks_move_to_the_new_group_together() -> None:
    """A replica lost between rounds, one lost in mid-update, a newcomer: nobody hangs."""
    async with two_ranks(4) as trainer:
        assert await trainer.sync(1) == ["world_size 5", "world_size 5"]
        await trainer.case.replicas[3].die()
        assert await trainer.sync(2) == ["world_size 4", "world_size 4"]
        trainer.check_weights(2, 0, 1, 2)
        trainer.case.replicas[2].faults.add(UPDATE, "die")
        assert await trainer.sync(3) == ["world_size 3", "world_size 3"]
        trainer.check_weights(3, 0, 1)
        newcomer = await trainer.case.sim.add()
        await trainer.case.ok("/fleet/replicas", {"url": newcomer.url})
        assert await trainer.sync(4) == ["world_size 4", "world_size 4"]
        trainer.check_weights(4, 0, 1, 4)


async def test_when_the_sender_gives_up_every_rank_is_told() -> None:
    """And all of them may go on to another round."""
    async with two_ranks(1) as trainer:
        trainer.case.replicas[0].faults.add(UPDATE, "status", status=500, times=3)
        assert await trainer.sync(1) == ["MemberFailed", "SenderFailed"]
        assert await trainer.sync(2) == ["world_size 2", "world_size 2"]
        trainer.check_weights(2, 0)
