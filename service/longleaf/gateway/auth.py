"""API keys: kept as SHA-256 digests, compared in constant time."""

import hashlib
import hmac
import re
from pathlib import Path

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """The accepted API keys. Holds no key, only digests."""

    def __init__(self, digests: frozenset[bytes]) -> None:
        self._digests = tuple(sorted(digests))

    @classmethod
    def load(cls, path: Path) -> "KeyRing":
        """Read a key file: one key a line, plain or as ``sha256:<hex>``; ``#`` starts a comment.

        ``ValueError`` (with file and line, never the key) for a file that gives no usable key.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_key_file {path}: {error}") from error
        digests = set()
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.strip()
            if not line or line.startswith("#"):
                continue
            if line.startswith("sha256:"):
                match = _DIGEST.fullmatch(line)
                if match is None:
                    raise ValueError(
                        f"api_key_file {path}, line {number}: sha256: needs 64 hex digits"
                    )
                digests.add(bytes.fromhex(match.group(1)))
            elif any(character.isspace() for character in line):
                raise ValueError(f"api_key_file {path}, line {number}: a key holds no blanks")
            else:
                digests.add(_digest(line))
        if not digests:
            raise ValueError(f"api_key_file {path} holds no key")
        return cls(frozenset(digests))

    def accepts(self, authorization: str) -> bool:
        """Whether an ``Authorization`` header carries an accepted bearer key."""
        scheme, _, key = authorization.partition(" ")
        presented = _digest(key.strip())
        known = False
        for digest in self._digests:  # all of them: the time must not tell which one matched
            known |= hmac.compare_digest(digest, presented)
        return known and scheme.lower() == "bearer"
