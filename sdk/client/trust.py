"""Which certificates a client of the ingress trusts."""

from __future__ import annotations

import os
import ssl


def context_for(ca: str | os.PathLike[str] | None) -> ssl.SSLContext | None:
    """Trust for the authorities in this file and no others. None: for those of the system. Raises ValueError."""
    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca)
    except (ssl.SSLError, ValueError):
        raise ValueError(f"ca: {os.fspath(ca)} is not a certificate in PEM") from None
    except OSError as error:
        raise ValueError(f"ca: {os.fspath(ca)}: {error.strerror or error}") from None


def is_distrust(error: BaseException) -> bool:
    """Whether a node showed a certificate that is not trusted: to ask it again does not help."""
    found = getattr(error, "certificate_error", error)  # aiohttp wraps it.
    return isinstance(found, ssl.SSLCertVerificationError)
