"""Calls between nodes, over the peer links of the log.

A link carries messages in order, at most once, and loses the messages in flight when its session ends. So a call ends
in one of three ways: an answer, a refusal sent by the peer, or `Unanswered`, when it is unknown whether the call was
carried out. A caller must be able to repeat a call: under the same id, or because it changes nothing.

This module does not know what the calls mean. Arguments and answers are msgpack values; both sides bound the number of
open calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final, TypeAlias

import msgpack

from holdfast.cluster.entropy import Entropy
from holdfast.log.messages import APP_BYTES_MAX
from holdfast.sdk.bounds import TooComplex, check_msgpack

logger = logging.getLogger(__name__)

_ASK: Final = 0
_ANSWER: Final = 1
_REFUSE: Final = 2
_FORGET: Final = 3  # The caller no longer waits.
_TELL: Final = 4  # No answer is expected.

FOLLOW_S: Final = 0.05  # How often calls to a leader are checked for a change of leader.
OPEN_MAX: Final = 50_000  # Open calls per peer; more are refused.

Handler: TypeAlias = Callable[[str, Any], Awaitable[Any]]
Listener: TypeAlias = Callable[[str, Any], None]
QuickHandler: TypeAlias = Callable[[str, Any, "RpcReply"], None]


class Unanswered(Exception):
    """The link to the peer is down, or went down meanwhile. `sent` tells whether the call may have arrived."""

    def __init__(self, peer: str, *, sent: bool) -> None:
        super().__init__(f"{peer} did not answer" if sent else f"{peer} cannot be reached")
        self.peer = peer
        self.sent = sent


class Refused(Exception):
    """The peer refused the call. `kind` is for code, the message for people; `detail` is optional extra data."""

    def __init__(self, kind: str, message: str, detail: Any = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.detail = detail


class RpcReply:
    """Lets a quick handler answer once, later, from a callback, without a task of its own."""

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
    """One per node. `send` is `LogNode.send`. The node passes in received messages and link failures."""

    def __init__(
        self,
        send: Callable[[str, bytes], bool],
        *,
        leader: Callable[[int], str | None] = lambda _: None,
        entropy: Entropy | None = None,
    ) -> None:
        """`leader` is the leader of a partition, as far as this node knows."""
        self._send = send
        # Starts at random: an answer to a call of a previous process must not match one of this process.
        self._numbers = count((entropy or Entropy()).bits(62))
        self._asked: dict[str, dict[int, asyncio.Future[Any]]] = {}
        #: Calls that only a leader can answer, by peer: call number -> partition.
        self._about: dict[str, dict[int, int]] = {}
        self._following: asyncio.Task[None] | None = None
        self._leader = leader
        self._working: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._open: dict[str, int] = {}
        self._handlers: dict[str, Handler] = {}
        self._quick: dict[str, QuickHandler] = {}
        self._listeners: dict[str, Listener] = {}

    def serve(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler

    def serve_quickly(self, method: str, handler: QuickHandler) -> None:
        """For methods called thousands of times a second. The handler must not raise, and must answer once."""
        self._quick[method] = handler

    def listen(self, method: str, listener: Listener) -> None:
        """Receive messages that peers `tell`."""
        self._listeners[method] = listener

    def tell(self, peer: str, method: str, argument: Any) -> bool:
        """Send a message without an answer. Returns False if there is no link. The message is lost if the link breaks."""
        return self._send(peer, msgpack.packb((_TELL, 0, method, argument)))

    async def ask(self, peer: str, method: str, argument: Any, *, about: int | None = None) -> Any:
        """Call a peer. Raises Refused or Unanswered. Cancellation tells the peer to drop the call.

        `about` is the partition that the peer must lead to answer. If the leader is silent while its link stays up
        (stopped, or isolated), the call ends when another leader is known.
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
        """End open calls to leaders that have been replaced."""
        while any(self._about.values()):
            await asyncio.sleep(FOLLOW_S)
            for peer, questions in self._about.items():
                moved = {it for it in set(questions.values()) if self._leader(it) not in (None, peer)}
                for number in [number for number, about in questions.items() if about in moved] if moved else ():
                    answer = self._asked.get(peer, {}).get(number)
                    if answer is not None and not answer.done():
                        answer.set_exception(Unanswered(peer, sent=True))
        self._following = None

    def receive(self, peer: str, payload: bytes) -> None:
        """Process a message of an authenticated peer. One that cannot be decoded is dropped: it comes from another release."""
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
            logger.warning("refused a message from %s: %s", peer, error)
            self._refuse_unread(peer, payload, str(error))
        except (ValueError, TypeError) as error:
            logger.warning("cannot decode a message from %s: %s", peer, error)

    def _refuse_unread(self, peer: str, payload: bytes, why: str) -> None:
        """Refuse a message that was not decoded, so that a caller here or there does not wait forever."""
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
        """The session ended: our calls get no answers any more, and the peer no longer waits for ours."""
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
            quick(peer, argument, RpcReply(self, peer, number))
            return
        handler = self._handlers.get(method)
        if handler is None and method not in self._quick:
            self._say(
                peer,
                _REFUSE,
                number,
                "unknown",
                f"this node does not know {method!r:.60}; it may run an older release",
                None,
            )
        elif handler is None or self._open.get(peer, 0) >= OPEN_MAX:
            self._say(peer, _REFUSE, number, "overloaded", f"{peer} already has {OPEN_MAX} open calls", None)
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
            logger.exception("a call from %s failed", peer)
            self._say(peer, _REFUSE, number, "internal", f"{type(error).__name__}: {error}", None)
        else:
            self._say(peer, _ANSWER, number, answer)

    def _answer(self, peer: str, number: int, kind: int, *rest: Any) -> None:
        self._open[peer] -= 1
        self._say(peer, kind, number, *rest)

    def _say(self, peer: str, kind: int, number: int, *rest: Any) -> None:
        row = msgpack.packb((kind, number, *rest))
        if len(row) > APP_BYTES_MAX:  # The peer would close the link, with everything else on it.
            why = f"the answer has {len(row)} bytes; the limit between nodes is {APP_BYTES_MAX}"
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
