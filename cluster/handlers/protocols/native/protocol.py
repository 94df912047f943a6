"""Holdfast's own protocol as one object: the HTTP sessions that discovery, streams and requests share."""

from __future__ import annotations

from typing import Final

import aiohttp

from holdfast.cluster.errors import BadRequest, EndpointFailed
from holdfast.cluster.handlers.dispatch import Station
from holdfast.cluster.handlers.protocols.interface import Means
from holdfast.cluster.handlers.protocols.native.connect import NativeConnector
from holdfast.cluster.handlers.protocols.native.dialing import HINT, Dialing, explain, refusal
from holdfast.cluster.handlers.protocols.native.manifest import MANIFEST_BYTES_MAX, NotAManifest, read_manifest
from holdfast.cluster.handlers.protocols.native.settings import Settings
from holdfast.cluster.handlers.protocols.native.signing import Signer, refusal_in
from holdfast.cluster.registry.offer import Offer

DISCOVER_TIMEOUT_S: Final = 10.0


class _NoEndpoint(Exception):
    """What answered is no Holdfast endpoint."""


class Native:
    def __init__(self, means: Means | None = None, settings: Settings | None = None) -> None:
        self._means = means = means or Means()
        self._settings = settings or Settings()
        self._signer = Signer(means.keys)
        self._work = Dialing(
            means.addresses,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=means.connect_s),
            auto_decompress=False,
        )
        self._discovery = Dialing(means.addresses, timeout=aiohttp.ClientTimeout(total=DISCOVER_TIMEOUT_S))

    def connector(self, station: Station) -> NativeConnector:
        return NativeConnector(
            station, self.session, self._signer, settings=self._settings, connect_s=self._means.connect_s
        )

    def session(self, uri: str) -> aiohttp.ClientSession:
        """That attempts go through."""
        return self._work.session(uri)

    async def close(self) -> None:
        await self._work.close()
        await self._discovery.close()

    async def discover(self, uri: str) -> Offer:
        """Each error says what to look at.

        A client that may register deployments must not learn from the errors what listens at addresses that only nodes can
        reach. So everything that is not a Holdfast endpoint gets one message; the reason is in `detail`, for administrators.
        """
        where = f"{uri}/discover"
        try:
            return await self._discover(uri, where)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, NotAManifest, _NoEndpoint) as error:
            # ValueError: a server that sends what is not HTTP, or a host name that cannot be encoded.
            if refusal(error) is not None:
                raise BadRequest(f"{uri}: {explain(error)}", HINT) from None
            is_late = isinstance(error, TimeoutError)
            why = f"no answer within {DISCOVER_TIMEOUT_S:.0f} seconds" if is_late else explain(error)
            raise EndpointFailed(
                f"no Holdfast endpoint answers at {uri}",
                "are the handlers running there, and can the nodes reach that address? The log of the node has the reason",
                detail=f"GET {where}: {why}",
            ) from None

    async def _discover(self, uri: str, where: str) -> Offer:
        session = self._discovery.session(where)
        headers = {"Accept": "application/json", **self._signer.headers("GET", uri, "/discover")}
        async with session.get(where, headers=headers, allow_redirects=False) as response:
            refused = refusal_in(response.status, response.headers)
            if refused is not None:
                raise EndpointFailed(
                    f"{uri}: {refused}", "give it the public key of this cluster, which `holdfast identity show` prints"
                )
            if 300 <= response.status < 400:
                location = response.headers.get("Location", "")
                raise _NoEndpoint(
                    f"it answered {response.status} and redirects to {location!r:.200}, and redirects are not followed: "
                    "register the address itself"
                )
            if response.status != 200:
                raise _NoEndpoint(f"it answered {response.status} instead of 200: check the uri and its path")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MANIFEST_BYTES_MAX:
                    raise NotAManifest("$", f"it is larger than {MANIFEST_BYTES_MAX} bytes")
        return read_manifest(bytes(body))
