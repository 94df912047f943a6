"""Retry policies, and durations as people write them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta


def milliseconds(value: float | timedelta, what: str) -> int:
    """A duration given in seconds or as a timedelta."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= seconds < 1e11:
        raise ValueError(f"{what} must be a duration of at least zero (seconds or a timedelta), not {value!r}")
    return round(seconds * 1000)


@dataclass(frozen=True)
class RetryPolicy:
    """When failed work is retried. Durations are in seconds or timedeltas; None means no limit.

    When a limit is reached, a step (`ctx.run(..., retry=RetryPolicy(max_attempts=3))`) fails for good, and an invocation (the
    policy of a service or handler) pauses for an operator. Exceptions in `terminal` are never retried.
    """

    initial: float | timedelta = 0.1
    factor: float = 2.0
    max_interval: float | timedelta = 60.0
    max_attempts: int | None = None
    max_duration: float | timedelta | None = None
    jitter: float = 0.0  # adds up to this share of the interval
    terminal: tuple[type[Exception], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError("factor must be at least 1: intervals cannot shrink")
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError("max_attempts must be at least 1, or None for no limit")
        if not 0 <= self.jitter <= 1:
            raise ValueError("jitter must be between 0 and 1: it is a share of the interval")
        object.__setattr__(self, "_wire", self._to_wire())

    def _to_wire(self) -> list[int]:
        return [
            milliseconds(self.initial, "initial"),
            round(self.factor * 1000),
            milliseconds(self.max_interval, "max_interval"),
            self.max_attempts or 0,
            max(1, milliseconds(self.max_duration, "max_duration")) if self.max_duration is not None else 0,
            round(self.jitter * 1000),
        ]

    def wire(self) -> list[int]:
        """The policy as a RUN_FAILED frame carries it."""
        found: list[int] = self._wire  # type: ignore[attr-defined]
        return found

    def manifest(self) -> dict[str, int]:
        names = (
            "initial_ms", "factor_permille", "max_interval_ms", "max_attempts", "max_duration_ms", "jitter_permille",
        )  # fmt: skip
        return dict(zip(names, self.wire(), strict=True))
