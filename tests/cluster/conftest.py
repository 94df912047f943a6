"""Fixtures of tests with a shared store."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cluster.values import shared_store
from tests.answers import answers, watched_answers
from tests.cluster.harness import PATIENCE_S
from tests.cluster.stored_values import Place

__all__ = ["answers", "watched_answers"]


@pytest.fixture
def store(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine must not count as a store that does not answer."""
    monkeypatch.setattr(shared_store, "PUT_S", PATIENCE_S)
    monkeypatch.setattr(shared_store, "GET_S", PATIENCE_S)
