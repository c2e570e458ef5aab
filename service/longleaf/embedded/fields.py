"""Reads JSON objects field by field; every complaint names the file, the field and the limit."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A model's config is missing a field, holds a bad value or asks for what is not supported."""


class Fields:
    """One JSON object. Each getter raises ConfigError for a field that it cannot accept."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def error(self, name: str, why: str) -> ConfigError:
        """The error to raise about field ``name``."""
        return ConfigError(f"{self._source}: {name} {why}")

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it stands, or ``default``."""
        return self._values.get(name, default)

    def object(self, name: str) -> "Fields":
        """A nested object."""
        value = self._values.get(name)
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {value!r}")
        return Fields(value, f"{self._source}: {name}")

    def integer(self, name: str, least: int = 1, default: int | None = None) -> int:
        """An integer of at least ``least``; null counts as missing."""
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, got {value!r}")
        if value < least:
            raise self.error(name, f"must be at least {least}, got {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number; null counts as missing."""
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, f"must be a number, got {value!r}")
        if not value > 0 or value == float("inf"):
            raise self.error(name, f"must be positive and finite, got {value}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}")
        return value

    def integers(self, name: str, limit: int) -> tuple[int, ...]:
        """One integer or a list of at least one, each in 0..limit-1."""
        value = self._values.get(name)
        items = value if isinstance(value, list) else [value]
        if not items:
            raise self.error(name, "must not be empty")
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.error(name, f"must hold integers, got {value!r}")
            if not 0 <= item < limit:
                raise self.error(name, f"must lie in 0..{limit - 1}, got {item}")
        return tuple(items)

    def only(self, name: str, supported: Any, why: str) -> None:
        """Refuse a present field whose value is not the one this engine supports."""
        value = self._values.get(name, supported)
        if value != supported:
            raise self.error(name, f"is {value!r}: {why}")


def read_object(path: Path) -> Mapping[str, Any]:
    """The JSON object that a file holds. Raises ConfigError naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return values
