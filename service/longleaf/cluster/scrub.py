"""Takes out what may be a secret: of text, and of Kubernetes' objects.

What is not known to be harmless goes: values of environment and annotations, and whatever stands
behind a name that sounds like a key, or looks like one by its own form.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REMOVED = "(removed)"
_NAME = (
    r"[\w.-]*(?:key|token(?!s|iz)|secret|passw|passphrase|pwd|credential"
    r"|\bpass(?=[\"'\\]*\s*[=:]))[\w.-]*"
)
_FLAG = re.compile(rf"--?{_NAME}|-u|--user|--proxy-user", re.I)
_NEXT_FLAG = re.compile(r"--[a-z][\w-]*(=.*)?", re.I | re.S)
_QUOTED = r"(?P<quote>\\?[\"'])(?P<said>(?:(?!(?P=quote))(?:\\.|[^\\]))*)"
_PAIR = re.compile(
    rf"(?P<name>(?<![\w.-]){_NAME}(?:\\?[\"'])?\s*[=:]\s*)"
    rf"(?:{_QUOTED}|(?!true\b|false\b|null\b)[^\s\"'\\,;&{{}}\[\]]+)",
    re.I,
)
_HEADER = re.compile(r"(\bauthorization(?:\\?[\"'])?\s*[=:]\s*(?:\\?[\"'])?)[^\"'\\\n]+", re.I)
_USER = re.compile(r"((?<!\S)(?:-u|--user|--proxy-user)[\s=]*[\"']?)[^\s\"':]+:[^\s\"']+")
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/@\"']*(?::[^\s/@\"']*)?@", re.I)
_PEM = re.compile(r"-----BEGIN [^-]+-----.*?(?:-----END [^-]+-----|\Z)", re.S)
_BARE = re.compile(
    r"\b(?:(?:Bearer|Basic)\s+(?=\S*[\d=A-Z_-])[\w.~+/=-]{6,}"
    r"|(?:sk-|hf_|nvapi-|gh[opusr]_|github_pat_|glpat-|xox[a-z]-|eyJ|AIza)[\w.~+/=-]{6,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{12,})"
)
"""Credentials that tell by their first letters what they are."""

_MAPS = ("annotations", "volumeAttributes", "options")
_LISTS = ("env", "httpHeaders")


def _kept_quotes(found: re.Match[str]) -> str:
    return f"{found['name']}{found['quote'] or ''}{REMOVED}"


def scrubbed(text: str) -> str:
    """Text without what looks like a key."""
    text = _PEM.sub(REMOVED, text)
    text = _URL.sub(rf"\1{REMOVED}@", text)
    text = _HEADER.sub(rf"\1{REMOVED}", text)
    text = _USER.sub(rf"\1{REMOVED}", text)
    return _BARE.sub(REMOVED, _PAIR.sub(_kept_quotes, text))


def cleaned(value: Any) -> Any:
    """A copy of a JSON object without what may hold a secret."""
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    if isinstance(value, str):
        return scrubbed(value)
    if not isinstance(value, Mapping):
        return value
    return {name: _field(name, item) for name, item in value.items() if name != "managedFields"}


def _field(name: str, item: Any) -> Any:
    if name in _MAPS and isinstance(item, Mapping):
        return dict.fromkeys(item, REMOVED)
    if name in _LISTS and isinstance(item, list):
        return [{**one, "value": REMOVED} if "value" in one else one for one in cleaned(item)]
    if name in ("args", "command") and isinstance(item, list):
        return list(_arguments([str(one) for one in item]))
    if name == "path" and isinstance(item, str):
        path, query, _ = item.partition("?")
        return scrubbed(path) + (query and f"?{REMOVED}")
    return cleaned(item)


def _arguments(words: Sequence[str]) -> Iterator[str]:
    """``--key=value``, ``--key value`` and KEY=value within scripts lose their values."""
    hidden = False
    for word in words:
        if hidden and not _NEXT_FLAG.fullmatch(word):
            yield REMOVED
            hidden = False
            continue
        hidden = _FLAG.fullmatch(word) is not None
        yield scrubbed(word)
