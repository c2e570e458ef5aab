"""Texts of known difficulty and any length, from what every Python installation holds.

``predictable`` counts; ``code`` strings modules of the standard library together; ``prose`` mixes
paragraphs of Python's reference, so that nothing can be recited. Each seed gives another text.
"""

import random
import sysconfig
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

_COUNTING = ("{i}, ", "{i}\n", "line {i}\n", "item {i}: ")
_MODULES = (
    *("argparse", "ast", "calendar", "configparser", "csv", "datetime", "difflib", "doctest"),
    *("fractions", "ftplib", "inspect", "mailbox", "optparse", "pathlib", "pickle", "pydoc"),
    *("shutil", "smtplib", "socketserver", "statistics", "subprocess", "tarfile", "textwrap"),
    *("turtle", "typing", "uuid", "zipfile"),
)


def predictable(characters: int, seed: int) -> str:
    """Numbers that count up, in one of a few forms."""
    form = _COUNTING[seed % len(_COUNTING)]
    pieces, length, number = [], 0, 1 + 13 * seed
    while length < characters:
        pieces.append(form.format(i=number))
        length += len(pieces[-1])
        number += 1
    return "".join(pieces)


def code(characters: int, seed: int) -> str:
    """Python source; it ends in the middle of a module."""
    return _mixed(_sources(), "\n\n", characters, seed)


def prose(characters: int, seed: int) -> str:
    """English, in paragraphs that do not follow one another."""
    return _mixed(_paragraphs(), "\n\n", characters, seed)


REFERENCE = "predictable"
"""What any drafter should get right, and others are compared with."""

TEXTS: Mapping[str, Callable[[int, int], str]] = {
    REFERENCE: predictable,
    "code": code,
    "prose": prose,
}
"""Text of about so many characters, by kind."""


def _mixed(parts: tuple[str, ...], between: str, characters: int, seed: int) -> str:
    order = random.Random(seed)
    text = ""
    while len(text) < characters:
        text += between.join(order.sample(parts, len(parts))) + between
    return text[:characters]


@cache
def _sources() -> tuple[str, ...]:
    library = Path(sysconfig.get_path("stdlib"))
    functions: list[str] = []
    for name in _MODULES:
        path = library / f"{name}.py"
        if path.is_file():
            functions += path.read_text(encoding="utf-8").split("\n\n\n")
    return tuple(part for part in functions if len(part) > 400)


@cache
def _paragraphs() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics))
    parts = (" ".join(part.split()) for part in whole.split("\n\n"))
    return tuple(part for part in parts if len(part) > 200 and part.count(" ") > 30)
