"""Numbers and times as people read them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """1 failed attempt, 2 failed attempts."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def utc(at_ms: int) -> str:
    """For people: 2026-11-17 05:57:09 UTC. (Days to a date as in Howard Hinnant's civil_from_days.)"""
    days, rest_ms = divmod(at_ms, 86_400_000)
    era, day = divmod(days + 719_468, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5 - 1
    month = month + 3 if month < 10 else month - 9
    seconds = rest_ms // 1000
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{year + era * 400 + (month <= 2)}-{month:02}-{day:02} {clock} UTC"
