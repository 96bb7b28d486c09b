"""Probes that look while the fleet moves."""

from __future__ import annotations

from tests.cases.conftest import case_of, nccl
from tests.waiting import wait_until


async def test_a_probe_that_spans_a_whole_round_takes_nobody_for_asleep() -> None:
    """vLLM calls a paused server a sleeping one, and here the pause came and went in between."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        replica = case.replicas[1]
        replica.faults.add("/is_sleeping", "delay", seconds=0.5)

        async def asked() -> bool:
            return bool(replica.log.calls("/is_sleeping"))

        async def looks_again() -> bool:
            return len(replica.log.calls("/is_paused")) > before

        async def is_over() -> bool:
            return all(call.status for call in replica.log.calls("/is_paused"))

        case.forget_logs()
        replica.engine.version = "strange"  # so that probes look closely
        await wait_until(asked)
        before = len(replica.log.calls("/is_paused"))
        await case.start()
        replica.faults.add("/is_paused", "delay", seconds=0.5)
        await wait_until(looks_again)
        await case.update()
        assert (await case.finish("2")).status_code == 200
        await wait_until(is_over)
        await case.sync("3")
        assert await case.states() == ["ready", "ready"]
