"""Whether a model's weight files are all there, and whole.

Format: https://huggingface.co/docs/safetensors: eight bytes of the header's length, the header as
JSON with the offsets of every tensor, the tensors.
"""

import json
import struct
from pathlib import Path, PurePosixPath

from longleaf.probes.preflight.verdict import CheckError

INDEX = "model.safetensors.index.json"
_LENGTH = struct.Struct("<Q")
_AGAIN = "fetch it again: an interrupted download leaves files out, or ends them early"
_MOST_HEADER = 100_000_000
"""Bytes of a header: the format's own limit."""


def weight_files(directory: Path, what: str) -> int:
    """Bytes of a model's weights; ``CheckError`` where a file is missing or ends early."""
    names = _indexed(directory, what)
    files = [directory / name for name in names] or sorted(directory.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        some = f"{len(missing)} of {len(files)} weight files, {missing[0]} first" if files else ""
        raise CheckError(
            f"the {what}'s {directory} lacks {some or 'weight files (*.safetensors)'}", _AGAIN
        )
    return sum(_whole(path, what) for path in files)


def _indexed(directory: Path, what: str) -> list[str]:
    """Names of the files in an index; empty where there is none."""
    path = directory / INDEX
    if not path.exists():
        return []
    try:
        named = json.loads(path.read_text())["weight_map"].values()
        names = sorted({str(PurePosixPath(one)) for one in named})
        if not names:
            raise ValueError("it names no file")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise CheckError(f"the {what}'s {path} cannot be read ({said})", _AGAIN) from error
    for name in names:
        if "/" in name:
            raise CheckError(
                f"the {what}'s {path} names {name}, outside of the model's directory", _AGAIN
            )
    return names


def _whole(path: Path, what: str) -> int:
    """Bytes of a file, which its own header holds it to."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > min(size, _MOST_HEADER):
                raise ValueError(f"its header would take {length} bytes")
            header = json.loads(file.read(length))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        expected = _LENGTH.size + length + max(ends, default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise CheckError(
            f"the {what}'s {path} is no whole safetensors file, at {size} bytes ({error})", _AGAIN
        ) from error
    if size != expected:
        raise CheckError(
            f"the {what}'s {path} has {size} bytes, its header tells of {expected}", _AGAIN
        )
    return size
