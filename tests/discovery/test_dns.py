"""Addresses of a name, asked of a real name server on a real socket."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from dns.asyncresolver import Resolver

from fleet.discovery.addresses import FORGET_S, MISSING, Addresses, after_answer, endpoints_of
from fleet.discovery.dns import NameSource
from fleet.facts.endpoint import Snapshot
from fleet.owner import task_owner
from tests.waiting import wait_until

HOST = "vllm.rl.svc.cluster.test"


@dataclass
class NameServer:
    """Answers for HOST over UDP, and over TCP where the answer is long; breaks on demand."""

    addresses: list[str] = field(default_factory=list[str])
    rcode: dns.rcode.Rcode = dns.rcode.NOERROR
    silent: bool = False
    asked: int = 0
    over_tcp: int = 0
    port: int = 0

    def answer(self, query: bytes, limit: int) -> bytes:
        """One answer; cut short if it is longer than `limit`."""
        question = dns.message.from_wire(query)
        reply = dns.message.make_response(question)
        kind = question.question[0].rdtype
        name = question.question[0].name
        self.asked += 1
        if name.to_text(omit_final_dot=True) != HOST:
            reply.set_rcode(dns.rcode.NXDOMAIN)
            return reply.to_wire()
        reply.set_rcode(self.rcode)
        width = {dns.rdatatype.A: 4, dns.rdatatype.AAAA: 6}[kind]
        found = [a for a in self.addresses if ipaddress.ip_address(a).version == width]
        if found and self.rcode == dns.rcode.NOERROR:
            reply.answer.append(dns.rrset.from_text_list(name, 5, "IN", kind, found))
        wire = reply.to_wire()
        if len(wire) > limit:
            reply.answer.clear()
            reply.flags |= dns.flags.TC
            wire = reply.to_wire()
        return wire

    def resolver(self) -> Resolver:
        """A resolver that asks here."""
        resolver = Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], self.port
        resolver.timeout = resolver.lifetime = 0.3
        return resolver

    async def over_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One question over TCP."""
        length = int.from_bytes(await reader.readexactly(2), "big")
        reply = self.answer(await reader.readexactly(length), 65535)
        self.over_tcp += 1
        writer.write(len(reply).to_bytes(2, "big") + reply)
        await writer.drain()
        writer.close()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        reply = self._server.answer(data, 512)
        if self._transport is not None and not self._server.silent:
            self._transport.sendto(reply, addr)


@asynccontextmanager
async def name_server(*addresses: str) -> AsyncGenerator[NameServer]:
    """Serve until the context is left."""
    server, loop = NameServer(list(addresses)), asyncio.get_running_loop()
    tcp = await asyncio.start_server(server.over_stream, "127.0.0.1", 0)
    server.port = tcp.sockets[0].getsockname()[1]
    where = ("127.0.0.1", server.port)  # UDP ports are handed out apart: this one is hardly taken
    udp, _ = await loop.create_datagram_endpoint(lambda: _Udp(server), local_addr=where)
    try:
        yield server
    finally:
        udp.close()
        tcp.close()
        await tcp.wait_closed()


@asynccontextmanager
async def asking(server: NameServer, host: str = HOST) -> AsyncGenerator[list[Snapshot]]:
    """Run a source that asks every 20 ms, and yield what it tells."""
    told: list[Snapshot] = []
    source = NameSource(host, 8000, 0.02, server.resolver)
    async with task_owner() as owner:
        owner.create_task(source.run(told.append))
        yield told


async def lists(told: list[Snapshot], *ready: str) -> None:
    """Wait until exactly these are listed as ready."""

    async def reached() -> bool:
        now = told[-1].endpoints.values() if told else ()
        return bool(told) and sorted(e.url for e in now if not e.unready) == sorted(ready)

    await wait_until(reached)


async def asked_again(server: NameServer, times: int = 8) -> None:
    """Wait for so many more questions."""
    until = server.asked + times

    async def reached() -> bool:
        return server.asked >= until

    await wait_until(reached)


async def test_a_name_lists_addresses_of_both_families() -> None:
    """They come, and when two answers lack one, it takes no more rollouts."""
    async with name_server("10.0.0.1", "fd00::7") as server, asking(server) as told:
        await lists(told, "http://10.0.0.1:8000", "http://[fd00::7]:8000")
        server.addresses = ["10.0.0.1", "10.0.0.2"]
        await lists(told, "http://10.0.0.1:8000", "http://10.0.0.2:8000")
        left = told[-1].endpoints["[fd00::7]:8000"]
        assert left.unready == MISSING


