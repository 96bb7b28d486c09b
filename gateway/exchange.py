"""One rollout, from its admission to the last byte of its answer.

A small machine of callbacks between three parties: the client (`Client`: a raw connection or an
ASGI call), the gate, and a connection to a replica. It decides what the design decides: when the
label is fixed, what may be tried again, how an answer that cannot be completed ends.

    admitted -> connected -> sent -> answer started -> … -> complete
                    |                     '-> broken: broken off, never replayed
                    '-> broken before any byte: once more, on another replica

A stream of events that is broken off says so in one event more, then ends without its last chunk:
a client that reads events learns why, and any other still sees an answer that is not whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from fleet.errors import FleetError, MemberFailed, NoEligibleReplica
from fleet.facts.outcome import Outcome, Result
from fleet.facts.replica import Replica
from gateway.accounts import TAIL_BYTES, Account
from gateway.gate import Ticket
from gateway.heads import REPLACED_IN_ANSWER, Headers, passed_on
from gateway.rollouts import Rollouts
from gateway.streams import end_of, error_event, is_between, takes_events
from gateway.upstream import Connection

ATTEMPTS = 2
"""How often a rollout may be tried: once more, on another replica, if no byte has come back."""

NOTED = frozenset({b"x-request-id", b"x-min-weight-version", b"x-session-id"})
"""Headers meant for the gateway, taken in by `Request.note`."""


@dataclass(slots=True)
class Request:
    """What a client asks for; `target` is the raw path with its query, `headers` are as sent."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes | bytearray
    request_id: bytes | None = None
    min_version: str | None = None
    session: bytes | None = None
    key: bytes | None = None
    """What the routing policy goes by, if it goes by anything of the rollout."""

    def note(self, name: bytes, value: bytes) -> None:
        """Take in a header, its name in lower case, if it is one of NOTED; an empty one is none."""
        value = value.strip(b" \t")  # no part of a value (RFC 9110, 5.5); not every parser knows
        if not value:
            return
        if name == b"x-request-id":
            self.request_id = value
        elif name == b"x-min-weight-version":
            self.min_version = value.decode("latin-1")
        elif name == b"x-session-id":
            self.session = value


class Client(Protocol):
    """The side of the one who asked."""

    def start(self, status: int, headers: Headers) -> None:
        """Pass status and headers on."""
        ...

    def body(self, data: bytes) -> None:
        """Pass a piece of the answer on."""
        ...

    def end(self) -> None:
        """The answer is whole."""
        ...

    def refuse(self, error: FleetError) -> None:
        """No replica answers; say why."""
        ...

    def break_off(self, last: bytes) -> None:
        """The answer cannot be completed, and the client must notice; `last` still goes out."""
        ...


