"""A pool of worker processes: started when needed, replaced when they die or hang."""

import asyncio
import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from longleaf.gateway.prompts.worker import ANSWER, JOB

logger = logging.getLogger(__name__)

SHORT_BYTES = 256 * 1024
_RETIRING_BYTES = 16 * 2**20
"""After a body of that size a process ends: parsed, it took twenty times as much, and Python keeps
most of it."""
_END_SECONDS = 5.0


class WorkerError(Exception):
    """Workers died, or one took too long, over this job."""


class PoolFullError(Exception):
    """As many jobs wait as may. ``retry_after``: seconds until they should be done."""

    def __init__(self, limit: str, retry_after: float) -> None:
        super().__init__(f"No more than {limit} may wait to have their tokens counted.")
        self.retry_after = retry_after


class _Process:
    """One worker process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(cls) -> "_Process":
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "longleaf.gateway.prompts.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(process)

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as is known."""
        return self._process.returncode is None

    async def ask(self, header: bytes, body: bytes) -> bytes:
        try:
            self._stdin.write(JOB.pack(len(header), len(body)) + header)
            self._stdin.write(body)
            await self._stdin.drain()
            (length,) = ANSWER.unpack(await self._stdout.readexactly(ANSWER.size))
            return await self._stdout.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerError(f"a tokenizer worker died: {error}") from error

    async def end(self, kill: bool) -> None:
        """Let it finish, or kill it, and wait until it is gone."""
        self._stdin.close()
        try:
            if not kill:
                async with asyncio.timeout(_END_SECONDS):
                    await self._process.wait()
        except TimeoutError:
            kill = True
        if kill and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class WorkerPool:
    """Runs jobs on at most ``size`` processes. Of several, one is left to short jobs, so that
    nobody's short prompt waits for a long one. ``close`` ends them.

    At most ``most_waiting`` jobs wait, with bodies of ``most_bytes`` together.
    """

    def __init__(
        self,
        size: int,
        timeout: float,
        most_waiting: int = 1024,
        most_bytes: int = 256 * 2**20,
    ) -> None:
        self._size = size
        self._most_waiting = most_waiting
        self._most_bytes = most_bytes
        self._waiting = self._waiting_bytes = 0
        self._job_seconds: float | None = None
        """Of a job, lately."""
        self._timeout = timeout
        self._all = asyncio.Semaphore(size)
        self._long = asyncio.Semaphore(max(1, size - 1))
        self._idle: list[_Process] = []
        self._jobs: set[asyncio.Task[dict[str, Any]]] = set()

    async def run(self, header: Mapping[str, Any], body: bytes = b"") -> dict[str, Any]:
        """The answer to one job (see ``worker``). ``WorkerError`` where there is none: a worker
        took too long, or a second one died over it too. ``PoolFullError``: it may not wait.

        A job whose asker is cancelled runs to its end all the same: a worker is worth more.
        """
        held = await self._enter(len(body))
        job = asyncio.create_task(self._job(json.dumps(header).encode(), body, held))
        self._jobs.add(job)
        job.add_done_callback(self._done)
        return await asyncio.shield(job)

    async def _enter(self, size: int) -> list[asyncio.Semaphore]:
        """Wait until a job with a body of ``size`` bytes may run; what it must release."""
        gates = [self._long, self._all] if size > SHORT_BYTES else [self._all]
        if any(gate.locked() for gate in gates):
            self._check_room(size)
        self._waiting += 1
        self._waiting_bytes += size
        held: list[asyncio.Semaphore] = []
        try:
            for gate in gates:
                await gate.acquire()
                held.append(gate)
        except BaseException:
            for gate in held:
                gate.release()
            raise
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size
        return held

    def _check_room(self, size: int) -> None:
        """A body alone may always wait, however long it is."""
        seconds = math.ceil(self._waiting / self._size) * (self._job_seconds or 1.0)
        if self._waiting >= self._most_waiting:
            raise PoolFullError(f"{self._most_waiting} requests", seconds)
        if self._waiting and self._waiting_bytes + size > self._most_bytes:
            raise PoolFullError(f"{self._most_bytes} bytes of requests", seconds)

    def _done(self, job: "asyncio.Task[dict[str, Any]]") -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # its asker may be gone

    async def _job(
        self, header: bytes, body: bytes, held: list[asyncio.Semaphore]
    ) -> dict[str, Any]:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout):
                try:
                    return await self._ask(await self._take(), header, body)
                except WorkerError as died:  # perhaps by no fault of the job, which changes nothing
                    logger.warning("job repeated", extra={"fields": {"why": str(died)}})
                    return await self._ask(await _Process.start(), header, body)
        except TimeoutError:
            raise WorkerError(f"a tokenizer worker took over {self._timeout:g} s") from None
        finally:
            took = time.monotonic() - began
            known = self._job_seconds
            self._job_seconds = took if known is None else 0.9 * known + 0.1 * took
            for gate in held:
                gate.release()

    async def _ask(self, process: _Process, header: bytes, body: bytes) -> dict[str, Any]:
        """One job on one process, which goes back to the idle ones if it is worth it."""
        healthy = False
        try:
            answer = json.loads(await process.ask(header, body))
            healthy = True
        finally:
            if healthy and len(body) <= _RETIRING_BYTES:
                self._idle.append(process)
            else:
                await process.end(kill=not healthy)
        assert isinstance(answer, dict)
        return answer

    async def _take(self) -> _Process:
        """An idle process that lives, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            await process.end(kill=True)
        return await _Process.start()

    async def close(self) -> None:
        """End every process, busy ones too."""
        for job in tuple(self._jobs):
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await asyncio.gather(*(process.end(kill=False) for process in self._idle))
        self._idle.clear()
