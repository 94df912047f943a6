"""What a node may set about the protocol of Holdfast. Tests shorten it."""

from __future__ import annotations

from typing import NamedTuple


class Settings(NamedTuple):
    #: A stream that is silent for this long is pinged. After half that time without an answer it is reported, and closed
    #: if a thread of the endpoint would answer even while its event loop is blocked.
    prompt_s: float = 5.0
    patience_s: float = 45.0  # Any other stream is closed after this much silence.
    fallback_s: float = 60.0  # After this long with single requests, a stream is tried again.
    requests_max: int = 200  # Attempts of a deployment at a time, if each is a request of its own.

    @property
    def silence_s(self) -> float:
        """A stream that is silent for this long was pinged without an answer."""
        return self.prompt_s * 1.5
