"""How a command talks to a node: one request, one answer, and errors that say what to do.

It blocks and uses only the standard library, because a command that sends one request should start fast.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import click

from holdfast.cluster.origins import host_behind_credentials, normal_origin

ADMIN_URL: Final = "http://127.0.0.1:9070"
INGRESS_URL: Final = "http://127.0.0.1:8080"


#: Characters that a terminal interprets instead of showing them: C0 except newline and tab, DEL and C1. Those that turn the
#: direction of writing make a line read differently from what it says, and half of a surrogate pair cannot be written at all.
REVERSALS: Final = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
SURROGATES: Final = range(0xD800, 0xE000)
_CONTROLS: Final = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"},
    **{code: f"\\u{code:04x}" for code in (*REVERSALS, *SURROGATES)},
}


def printable(text: str) -> str:
    """Text of clients and handlers for a terminal, with its control characters as escapes: \\x1b."""
    return text.translate(_CONTROLS)


class Failed(click.ClickException):
    """The error, its details if there are any, and a hint. Exit code 1."""

    def __init__(self, message: str, hint: str | None = None, details: list[str] | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.details = details or []

    def show(self, file: Any = None) -> None:
        click.echo(f"{click.style('Error:', fg='red', bold=True)} {printable(self.message)}", err=True)
        for detail in self.details:
            click.echo(f"  - {printable(str(detail))}", err=True)
        if self.hint:
            click.echo(f"{click.style('Hint:', fg='yellow')} {printable(str(self.hint))}", err=True)


class Unanswered(Failed):
    """No node answers, or it cannot now: the same request may succeed later."""


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            raise Failed(
                f"the answer (status {self.status}) is not JSON", "is there a Holdfast node at this address?"
            ) from None


def use_token(file: Path | None) -> None:
    """Set the token of all requests of this command. It is never an argument: every user of the machine can see those."""
    global _token, _token_urls, _answered
    _answered = None
    _token = _one_word(os.environ.get("HOLDFAST_TOKEN", "").strip(), "HOLDFAST_TOKEN") or None
    _token_urls = ()
    if file is not None:
        _token = read_token(file, "--token-file")


def offer_token(token: str, urls: tuple[str, ...]) -> None:
    """Send this token to these addresses and to no other, unless the command was given a token of its own."""
    global _token, _token_urls
    if _token is None:
        _token, _token_urls = token, urls


def extend_token(urls: Iterable[str]) -> None:
    """Send the token to these addresses, too: other nodes of a cluster that has it already, as that cluster names them. Over
    HTTPS only, if it was over HTTPS."""
    global _token_urls
    if _token_urls:
        secure = all(urlsplit(each).scheme == "https" for each in _token_urls)
        new = (each for each in urls if not secure or urlsplit(each).scheme == "https")
        _token_urls = tuple(dict.fromkeys((*_token_urls, *new)))


def read_token(file: Path, named: str) -> str:
    """The token in a file that other users cannot read. `named`: the option or setting that names it."""
    from holdfast.cluster.private import find_exposure

    try:
        exposed = find_exposure(file, anywhere=True)
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Failed(f"{named}: cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    if exposed:
        raise Failed(f"{named}: {exposed}")
    return _one_word(token, f"{named}: {file}")


def _one_word(token: str, where: str) -> str:
    """Anything else cannot be in a header, and an error of the library about that would show the token."""
    if not re.fullmatch(r"[!-~]*", token):
        raise Failed(f"{where} must be a token and nothing else: one line of ASCII characters without spaces")
    return token


def answered() -> str | None:
    """The address that answered this command last. None: nothing did."""
    return _answered


_answered: str | None = None
_token: str | None = None
_token_urls: tuple[str, ...] = ()  # The only addresses that get it; empty: all.


def use_certificates(ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """For all requests of this command: whom to trust, and what to show a node that wants a client certificate."""
    global _certificates
    if key is not None and cert is None:
        raise Failed("--client-key-file: there is a key, and no certificate", "give --client-cert-file too")
    _certificates = (ca, cert, key)


def offer_certificates(ca: str, cert: str, key: str) -> None:
    """Use these, unless the command was given its own."""
    global _certificates
    given_ca, given_cert, given_key = _certificates
    if given_cert is None and cert:
        given_cert, given_key = Path(cert), Path(key) if key else None
    _certificates = (given_ca or (Path(ca) if ca else None), given_cert, given_key)


_certificates: tuple[Path | None, Path | None, Path | None] = (None, None, None)


def _trust() -> ssl.SSLContext:
    from holdfast.log.sockets import no_password

    ca, cert, key = _certificates
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as error:
        raise Failed(f"--ca-file: {ca} cannot be used: {getattr(error, 'reason', None) or error}") from None
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, no_password(key or cert))
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise Failed(f"--client-cert-file: {cert} with {key or cert} cannot be used: {why}") from None
    return context


def refuse_credentials(url: str, hint: str) -> None:
    """Every user of the machine can see the arguments of a command, and errors and logs repeat a URL."""
    if (host := host_behind_credentials(url)) is not None:
        raise Failed(f"the URL of {host} has credentials in it, which every user of this machine can see", hint)


def path(*segments: str) -> str:
    return "/" + "/".join(quote(segment, safe="") for segment in segments)


def ask(
    url: str,
    method: str,
    where: str,
    *,
    parameters: Mapping[str, Any] | None = None,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None = 60.0,
) -> Response:
    """The answer, whatever its status. Raises Failed if there is none."""
    request = _request(url, method, where, parameters=parameters, body=body, headers=headers)
    try:
        with _open(url, request, timeout_s) as response:
            answer = Response(response.status, dict(response.headers), response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _unanswered(url, error) from None
    global _answered
    _answered = url
    return answer


def lines(
    url: str,
    where: str,
    *,
    parameters: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    silence_s: float,
) -> Iterator[str]:
    """The lines of a streamed answer, until it ends, breaks, or sends nothing for `silence_s`. Raises Unanswered if there is
    no answer, and Failed for an error."""
    request = _request(url, "GET", where, parameters=parameters, headers=headers)
    try:
        response = _open(url, request, silence_s)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _unanswered(url, error) from None
    with response:
        if response.status >= 400:
            checked(Response(response.status, dict(response.headers), response.read()))
        with suppress(OSError, http.client.HTTPException):
            for raw in response:
                yield raw.decode(errors="replace").rstrip("\r\n")


def _request(
    url: str,
    method: str,
    where: str,
    *,
    parameters: Mapping[str, Any] | None,
    body: bytes | None = None,
    headers: Mapping[str, str] | None,
) -> urllib.request.Request:
    refuse_credentials(url, "give the token with --token-file or HOLDFAST_TOKEN")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Failed(f"{url!r} is not the address of a node", "for example http://127.0.0.1:9070")
    given = {name: value for name, value in (parameters or {}).items() if value is not None}
    full = url.rstrip("/") + where + (f"?{urlencode(given, doseq=True)}" if given else "")
    return urllib.request.Request(full, data=body, method=method, headers=_with_token(url, headers))  # noqa: S310 - checked above


def _open(url: str, request: urllib.request.Request, timeout_s: float | None) -> http.client.HTTPResponse:
    opener = _secure_opener() if request.type == "https" else _OPENER
    response: http.client.HTTPResponse = opener.open(request, timeout=timeout_s)
    if 300 <= response.status < 400:
        with response:
            raise _redirected(url, response.status, response.headers.get("Location"))
    return response


def _unanswered(url: str, error: Exception) -> Failed:
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLError):
        return _untrusted(url, reason)
    ended = isinstance(reason, ConnectionError) and not isinstance(reason, ConnectionRefusedError)
    if url.startswith("https:") and ended and _certificates[1] is None:
        return _wants_certificate(url)
    return Unanswered(
        f"no node answers at {url}: {reason}",
        "is it running (holdfast dev)? Another address: --admin-url and --ingress-url, "
        "or HOLDFAST_ADMIN_URL and HOLDFAST_INGRESS_URL",
    )


def _with_token(url: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    given = dict(headers or {})
    meant = not _token_urls or url.rstrip("/") in {each.rstrip("/") for each in _token_urls}
    if _token and meant and not any(name.lower() == "authorization" for name in given):
        given["Authorization"] = f"Bearer {_token}"
    return given


class _EveryStatus(urllib.request.HTTPErrorProcessor):
    """Hand over the answer as it is. Following a redirect would send the token to whatever host it names."""

    def http_response(self, request: urllib.request.Request, response: http.client.HTTPResponse) -> Any:
        return response

    https_response = http_response


# A proxy of the environment is for the internet; nodes are in the local network.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _EveryStatus)


def _secure_opener() -> urllib.request.OpenerDirector:
    secure = urllib.request.HTTPSHandler(context=_trust())
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _EveryStatus, secure)


def _redirected(url: str, status: int, location: str | None) -> Failed:
    try:
        parts = urlsplit(location or "")
        where = normal_origin(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}")
    except ValueError:
        where = None
    to = f" to {where}" if where else ""
    return Failed(
        f"{url} answers with a redirect{to} ({status}), which is not followed: the token is for {url} alone",
        f"if {where or 'the other address'} is your cluster, use that address: --admin-url or --ingress-url",
    )


def _untrusted(url: str, error: ssl.SSLError) -> Failed:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Failed(
            f"the certificate of {url} is not trusted: {error.verify_message}",
            "name the file of the authority that signed it: --ca-file or HOLDFAST_CA_FILE",
        )
    if error.reason == "WRONG_VERSION_NUMBER":
        return Failed(f"{url} does not speak HTTPS", "use http:// in the URL")
    if "CERTIFICATE_REQUIRED" in (error.reason or ""):
        return _wants_certificate(url)
    return Failed(f"TLS with {url} failed: {error.reason or error}")


def _wants_certificate(url: str) -> Failed:
    return Failed(
        f"{url} ended the connection without an answer: most likely it wants a client certificate",
        "give --client-cert-file and --client-key-file; `holdfast cert client` makes them",
    )


def checked(answer: Response) -> Response:
    """The answer if it is a success; otherwise raises the node's error as an error of the command."""
    if answer.status < 400:
        return answer
    try:
        error = json.loads(answer.body)
        kind = Unanswered if answer.status == 503 else Failed
        raise kind(f"{error['message']} ({answer.status})", error.get("hint"), error.get("details"))
    except (ValueError, KeyError, TypeError):
        raise Failed(f"status {answer.status}: {answer.body[:300].decode(errors='replace')}") from None


def admin(url: str, method: str, where: str, *, parameters: Mapping[str, Any] | None = None, value: Any = None) -> Any:
    """JSON in, JSON out."""
    body = json.dumps(value).encode() if value is not None else (b"" if method in ("POST", "PUT") else None)
    headers = {"Content-Type": "application/json"} if value is not None else None
    return checked(ask(url, method, where, parameters=parameters, body=body, headers=headers)).json()