async def test_a_long_answer_comes_over_tcp() -> None:
    """A hundred replicas do not fit into one datagram."""
    many = [f"10.0.1.{n}" for n in range(1, 101)]
    async with name_server(*many) as server, asking(server) as told:
        await lists(told, *(f"http://{address}:8000" for address in many))
        assert server.over_tcp > 0


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED])
async def test_an_error_is_no_answer(rcode: dns.rcode.Rcode) -> None:
    """The fleet stays as it was, however long the name server is ill."""
    async with name_server("10.0.0.1") as server, asking(server) as told:
        await lists(told, "http://10.0.0.1:8000")
        server.rcode = rcode
        await asked_again(server)
        server.rcode = dns.rcode.NOERROR
        await asked_again(server)
    assert all(e.unready is None for s in told for e in s.endpoints.values())


async def test_silence_is_no_answer() -> None:
    """A name server that is away empties no fleet."""
    async with name_server("10.0.0.1") as server, asking(server) as told:
        await lists(told, "http://10.0.0.1:8000")
        server.silent = True
        await asked_again(server, 4)
        count = len(told)
        await asked_again(server, 4)
        assert len(told) == count
        server.silent = False
        server.addresses.append("10.0.0.2")
        await lists(told, "http://10.0.0.1:8000", "http://10.0.0.2:8000")


async def test_a_name_without_addresses_is_an_answer() -> None:
    """NXDOMAIN and empty answers: nobody is Ready behind the Service."""
    async with name_server("10.0.0.1") as server, asking(server) as told:
        await lists(told, "http://10.0.0.1:8000")
        server.rcode = dns.rcode.NXDOMAIN
        await lists(told)
        server.rcode = dns.rcode.NOERROR
        await lists(told, "http://10.0.0.1:8000")
        server.addresses = []
        await lists(told)


async def test_a_source_stops_whenever_it_is_told_to() -> None:
    """Also in the very moment when an answer comes, which Python 3.11 loses."""
    async with name_server("10.0.0.1") as server:
        for _ in range(60):
            before = server.asked
            source = NameSource(HOST, 8000, 0.001, server.resolver)
            running = asyncio.ensure_future(source.run(lambda snapshot: None))
            # On the same loop, so that the next turn is the answer's.
            while server.asked == before:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait({running}, timeout=5)
            assert running.cancelled()


def test_one_answer_that_lacks_an_address_says_nothing() -> None:
    """Caches and round robins cut answers short; two in a row count."""
    known = after_answer({}, {"10.0.0.1", "10.0.0.2"}, 0.0)
    known = after_answer(known, {"10.0.0.2"}, 1.0)
    assert _unready(known) == {"10.0.0.1:8000": None, "10.0.0.2:8000": None}
    known = after_answer(known, {"10.0.0.1"}, 2.0)
    known = after_answer(known, {"10.0.0.2"}, 3.0)
    assert _unready(known) == {"10.0.0.1:8000": None, "10.0.0.2:8000": None}
    known = after_answer(known, {"10.0.0.2"}, 4.0)
    assert _unready(known) == {"10.0.0.1:8000": MISSING, "10.0.0.2:8000": None}


def test_an_address_that_comes_back_soon_is_the_same_replica_and_later_a_new_one() -> None:
    """Until it is dropped it keeps its place, and each change is newer than the one before."""
    known = after_answer({}, {"10.0.0.1"}, 0.0)
    for moment in (1.0, 2.0, 3.0):
        known = after_answer(known, set(), moment)
    assert _revision(known) == 2000
    assert _revision(after_answer(known, {"10.0.0.1"}, 9.0)) == 9000
    assert after_answer(known, set(), 2.0 + FORGET_S - 1) != {}
    assert after_answer(known, set(), 2.0 + FORGET_S) == {}


def _unready(known: Addresses) -> dict[str, str | None]:
    found = endpoints_of(known, "dns", 8000)
    return {uid: found[uid].unready for uid in sorted(found)}


def _revision(known: Addresses) -> int:
    return endpoints_of(known, "dns", 8000)["10.0.0.1:8000"].origin.revision
