"""Random numbers for values that must be unique: ids, nonces, names."""

from __future__ import annotations

import os
import secrets
from random import Random


class Entropy:
    """The entropy of the operating system."""

    def bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def bits(self, count: int) -> int:
        return secrets.randbits(count)

    def token(self, count: int) -> str:
        """`count` random bytes, as text that is valid in a file name."""
        return secrets.token_hex(count)

    def generator(self) -> Random:
        """A new generator, for values that may repeat."""
        return Random()
