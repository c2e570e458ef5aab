"""What is measured on a GPU host, kept as soon as it is known."""

import json
import subprocess
from pathlib import Path
from typing import Any


class Record:
    """The measurements of one host, written to a file after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.document: dict[str, Any] = (
            json.loads(path.read_text()) if path.exists() else {"machine": _machine()}
        )

    def add(self, section: str, **entry: Any) -> None:
        """Append to a section, print it and write the file."""
        self.document.setdefault(section, []).append(entry)
        print(section, json.dumps(entry)[:400], flush=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.document, indent=1) + "\n")


def _machine() -> dict[str, str]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.check_output(command, text=True).splitlines()[0].split(", ")
    return {"gpu": name, "driver": driver}
