"""Questions and answers between nodes, over the peer links that the log already has.

A link carries messages in order, at most once, and loses what is in flight when its session ends. So a question ends in
one of three ways: an answer, a refusal that the other side sent, or `Unanswered`, when nobody can say whether it was
carried out. Whoever asks must be able to ask again: under the same id, or by a question that changes nothing.

Nothing here knows what is asked. Arguments and answers are msgpack values; both sides bound how many are open.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final, TypeAlias

import msgpack

from holdfast.log.messages import APP_BYTES_MAX
from holdfast.sdk.bounds import TooComplex, check_msgpack

logger = logging.getLogger(__name__)

_ASK: Final = 0
_ANSWER: Final = 1
_REFUSE: Final = 2
_FORGET: Final = 3  # Whoever asked no longer waits.
_TELL: Final = 4  # Nobody waits for an answer.

FOLLOW_S: Final = 0.05  # How often questions to a leader are compared with who leads.
OPEN_MAX: Final = 50_000  # Questions of one peer that we work on at a time; more are refused.

Handler: TypeAlias = Callable[[str, Any], Awaitable[Any]]
Listener: TypeAlias = Callable[[str, Any], None]
QuickHandler: TypeAlias = Callable[[str, Any, "Answer"], None]


class Unanswered(Exception):
    """The link to the peer is down, or went down meanwhile. `sent` tells whether the question may have arrived."""

    def __init__(self, peer: str, *, sent: bool) -> None:
        super().__init__(f"{peer} did not answer" if sent else f"{peer} cannot be reached")
        self.peer = peer
        self.sent = sent


class Refused(Exception):
    """The peer answered that it will not: `kind` is for code, the text for people, `detail` whatever helps further."""

    def __init__(self, kind: str, message: str, detail: Any = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.detail = detail


class Answer:
    """How a quick handler answers: later, once, from a callback, without a task of its own."""

    __slots__ = ("_number", "_peer", "_rpc")

    def __init__(self, rpc: Rpc, peer: str, number: int) -> None:
        self._rpc = rpc
        self._peer = peer
        self._number = number

    def say(self, value: Any) -> None:
        self._rpc._answer(self._peer, self._number, _ANSWER, value)

    def refuse(self, kind: str, message: str, detail: Any = None) -> None:
        self._rpc._answer(self._peer, self._number, _REFUSE, kind, message, detail)


class Rpc:
    """One per node. `send` is `LogNode.send`; the node hands in what arrives and which links went down."""

    def __init__(self, send: Callable[[str, bytes], bool]) -> None:
        self._send = send
        # Not from 1: an answer to a question of our last life must not fit one of this life.
        self._numbers = count(secrets.randbits(62))
        self._asked: dict[str, dict[int, asyncio.Future[Any]]] = {}
        #: Questions that only whoever leads something can answer: number -> what it is about.
        self._about: dict[str, dict[int, int]] = {}
        self._following: asyncio.Task[None] | None = None
        #: Who leads it now, as far as this node knows.
        self.leader: Callable[[int], str | None] = lambda _: None
        self._working: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._open: dict[str, int] = {}
        self._handlers: dict[str, Handler] = {}
        self._quick: dict[str, QuickHandler] = {}
        self._listeners: dict[str, Listener] = {}

    def serve(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler

    def serve_quickly(self, method: str, handler: QuickHandler) -> None:
        """For what is asked thousands of times a second. The handler must not raise, and answers once."""
        self._quick[method] = handler

    def listen(self, method: str, listener: Listener) -> None:
        """Hear what peers `tell`."""
        self._listeners[method] = listener

    def tell(self, peer: str, method: str, argument: Any) -> bool:
        """Say it once, without an answer. False if there is no link; lost if the link breaks meanwhile."""
        return self._send(peer, msgpack.packb((_TELL, 0, method, argument)))

    async def ask(self, peer: str, method: str, argument: Any, *, about: int | None = None) -> Any:
        """The peer's answer. Raises Refused or Unanswered; cancelling tells the peer to forget the question.

        `about` is what the peer leads and must lead to answer. A leader that is silent while its link stays up (stopped, or
        heard by nobody) is waited for only until somebody else is known to lead.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting = self._asked.setdefault(peer, {})
        waiting[number] = answer
        if about is not None:
            self._about.setdefault(peer, {})[number] = about
            if self._following is None:
                self._following = asyncio.ensure_future(self._follow())
        try:
            if not self._send(peer, msgpack.packb((_ASK, number, method, argument))):
                raise Unanswered(peer, sent=False)
            return await answer
        except asyncio.CancelledError:
            self._send(peer, msgpack.packb((_FORGET, number)))
            raise
        finally:
            waiting.pop(number, None)
            if about is not None:
                self._about[peer].pop(number, None)

    async def _follow(self) -> None:
        """While questions to leaders are open: give up those whose leader was succeeded."""
        while any(self._about.values()):
            await asyncio.sleep(FOLLOW_S)
            for peer, questions in self._about.items():
                moved = {it for it in set(questions.values()) if self.leader(it) not in (None, peer)}
                for number in [number for number, about in questions.items() if about in moved] if moved else ():
                    answer = self._asked.get(peer, {}).get(number)
                    if answer is not None and not answer.done():
                        answer.set_exception(Unanswered(peer, sent=True))
        self._following = None

    def receive(self, peer: str, payload: bytes) -> None:
        """A message of an authenticated peer. One that makes no sense is dropped: its author runs another release."""
        try:
            check_msgpack(payload)
            kind, number, *rest = msgpack.unpackb(payload, strict_map_key=False)
            match kind:
                case 0:
                    method, argument = rest
                    self._begin(peer, number, method, argument)
                case 1 | 2:
                    self._finish(peer, kind, number, rest)
                case 4:
                    method, argument = rest
                    if (listener := self._listeners.get(method)) is not None:
                        listener(peer, argument)
                case 3:
                    if (task := self._working.get((peer, number))) is not None:
                        task.cancel()
        except TooComplex as error:
            logger.warning("a message of %s is not taken: %s", peer, error)
            self._refuse_unread(peer, payload, str(error))
        except (ValueError, TypeError) as error:
            logger.warning("a message of %s cannot be read: %s", peer, error)

    def _refuse_unread(self, peer: str, payload: bytes, why: str) -> None:
        """Whoever waits for it, here or there, must not wait for ever."""
        unpacker = msgpack.Unpacker(max_buffer_size=32)
        unpacker.feed(payload[:32])
        try:
            unpacker.read_array_header()
            kind, number = unpacker.unpack(), unpacker.unpack()
        except Exception:
            return
        if kind == _ASK and type(number) is int:
            self._say(peer, _REFUSE, number, "TooLarge", why, None)
        elif kind in (_ANSWER, _REFUSE):
            self._finish(peer, _REFUSE, number, ["TooLarge", why, None])

    def peer_down(self, peer: str) -> None:
        """The session ended: answers to what we asked will not come, and nobody waits for ours."""
        for answer in self._asked.pop(peer, {}).values():
            if not answer.done():
                answer.set_exception(Unanswered(peer, sent=True))
        for (asker, _), task in list(self._working.items()):
            if asker == peer:
                task.cancel()

    async def stop(self) -> None:
        tasks = [*self._working.values(), *([self._following] if self._following is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, peer: str, number: int, method: str, argument: Any) -> None:
        if (quick := self._quick.get(method)) is not None and self._open.get(peer, 0) < OPEN_MAX:
            self._open[peer] = self._open.get(peer, 0) + 1
            quick(peer, argument, Answer(self, peer, number))
            return
        handler = self._handlers.get(method)
        if handler is None and method not in self._quick:
            self._say(
                peer,
                _REFUSE,
                number,
                "unknown",
                f"this node does not know {method!r:.60}; is it an older release?",
                None,
            )
        elif handler is None or self._open.get(peer, 0) >= OPEN_MAX:
            self._say(peer, _REFUSE, number, "overloaded", f"{OPEN_MAX} questions of {peer} are open already", None)
        else:
            self._open[peer] = self._open.get(peer, 0) + 1
            task = asyncio.ensure_future(self._work(peer, number, handler, argument))
            self._working[peer, number] = task
            task.add_done_callback(lambda _: self._ended(peer, number))

    def _ended(self, peer: str, number: int) -> None:
        self._working.pop((peer, number), None)
        self._open[peer] -= 1

    async def _work(self, peer: str, number: int, handler: Handler, argument: Any) -> None:
        try:
            answer = await handler(peer, argument)
        except Refused as refusal:
            self._say(peer, _REFUSE, number, refusal.kind, refusal.message, refusal.detail)
        except Exception as error:
            logger.exception("a question of %s failed", peer)
            self._say(peer, _REFUSE, number, "internal", f"{type(error).__name__}: {error}", None)
        else:
            self._say(peer, _ANSWER, number, answer)

    def _answer(self, peer: str, number: int, kind: int, *rest: Any) -> None:
        self._open[peer] -= 1
        self._say(peer, kind, number, *rest)

    def _say(self, peer: str, kind: int, number: int, *rest: Any) -> None:
        row = msgpack.packb((kind, number, *rest))
        if len(row) > APP_BYTES_MAX:  # The peer would end the link, and everything else that goes over it.
            why = f"the answer has {len(row)} bytes; at most {APP_BYTES_MAX} are sent between nodes"
            row = msgpack.packb((_REFUSE, number, "TooLarge", why, None))
        self._send(peer, row)

    def _finish(self, peer: str, kind: int, number: int, rest: list[Any]) -> None:
        answer = self._asked.get(peer, {}).get(number)
        if answer is None or answer.done():
            return
        if kind == _ANSWER:
            answer.set_result(rest[0])
        else:
            answer.set_exception(Refused(*rest))
