"""A headless Chromium, spoken to over its DevTools protocol."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

LIMIT = 60.0
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab. ``requested``: every address it asked for; ``complaints``: what its console says."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def listen(self) -> None:
        """Read what the browser says, for ever."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Network.requestWillBeSent":
                self.requested.append(said["params"]["request"]["url"])
            elif said["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(str(said["params"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        said = await asyncio.wait_for(answer, LIMIT)
        assert "error" not in said, (method, said)
        result: dict[str, Any] = said["result"]
        return result

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        said = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Its value, once that is true."""
        async with asyncio.timeout(LIMIT):
            while not (found := await self.value(expression)):  # noqa: ASYNC110 - in the browser
                await asyncio.sleep(0.05)
        return found

    async def open(self, url: str) -> None:
        """Go there; returns when it is loaded."""
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href == {url!r} && document.readyState == 'complete'")

    async def resize(self, width: int, height: int) -> None:
        """Set the size of the window's inside."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)


@asynccontextmanager
async def running_chromium() -> AsyncIterator[Page]:
    """A tab of a fresh browser."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={folder}"),
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
                async with http.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as ws:
                    page = Page(ws)
                    listening = asyncio.create_task(page.listen())
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
                    listening.cancel()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _port(file: Path) -> str:
    """The port that the browser wrote down, once it has."""
    async with asyncio.timeout(LIMIT):
        while not (text := await asyncio.to_thread(_text, file)):  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.05)
    return text.split()[0]


def _text(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""
