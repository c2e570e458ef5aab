"""The verdict of one check."""

from dataclasses import dataclass


class CheckError(Exception):
    """What is wrong in one sentence, and what to do."""

    def __init__(self, sentence: str, fix: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.fix = fix


class NotAskedError(Exception):
    """There is nothing to hold this check to; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """passed: None where the check was left out; said: what was found, or why it was left out."""

    name: str
    passed: bool | None
    said: str
    fix: str | None = None
