"""Answers to commands are compared with their schemas, too."""

from tests.answers import answers, watched_answers

__all__ = ["answers", "watched_answers"]
