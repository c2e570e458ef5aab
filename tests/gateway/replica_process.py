"""A replica that is a process of its own, so that it can die like one."""

import asyncio
import signal
import sys
from pathlib import Path

from tests.gateway.running import LIMIT

ROOT = Path(__file__).resolve().parents[2]
MODEL = "bench"


def chat_of(**wishes: int) -> dict[str, object]:
    """A streamed request that the replica answers as told: ``chunks``, ``gap_ms``, ``first_ms``."""
    text = " ".join(f"{name}={value}" for name, value in wishes.items())
    return {"model": MODEL, "messages": [{"role": "user", "content": f"[{text}]"}], "stream": True}


class ReplicaProcess:
    """Use as an async context manager; ``kill`` and ``start`` make it die and return."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._child: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "ReplicaProcess":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Start it; returns once it listens."""
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ops.bench.gateway_backend", str(self.port)), cwd=ROOT
        )
        async with asyncio.timeout(LIMIT):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return

    async def kill(self) -> None:
        """``kill -9``."""
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            await self._child.wait()
            self._child = None
