"""API keys: kept as SHA-256 digests, read again when their file changes."""

import asyncio
import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from longleaf.gateway.files import file_version
from longleaf.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_OPTION = re.compile(r"(requests_per_minute|tokens_per_minute|priority)=(-?\d{1,9})")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An accepted key: what it may do. Holds no key."""

    id: str
    """The start of its digest, in hex."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority: int = 0
    """Priority of its requests; a request may ask for less."""

    @property
    def limited(self) -> bool:
        """Whether it may not use as much as it likes."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """The accepted API keys, by digest."""

    def __init__(self, keys: Mapping[bytes, ApiKey]) -> None:
        self._keys = dict(keys)

    @classmethod
    def load(cls, path: Path) -> "KeyRing":
        """Read a key file: one key a line, plain or as ``sha256:<hex>``, then its options, such as
        ``requests_per_minute=60 tokens_per_minute=200000 priority=1``; ``#`` starts a comment.

        ``ValueError`` (with file and line, never the key) for a file that gives no usable key.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_key_file {path}: {error}") from error
        keys: dict[bytes, ApiKey] = {}
        lines: dict[bytes, int] = {}
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.strip()
            if line and not line.startswith("#"):
                try:
                    digest, key = _parse(line)
                    if digest in lines:
                        raise ValueError(f"the key of line {lines[digest]} again")
                except ValueError as error:
                    raise ValueError(f"api_key_file {path}, line {number}: {error}") from None
                keys[digest], lines[digest] = key, number
        if not keys:
            raise ValueError(f"api_key_file {path} holds no key")
        return cls(keys)

    def find(self, authorization: str) -> ApiKey | None:
        """The key that an ``Authorization`` header carries, if it is accepted.

        Looked up by digest: the time it takes tells nothing about any key.
        """
        scheme, _, key = authorization.partition(" ")
        found = self._keys.get(_digest(key.strip()))
        return found if scheme.lower() == "bearer" else None

    def replace(self, other: "KeyRing") -> None:
        """Accept the keys of ``other`` from now on; what runs under another may end."""
        self._keys = other._keys


async def follow_key_file(
    keys: KeyRing, path: Path, interval: float, metrics: GatewayMetrics
) -> None:
    """Read ``path`` again whenever it has changed, for ever. A file that cannot be used leaves the
    keys as they are, with an error in the log.
    """
    metrics.key_file_up.set(1)
    seen = file_version(path)
    while True:
        await asyncio.sleep(interval)
        version = file_version(path)
        if version == seen:
            continue
        seen = version
        try:
            keys.replace(KeyRing.load(path))
        except ValueError as error:
            metrics.key_file_up.set(0)
            logger.error("key file not read again", extra={"fields": {"why": str(error)}})
        else:
            metrics.key_file_up.set(1)
            logger.info("key file read again", extra={"fields": {"file": str(path)}})


def _parse(line: str) -> tuple[bytes, ApiKey]:
    word, *options = line.split()
    if word.startswith("sha256:"):
        match = _DIGEST.fullmatch(word)
        if match is None:
            raise ValueError("sha256: needs 64 hex digits")
        digest = bytes.fromhex(match.group(1))
    elif not word.isascii():
        raise ValueError("a key must be ASCII: no header carries another one unchanged")
    else:
        digest = _digest(word)
    given: dict[str, int] = {}
    for option in options:
        match = _OPTION.fullmatch(option)
        if match is None:
            raise ValueError(
                "a key holds no blanks; after it only requests_per_minute=, tokens_per_minute= and "
                "priority= may come, each with a whole number"
            )
        given[match.group(1)] = int(match.group(2))
    for name in ("requests_per_minute", "tokens_per_minute"):
        if given.get(name, 1) < 1:
            raise ValueError(f"{name} must be at least 1")
    return digest, ApiKey(digest.hex()[:16], **given)
