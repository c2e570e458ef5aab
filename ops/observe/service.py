"""The service on this machine, once it is ready under load and probed, until it ends."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import click

from longleaf.serve.command import MODEL_NAME
from ops.observe.load import Load, run_until

_PROBE = (*("--contexts", "300,1500", "--repeats", "1", "--max-tokens", "32", "--every", "600"),)
"""Both contexts are a bucket each of the tiny model; a run takes seconds of a laptop."""


@dataclass(frozen=True, slots=True)
class Service:
    """Ports on 127.0.0.1; ``probe_port``: of the watching probe's metrics, None without one."""

    port: int
    metrics_port: int
    engine_port: int
    probe_port: int | None
    load: bool

    async def run(self, directory: Path) -> int:
        """Run ``longleaf serve`` until it ends, or at Ctrl-C; its exit status. Logs of the probe
        are in ``directory``.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "longleaf", "serve", "--port", str(self.port)),
            *("--metrics-port", str(self.metrics_port), "--engine-port", str(self.engine_port)),
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        stopped = asyncio.create_task(stop.wait())
        ended = asyncio.create_task(process.wait())
        ended.add_done_callback(lambda _: stop.set())
        line = asyncio.create_task(process.stdout.readline())
        await asyncio.wait({stopped, ended, line}, return_when=asyncio.FIRST_COMPLETED)
        if line.done():
            click.echo(line.result().decode(), nl=False)
        if not stop.is_set():
            async with self._probing(directory / "probe.log"):
                if self.load:
                    await run_until(Load(self._url, MODEL_NAME, width=2), stop)
                await stopped
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        return await ended

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def _probing(self, log: Path) -> AsyncIterator[None]:
        """Run ``longleaf probe watch`` meanwhile."""
        if self.probe_port is None:
            yield
            return
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "longleaf", "probe", "watch", "--url", self._url),
                *("--metrics-url", f"http://127.0.0.1:{self.engine_port}/metrics", *_PROBE),
                *("--port", str(self.probe_port)),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()
