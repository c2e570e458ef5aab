"""Child processes of ``longleaf serve``: stopped by signal, never left behind."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Child:
    """One running part of the service."""

    name: str
    process: asyncio.subprocess.Process

    async def stop(self, grace_seconds: float) -> int:
        """Ask the process to drain (SIGTERM), kill it after ``grace_seconds``; its exit status."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), grace_seconds)
            except TimeoutError:
                self.kill()
        return await self.process.wait()

    def kill(self) -> None:
        """End the process at once."""
        if self.process.returncode is None:
            self.process.kill()


async def start_child(name: str, arguments: Sequence[str]) -> Child:
    """Start ``longleaf <arguments>``.

    The child gets a session of its own: a Ctrl-C at the terminal then reaches the parent alone,
    which stops the parts in the right order (gateway first) instead of all dying at once.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "longleaf",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    return Child(name, process)
