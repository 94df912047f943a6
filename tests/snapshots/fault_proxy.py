"""An HTTP proxy for an S3 server that fails on demand: down, slow, errors, truncated or changed bodies, old listings.

It forwards requests unchanged (the Host header too, because of the signatures) and corrupts answers. A fault applies to
matching requests, `times` of them; after that, the store must be found working again.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

ALWAYS: Final = 1 << 30
PATIENCE_S: Final = 60.0


@dataclass(frozen=True)
class Question:
    method: str
    path: str

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.path

    @property
    def is_download(self) -> bool:
        return self.method == "GET" and "list-type=2" not in self.path


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    cut_at: int | None = None
    """Close the connection after this many bytes of the body, although more were announced."""


Spoil = Callable[[Question, Answer], Answer]


@dataclass
class Fault:
    matches: Callable[[Question], bool] = lambda _: True
    times: int = ALWAYS
    down: bool = False
    """The connection is closed without an answer, and the server never sees the request."""
    delay_s: float = 0.0
    reaches: bool = True
    """Whether the server sees the request, and does what it says, before its answer is spoiled."""
    spoil: Spoil | None = None


@dataclass
class FaultProxy:
    target: tuple[str, int]
    faults: list[Fault] = field(default_factory=list)
    requests: list[Question] = field(default_factory=list)
    endpoint_url: str = ""
    stopping: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def heal(self) -> None:
        with self._lock:
            self.faults.clear()

    def take_fault(self, question: Question) -> Fault | None:
        with self._lock:
            self.requests.append(question)
            for fault in self.faults:
                if fault.times > 0 and fault.matches(question):
                    fault.times -= 1
                    return fault
        return None


def error(status: int, code: str, *, times: int = ALWAYS, reaches: bool = False) -> Fault:
    """S3 answers with an error. With `reaches` the request took effect nevertheless."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as ordered</Message></Error>".encode()

    def spoil(question: Question, _: Answer) -> Answer:
        return Answer(status, [("Content-Type", "application/xml")], b"" if question.method == "HEAD" else body)

    return Fault(times=times, reaches=reaches, spoil=spoil)


def truncated(at: int, *, times: int = ALWAYS) -> Fault:
    """Bodies of downloads break off."""

    def spoil(_: Question, answer: Answer) -> Answer:
        answer.cut_at = at
        return answer

    return Fault(lambda question: question.is_download, times, spoil=spoil)


def flipped(at: int, *, times: int = ALWAYS) -> Fault:
    """One bit of downloads is wrong, in bodies that are long enough."""

    def spoil(_: Question, answer: Answer) -> Answer:
        if len(answer.body) > at:
            answer.body = answer.body[:at] + bytes([answer.body[at] ^ 1]) + answer.body[at + 1 :]
        return answer

    return Fault(lambda question: question.is_download, times, spoil=spoil)


def stale_listing() -> Fault:
    """Listings stay as they were at the first request."""
    seen: dict[str, Answer] = {}

    def spoil(question: Question, answer: Answer) -> Answer:
        return seen.setdefault(question.path, answer)

    return Fault(lambda question: question.is_listing, spoil=spoil)


@contextmanager
def fault_proxy(target: tuple[str, int]) -> Iterator[FaultProxy]:
    proxy = FaultProxy(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = PATIENCE_S

        def log_message(self, *_: object) -> None:
            pass

        def handle_any(self) -> None:
            question = Question(self.command, self.path)
            fault = proxy.take_fault(question)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if fault is not None and fault.down:
                self.close_connection = True
                return
            if fault is not None and fault.delay_s:
                proxy.stopping.wait(fault.delay_s)
            answer = self.ask(body) if fault is None or fault.reaches else Answer(500, [], b"")
            if fault is not None and fault.spoil is not None:
                answer = fault.spoil(question, answer)
            self.send(question, answer)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815 - these names are called

        def ask(self, body: bytes) -> Answer:
            connection = http.client.HTTPConnection(*proxy.target, timeout=PATIENCE_S)
            try:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in ("connection", "expect"):
                        connection.putheader(name, value)
                connection.endheaders(body or None)
                answer = connection.getresponse()
                headers = [(name, value) for name, value in answer.getheaders() if name.lower() != "transfer-encoding"]
                return Answer(answer.status, headers, answer.read())
            finally:
                connection.close()

        def send(self, question: Question, answer: Answer) -> None:
            self.send_response_only(answer.status)
            for name, value in answer.headers:
                if name.lower() != "content-length" or question.method == "HEAD":
                    self.send_header(name, value)
            if question.method != "HEAD":
                self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if question.method == "HEAD":
                return
            self.wfile.write(answer.body[: answer.cut_at])
            if answer.cut_at is not None and answer.cut_at < len(answer.body):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        def handle(self) -> None:
            with suppress(ConnectionError, TimeoutError):  # The client gave up, which some faults provoke.
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.endpoint_url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)