class Exchange:
    """Carries one rollout; its client calls `begin`, then perhaps `pause`, `resume`, `gone`."""

    __slots__ = (
        "_began",
        "_client",
        "_connecting",
        "_connection",
        "_failed",
        "_fresh",
        "_is_gone",
        "_rollouts",
        "_started",
        "_status",
        "_stream_end",
        "_tail",
        "_ticket",
        "_waiting",
        "request",
    )

    def __init__(self, rollouts: Rollouts, request: Request, client: Client) -> None:
        self._rollouts = rollouts
        self.request = request
        self._client = client
        self._ticket: Ticket | None = None
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._failed: list[str] = []
        self._fresh = False
        self._started = False
        self._is_gone = False
        self._began = monotonic()
        self._status: int | None = None
        self._stream_end: bytes | None = None  # of a stream of events: how it ends so far
        self._tail = b""

    # -- from the client ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Ask for admission; the answer comes to the client."""
        request = self.request
        if request.request_id is None:
            request.request_id = self._rollouts.new_id()
        self._rollouts.running.add(self)
        key_of = self._rollouts.gate.key_of
        if key_of is not None:
            request.key = key_of(request)
        self._admit()

    def gone(self) -> None:
        """Give everything up: the client has left. The replica sees its connection close."""
        self._is_gone = True
        if self._waiting is not None:
            self._waiting.cancel()
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        self._end("cancelled")

    def pause(self) -> None:
        """The client takes the answer too slowly: take no more from the replica."""
        if self._connection is not None:
            self._connection.pause_reading()

    def resume(self) -> None:
        """The client has caught up."""
        if self._connection is not None:
            self._connection.resume_reading()

    # -- from an abort -----------------------------------------------------------------------------

    @property
    def replica(self) -> Replica | None:
        """The replica that has this rollout, or None while it waits at the gate."""
        return self._ticket.replica if self._ticket is not None else None

    def answer_held(self, headers: Headers, body: bytes) -> None:
        """Answer a rollout that waits at the gate in a replica's stead."""
        if self._waiting is None:
            return
        self._waiting.cancel()
        self._end("aborted")
        own = [
            (b"content-length", b"%d" % len(body)),
            (b"x-weight-version", self._rollouts.gate.version.encode("latin-1")),
            (b"x-request-id", self.request.request_id or b""),
        ]
        self._client.start(200, [*headers, *own])
        self._client.body(body)
        self._client.end()

    # -- admission ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        request = self.request
        ticket = self._rollouts.gate.try_admit(request.min_version, self._failed, request.key)
        if ticket is not None:
            self._go(ticket)
        else:
            self._waiting = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        request = self.request
        try:
            ticket = await self._rollouts.gate.admit(
                len(request.body), request.min_version, self._failed, request.key
            )
        except FleetError as error:
            self._refuse(error)
            return
        finally:
            self._waiting = None
        self._go(ticket)

    def recall(self) -> None:
        """Take the rollout back, to be admitted anew, unless all of it is with its replica.

        What is not sent when the lease ends must not be sent later: whoever closes the gates waits
        no longer than that.
        """
        if self._ticket is None or not self._ticket.is_sending or self._started:
            return
        self._disconnect()
        self._again()

    def recall_from(self, replicas: Collection[str]) -> None:
        """Take the rollout back in the same way if its replica is one of these.

        One that has answered before it had all of the body cannot answer anything else any more.
        """
        ticket = self._ticket
        if ticket is None or not ticket.is_sending or ticket.replica.id not in replicas:
            return
        self._disconnect()
        if self._started:
            self._break_off("it may get nothing now, and was not sent all of the request")
        else:
            self._again()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        elif self._connecting is not None:
            self._connecting.cancel()

    def _again(self) -> None:
        """Ask for admission anew: the gate may have closed, or the version moved."""
        self._end_ticket()
        self._admit()

    def _go(self, ticket: Ticket) -> None:
        self._ticket = ticket
        pool = self._rollouts.upstreams.pool(ticket.replica.url)
        self._connecting = pool.take(self, fresh=self._fresh)

    # -- from the replica --------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        """Send the request."""
        if self._is_gone or self._ticket is None:
            connection.abort()
            return
        self._connection = connection
        request = self.request
        connection.send(
            self._head(connection), request.body, self, headless=request.method == b"HEAD"
        )

    def _head(self, connection: Connection) -> bytes:
        request = self.request
        parts = [request.method, b" ", request.target, b" HTTP/1.1\r\nhost: "]
        parts.append(connection.authority)
        for name, value in passed_on(request.headers, self._rollouts.replaced):
            parts += (b"\r\n", name, b": ", value)
        for name, value in self._rollouts.added:
            parts += (b"\r\n", name, b": ", value)
        if request.body or request.method == b"POST":
            parts.append(b"\r\ncontent-length: %d" % len(request.body))
        parts += (b"\r\nx-request-id: ", request.request_id or b"", b"\r\n\r\n")
        return b"".join(parts)

    def request_sent(self) -> None:
        """The gate may close: this rollout is with its replica."""
        if self._ticket is not None:
            self._ticket.sent()

    def answer_started(self, status: int, headers: Headers) -> None:
        """Pass status and headers on, with ours added."""
        ticket, gate = self._ticket, self._rollouts.gate
        assert ticket is not None
        self._started = True
        self._status = status
        answer = passed_on(headers, REPLACED_IN_ANSWER)
        if takes_events(answer):
            self._stream_end = b""
        answer.append((b"x-weight-version", ticket.version.encode("latin-1")))
        if gate.version != ticket.version:
            answer.append((b"x-weight-version-end", gate.version.encode("latin-1")))
        if gate.kv != "current":
            answer.append((b"x-weight-version-kv", gate.kv.encode("latin-1")))
        answer.append((b"x-fleet-replica", ticket.replica.id.encode("latin-1")))
        answer.append((b"x-request-id", self.request.request_id or b""))
        self._rollouts.metrics.count_rollout(ticket.version, status)
        self._client.start(status, answer)

    def answer_body(self, data: bytes) -> None:
        """Pass a piece of the answer on as it came."""
        if self._rollouts.accounts.are_written:
            self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._stream_end is not None:
            self._stream_end = end_of(self._stream_end, data)
        self._client.body(data)

    def answer_complete(self) -> None:
        """The answer is whole."""
        self._connection = None
        self._end("complete")
        self._client.end()

    def answer_broken(self, reason: str) -> None:
        """Try another replica if no byte has come back, else break the answer off."""
        if self._is_gone or self._ticket is None:
            return
        ticket, connection = self._ticket, self._connection
        self._connection = None
        if not self._started and connection is not None and connection.is_reused:
            self._fresh = True
            self._again()  # the connection was closed while idle: that says nothing of its replica
            return
        replica = ticket.replica.id
        self._rollouts.suspect(replica, reason)
        if self._started:
            self._break_off(reason)
            return
        self._end_ticket()
        self._failed.append(replica)
        if len(self._failed) < ATTEMPTS and self._rollouts.gate.has_another(self._failed):
            self._admit()
            return
        told = f"{', '.join(self._failed)} broke the connection before answering"
        hint = "retry; GET /fleet/replicas tells which ones are gone"
        self._refuse(NoEligibleReplica(told, hint=hint))

    def _break_off(self, reason: str) -> None:
        """End an answer that has begun and cannot be completed."""
        last = self._last_event(self._ticket.replica.id, reason) if self._ticket else b""
        self._end("broken")
        self._client.break_off(last)

    def _last_event(self, replica: str, reason: str) -> bytes:
        """Return what a broken stream can still say: nothing in the middle of an event."""
        if self._stream_end is None or not is_between(self._stream_end):
            return b""
        outcome = Outcome(
            outcome=Result.UNREACHABLE,
            status=self._status,
            detail=reason,
            elapsed_s=monotonic() - self._began,
        )
        told = f"{replica} broke off in the middle of this answer: {reason}"
        hint = "what came before is all there is of it; ask again for a whole one"
        return error_event(MemberFailed(told, hint=hint, outcomes={replica: outcome}))

    # -- ends --------------------------------------------------------------------------------------

    def _refuse(self, error: FleetError) -> None:
        self._rollouts.metrics.rollouts_refused.labels(type(error).__name__).inc()
        self._end("refused")
        self._client.refuse(error)

    def _end(self, outcome: str) -> None:
        """Leave the books in order; the ticket goes back whatever the outcome."""
        rollouts, ticket = self._rollouts, self._ticket
        rollouts.running.discard(self)
        accounts = rollouts.accounts
        version = ticket.version if ticket else rollouts.gate.version
        held_s = ticket.held_s if ticket else 0.0
        accounts.count(outcome, held_s, spans=version != rollouts.gate.version)
        if accounts.are_written:
            accounts.write(self._account(outcome, version, held_s), self._tail)
        self._end_ticket()
        self.request.body = b""  # an exchange and its client know each other, so both may linger

    def _account(self, outcome: str, version: str, held_s: float) -> Account:
        request, ticket = self.request, self._ticket
        return Account(
            request_id=(request.request_id or b"").decode("latin-1"),
            path=request.target.partition(b"?")[0].decode("latin-1"),
            outcome=outcome,
            status=self._status,
            replica=ticket.replica.id if ticket else None,
            version=version,
            version_end=self._rollouts.gate.version,
            held_s=held_s,
            elapsed_s=monotonic() - self._began,
        )

    def _end_ticket(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.done()
