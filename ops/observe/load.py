"""A light load for the local stack: texts of several kinds and lengths, and clients that leave."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

_KINDS = (
    "Count on: " + " ".join(f"{n}," for n in range(1, 400)),
    "The quick brown fox jumps over the lazy dog. " * 40,
    "Tell me about rivers, and why they bend. ",
)


@dataclass(slots=True)
class Load:
    """Sends streamed chat requests, ``width`` at a time, until cancelled."""

    url: str
    model: str
    width: int = 4
    max_tokens: int = 48
    lengths: tuple[int, ...] = (400, 5000)
    """Characters of a prompt: a context bucket each, in the tiny model's tokens."""
    answered: int = 0
    failed: int = 0

    async def run(self) -> None:
        """Send requests for ever."""
        bodies = self._bodies()
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            for _ in range(self.width):
                group.create_task(self._client(http, bodies))

    def _bodies(self) -> Iterator[tuple[dict[str, object], bool]]:
        """Bodies, and whether their client leaves before the end."""
        cases = itertools.product(self.lengths, _KINDS)
        for number, (length, kind) in enumerate(itertools.cycle(list(cases))):
            text = (f"{number}. " + kind * (1 + length // len(kind)))[:length]
            body: dict[str, object] = {
                "model": self.model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": self.max_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            yield body, number % 7 == 3

    async def _client(
        self, http: aiohttp.ClientSession, bodies: Iterator[tuple[dict[str, object], bool]]
    ) -> None:
        for body, leaves in bodies:
            try:
                async with http.post(f"{self.url}/v1/chat/completions", json=body) as answer:
                    if leaves:
                        await answer.content.readline()
                        continue
                    text = await answer.text()
                done = answer.status == 200 and text.rstrip().endswith("[DONE]")
            except aiohttp.ClientError:
                done = False
            self.answered += done
            self.failed += not done
            if not done:
                await asyncio.sleep(0.05)


async def run_until(load: Load, stop: asyncio.Event) -> None:
    """Run ``load`` until ``stop`` is set."""
    task = asyncio.create_task(load.run())
    await stop.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
