"""The web console for browsers: its files, and the sessions of its users.

The console is static files of console/, which show what the admin API answers. So the files are public: they say nothing about
this node, and everything else needs a role. They load nothing from elsewhere, and have no scripts or styles inside HTML: the
policy that goes with every answer forbids both.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

from holdfast import __version__, console
from holdfast.cluster.admin.choices import FILES
from holdfast.cluster.admin.parameters import AdminRequest, json_answer, read_body
from holdfast.cluster.admin.shapes.access import Session, SignedOut, SignIn
from holdfast.cluster.config import Config
from holdfast.cluster.errors import BadRequest, Conflict, NotFound
from holdfast.cluster.http.access import Principal
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.http.sessions import Sessions
from holdfast.cluster.times import show_time
from holdfast.statemachine.access import READ, permits

SESSION_BYTES_MAX: Final = 4096  # A token and some JSON around it.
INDEX: Final = "index.html"
KEPT: Final = "private, max-age=31536000, immutable"
#: The files that are served, by the end of their name. Others (Python, licences, notes) stay in the folder.
TYPES: Final = {end: f"{kind}; charset=utf-8" if kind.startswith("text/") else kind for end, kind in FILES.items()}


class File(NamedTuple):
    content: bytes
    content_type: str
    etag: str


def read_files(folder: Path) -> dict[str, File]:
    """Every file of the console by its path in the folder: `app.js`, `pages/cluster.js`."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in TYPES and path.is_file():
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[path.relative_to(folder).as_posix()] = File(content, TYPES[path.suffix], etag)
    return files


def versioned(files: dict[str, File]) -> tuple[str, dict[str, File]]:
    """The version of all files together, and the files with its name in the addresses of the first page."""
    version = hashlib.sha256("".join(f"{name}{file.etag}" for name, file in files.items()).encode()).hexdigest()[:16]
    content = files[INDEX].content.replace(b'="/console/', f'="/console/{version}/'.encode())
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return version, {**files, INDEX: files[INDEX]._replace(content=content, etag=etag)}


class Pages:
    def __init__(self, config: Config, sessions: Sessions | None) -> None:
        self._config = config
        self._sessions = sessions
        self._version, self._files = versioned(read_files(Path(console.__file__).parent))

    async def on_page(self, request: AdminRequest) -> Answer:
        return self._file(request, INDEX)

    async def on_console_file(self, request: AdminRequest) -> Answer:
        return self._file(request, request.path["name"])

    async def on_console_folder(self, request: AdminRequest) -> Answer:
        folder, name = request.path["folder"], request.path["name"]
        if f"{folder}/{name}" not in self._files and name in self._files:
            return self._file(request, name, folder)
        return self._file(request, f"{folder}/{name}")

    async def on_console_version(self, request: AdminRequest) -> Answer:
        return self._file(request, f"{request.path['folder']}/{request.path['name']}", request.path["version"])

    def _file(self, request: AdminRequest, name: str, version: str = "") -> Answer:
        """With our version in its address, a file never changes. A page that a node of another release served asks for
        files with that node's version: they are ours, and not to be kept."""
        file = self._files.get(name)
        if file is None:
            raise NotFound(f"the console has no file {name!r:.80}", "open / for the console")
        # Browsers ask each time whether their first page is current, so a new release is seen at once.
        headers = {"ETag": file.etag, "Cache-Control": KEPT if version == self._version else "no-cache"}
        known = request.request.headers.get("If-None-Match", "")
        if file.etag in (each.strip().removeprefix("W/") for each in known.split(",")):
            return Answer(304, b"", file.content_type, headers=headers)
        return Answer(200, file.content, file.content_type, headers=headers)

    # -- sessions ----------------------------------------------------------------------------------------------------

    async def on_session(self, request: AdminRequest) -> Answer:
        return json_answer(200, self._show(request.request.principal))

    async def on_sign_in(self, request: AdminRequest) -> Answer:
        if self._sessions is None:
            raise Conflict("this node asks for no tokens, so there is nothing to sign in to")
        given = await read_body(request, SignIn, bytes_max=SESSION_BYTES_MAX)
        token = given.get("token")
        if not isinstance(token, str) or not token:
            raise BadRequest('"token" is missing', 'send JSON as in {"token": "hf_..."}')
        session = await self._sessions.sign_in(token, secure=self._is_secure(request))
        request.request.principal = session.principal
        shown: Session = {**self._show(session.principal), "expires_at": show_time(session.expires_ms)}
        return json_answer(200, shown)._replace(headers={"Set-Cookie": session.cookie})

    async def on_sign_out(self, request: AdminRequest) -> Answer:
        signed_out: SignedOut = {"signed_in": False}
        if self._sessions is None:
            return json_answer(200, signed_out)
        if request.request.principal.is_stranger:
            request.request.action = ""  # There is no session to end.
        cookie = await self._sessions.sign_out(request.request.headers, secure=self._is_secure(request))
        return json_answer(200, signed_out)._replace(headers={"Set-Cookie": cookie})

    def _is_secure(self, request: AdminRequest) -> bool:
        """Whether the browser reaches us over TLS, maybe through a proxy. The origin was compared with ours before."""
        if self._config.admin_tls_cert is not None:
            return True
        return request.request.headers.get("Origin", "").startswith("https://")

    def _show(self, principal: Principal) -> Session:
        shown: Session = {
            "signed_in": bool(principal.roles),
            "id": principal.id or None,
            "name": principal.name,
            "roles": list(principal.roles),
            "services": sorted(principal.services),
            "asks_for_tokens": self._sessions is not None,
        }
        if permits(principal.roles, READ):  # Strangers learn nothing about the node.
            shown["node"], shown["cluster"] = self._config.node, self._config.cluster
            shown["version"] = __version__
        return shown
