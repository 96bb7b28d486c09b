"""What the gateways of one fleet tell each other, over one channel of the store.

News (the state has changed) may be lost: who misses it sees the state at its next heartbeat.
Questions are asked again until everyone has answered or the asker gives up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from uuid import uuid4

import msgspec

from fleet.errors import StoreUnavailable
from fleet.gateways.outage import Outage
from fleet.store import Store

log = logging.getLogger(__name__)

CHANNEL = "talk"
AGAIN_S = 0.5
"""How long to wait for answers before a question is asked again, and for the store to come back."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that a gateway says: news (`ask` empty), a question, or its `answer`.

    `what` is the subject, `names` the rollouts that a question is about (None: all), `count` how
    many an answer is about.
    """

    sender: str
    what: str
    revision: int = 0
    ask: str = ""
    answer: bool = False
    names: tuple[str, ...] | None = None
    count: int = 0


Hear = Callable[[Message], Awaitable[None]]


class Question:
    """One question on its way, and who has answered it with which count."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.answers: dict[str, int] = {}
        self._news = asyncio.Event()

    def take(self, answer: Message) -> None:
        """Take one answer down."""
        self.answers[answer.sender] = answer.count
        self._news.set()

    async def wait(self, others: Iterable[str], within_s: float) -> set[str]:
        """Return who of these has not answered, as soon as that is nobody, or after `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while missing := set(others) - self.answers.keys():
                    self._news.clear()
                    await self._news.wait()
                return missing
        return set(others) - self.answers.keys()


class Talk:
    """This gateway's ear and voice."""

    def __init__(self, store: Store, me: str) -> None:
        self._store = store
        self._me = me
        self._questions: dict[str, Question] = {}

    @contextmanager
    def question(
        self, what: str, *, revision: int = 0, names: tuple[str, ...] | None = None
    ) -> Generator[Question]:
        """Open a question; `put` asks it, and answers are taken down until the context ends."""
        ask = uuid4().hex
        question = Question(
            Message(sender=self._me, what=what, revision=revision, ask=ask, names=names)
        )
        self._questions[ask] = question
        try:
            yield question
        finally:
            del self._questions[ask]

    async def put(self, question: Question) -> None:
        """Ask, or ask again."""
        await self.say(question.message)

    async def say(self, message: Message) -> None:
        """Send one message to every gateway that listens."""
        await self._store.publish(CHANNEL, msgspec.json.encode(message))

    async def answer(self, message: Message, count: int = 0) -> None:
        """Answer a question of another gateway."""
        await self.say(
            Message(sender=self._me, what=message.what, ask=message.ask, answer=True, count=count)
        )

    async def listen(self, hear: Hear) -> None:
        """Take answers down and hand everything else that others say to `hear`, for ever."""
        outage = Outage("hearing other gateways")
        while True:
            try:
                async with self._store.subscribe(CHANNEL) as messages:
                    outage.over()
                    await self._follow(messages, hear)
            except StoreUnavailable as error:
                outage.failed(error.message)
            except Exception:  # what one gateway says must not end those that cannot read it
                log.exception("bug in hearing gateways")
            await asyncio.sleep(AGAIN_S)

    async def _follow(self, messages: AsyncIterator[bytes], hear: Hear) -> None:
        async for body in messages:
            message = msgspec.json.decode(body, type=Message)
            if message.sender == self._me:
                continue
            if not message.answer:
                await hear(message)
            elif message.ask in self._questions:
                self._questions[message.ask].take(message)
