"""The pages of the admin API for people: the overview, and where they sign in.

The pages are HTML of ours and files of console/. They have no scripts or styles of their own and load nothing from elsewhere:
the policy that goes with every answer forbids it.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any, Final

from holdfast import __version__, console
from holdfast.cluster.admin.parameters import AdminRequest, json_answer, read_body
from holdfast.cluster.admin.routes import ROUTES
from holdfast.cluster.admin.views import show_time
from holdfast.cluster.config import Config
from holdfast.cluster.errors import BadRequest, Conflict, NotFound
from holdfast.cluster.http.access import Principal
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.http.sessions import Sessions
from holdfast.cluster.registry.registry import Registry
from holdfast.statemachine.access import READ, permits

HTML: Final = "text/html; charset=utf-8"
SESSION_BYTES_MAX: Final = 4096  # A token and some JSON around it.
#: Files that anybody may have, whether signed in or not.
FILES: Final = {"console.css": "text/css; charset=utf-8", "session.js": "text/javascript; charset=utf-8"}


class Pages:
    def __init__(self, config: Config, registry: Registry, sessions: Sessions | None) -> None:
        self._config = config
        self._registry = registry
        self._sessions = sessions
        folder = Path(console.__file__).parent
        self._files = {name: (folder / name).read_bytes() for name in FILES}

    async def on_page(self, request: AdminRequest) -> Answer:
        principal = request.request.principal
        content = self._overview(principal) if permits(principal.roles, READ) else self._sign_in(principal)
        text = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Holdfast</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<link rel="stylesheet" href="/console/console.css"><script src="/console/session.js" defer></script>'
            f"<main>{content}</main></html>"
        )
        return Answer(200, text.encode(), HTML)

    async def on_console_file(self, request: AdminRequest) -> Answer:
        name = request.path["name"]
        if name not in self._files:
            raise NotFound(f"there is no file {name!r:.80}", f"there are: {', '.join(FILES)}")
        return Answer(200, self._files[name], FILES[name])

    def _overview(self, principal: Principal) -> str:
        rows = "".join(
            f"<tr><td>{route.method}<td><code>{html.escape(route.path)}</code><td>{html.escape(route.summary)}"
            for route in ROUTES
        )
        names = ", ".join(html.escape(name) for name in sorted(self._registry.state.offers)) or "none registered yet"
        return (
            f"<header><h1>Holdfast {__version__}</h1>{self._signed_in(principal)}</header>"
            f"<p>Node <b>{html.escape(self._config.node)}</b> of cluster <b>{html.escape(self._config.cluster)}</b>. "
            f"Services: {names}.</p>"
            '<p><a href="/invocations">invocations</a> · <a href="/deployments">deployments</a> · '
            '<a href="/services">services</a> · <a href="/cluster">cluster</a> · <a href="/metrics">metrics</a> · '
            '<a href="/openapi.json">openapi.json</a></p>'
            f"<p>In a terminal: <code>holdfast invocations list</code>.</p><table>{rows}</table>"
        )

    def _signed_in(self, principal: Principal) -> str:
        if self._sessions is None:
            return ""
        return (
            f"<p>Signed in as <b>{html.escape(principal.name)}</b> ({html.escape(', '.join(principal.roles))}) "
            '<button id="sign-out" type="button">Sign out</button></p>'
        )

    def _sign_in(self, principal: Principal) -> str:
        """Says nothing about the node to strangers but that it is one."""
        note = ""
        if principal.roles:
            note = (
                f'<p id="signed-in">The token of {html.escape(principal.name)} may not see this page: it needs the role '
                'read. <button id="sign-out" type="button">Sign out</button></p>'
            )
        return (
            f'<section class="card"><h1>Holdfast</h1>{note}<form id="sign-in"><label for="token">Token</label>'
            '<input id="token" type="password" autocomplete="off" spellcheck="false" placeholder="hf_…" required autofocus>'
            '<button type="submit">Sign in</button><p id="problem" role="alert"></p></form>'
            "<p>An operator creates one: <code>holdfast token create NAME --role read</code></p></section>"
        )

    # -- sessions ----------------------------------------------------------------------------------------------------

    async def on_session(self, request: AdminRequest) -> Answer:
        return json_answer(200, _show(request.request.principal))

    async def on_sign_in(self, request: AdminRequest) -> Answer:
        if self._sessions is None:
            raise Conflict("this node asks for no tokens, so there is nothing to sign in to")
        given = await read_body(request, {"token"}, bytes_max=SESSION_BYTES_MAX)
        token = given.get("token")
        if not isinstance(token, str) or not token:
            raise BadRequest('"token" is missing', 'send JSON as in {"token": "hf_..."}')
        session = await self._sessions.sign_in(token, secure=self._is_secure(request))
        request.request.principal = session.principal
        shown = {**_show(session.principal), "expires_at": show_time(session.expires_ms)}
        return json_answer(200, shown)._replace(headers={"Set-Cookie": session.cookie})

    async def on_sign_out(self, request: AdminRequest) -> Answer:
        if self._sessions is None:
            return json_answer(200, {"signed_in": False})
        if request.request.principal.is_stranger:
            request.request.action = ""  # There is no session to end.
        cookie = await self._sessions.sign_out(request.request.headers, secure=self._is_secure(request))
        return json_answer(200, {"signed_in": False})._replace(headers={"Set-Cookie": cookie})

    def _is_secure(self, request: AdminRequest) -> bool:
        """Whether the browser reaches us over TLS, maybe through a proxy. The origin was compared with ours before."""
        if self._config.admin_tls_cert is not None:
            return True
        return request.request.headers.get("Origin", "").startswith("https://")


def _show(principal: Principal) -> dict[str, Any]:
    return {
        "signed_in": bool(principal.roles),
        "id": principal.id or None,
        "name": principal.name,
        "roles": list(principal.roles),
        "services": sorted(principal.services),
    }
