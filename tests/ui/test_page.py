"""The status page in a real browser, over the real gateway and real engines."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.gateway.engine import Engine, running_engine
from tests.gateway.running import Gateway, chat, running_gateway
from tests.ui.chromium import PROGRAM, Page, running_chromium

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(PROGRAM is None, reason="needs chromium (apt-get install chromium)"),
]
COUNTING = "Count on: " + " ".join(f"{n}," for n in range(1, 120))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine("--served-model-name", "tiny", "--show-draft-text") as engine:
        yield engine


@pytest.fixture
async def gateway(engine: Engine) -> AsyncIterator[Gateway]:
    async with running_gateway(engine.url, ready=1, loads_interval=0.1) as gateway:
        yield gateway


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with running_chromium() as page:
        yield page


def address(gateway: Gateway) -> str:
    return f"http://127.0.0.1:{gateway.server.metrics_port}/ui"


async def cells(page: Page, table: str) -> list[list[str]]:
    """The text of a table's body."""
    script = (
        f"[...document.querySelectorAll('#{table} tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText))"
    )
    found: list[list[str]] = await page.value(script)
    return found


async def test_the_page_shows_what_the_service_did(gateway: Gateway, page: Page) -> None:
    await page.open(address(gateway))
    assert await page.value("document.title") == "Longleaf: 1 of 1 ready"
    body = chat(messages=[{"role": "user", "content": COUNTING}], max_tokens=64, ignore_eos=True)
    status, answer, _ = await gateway.answer(body)
    assert status == 200
    usage = answer["usage"]
    assert usage["completion_tokens"] == 64

    # It renews itself, no reload: what the answer's steps did appears.
    # What the pool holds was read a moment before: it may be of the request while it ran.
    cell = "document.querySelector('#replicas tbody tr').cells[{}].innerText"
    await page.until(
        "document.querySelectorAll('figure svg.tree').length > 0 &&"
        f" {cell.format(2)} == '0' && {cell.format(4)} == '0' && {cell.format(5)} != '0'"
    )
    ((url, state, in_flight, _, used, cached, free, reserved, _),) = await cells(page, "replicas")
    assert (url, state, in_flight, reserved) == (
        gateway.server._config.replicas[0],
        "ready",
        "0",
        "0",
    )
    pool = [int(text.replace(",", "")) for text in (used, cached, free)]
    assert pool[0] == 0
    assert pool[1] > usage["prompt_tokens"]
    assert sum(pool) == 40_960
    assert ["admitted", "at_once", "1"] in await cells(page, "admission")

    ((bucket, steps, commit_len, _, nodes, useful, step, *_),) = await cells(page, "contexts")
    assert bucket in ("up to 1k", "up to 4k")
    # The first token is prefill's, every other one is a step's.
    assert int(steps) * float(commit_len) == pytest.approx(63, abs=0.5)
    assert float(useful.rstrip("%")) == pytest.approx(100 * float(commit_len) / float(nodes), abs=2)
    assert re.fullmatch(r"[\d.,]+ ms", step)


async def test_trees_are_drawn_with_their_text_and_accepted_path(
    gateway: Gateway, engine: Engine, page: Page
) -> None:
    body = chat(messages=[{"role": "user", "content": COUNTING}], max_tokens=40, ignore_eos=True)
    await gateway.answer(body)
    told = engine.get("/longleaf/trees")["trees"]
    await page.open(address(gateway))
    await page.until("document.querySelectorAll('figure').length > 0")
    newest = told[-1]
    caption = await page.value("document.querySelector('figcaption').innerText")
    assert f"context {newest['context']:,}: {len(newest['parents'])} nodes" in caption
    assert caption.endswith(f"commit_len {len(newest['path'])}")
    tree = "document.querySelector('figure svg')"
    assert await page.value(f"{tree}.querySelectorAll('circle').length") == len(newest["parents"])
    accepted = f"{tree}.querySelectorAll('circle.accepted').length"
    assert await page.value(accepted) == len(newest["path"])
    texts = await page.value(f"[...{tree}.querySelectorAll('text')].map(one => one.textContent)")
    assert texts == [text.replace(" ", "\N{MIDDLE DOT}") for text in newest["texts"]]
    assert len({text.strip() for text in texts}) > 3
    # Nodes are where they can be told apart: no two circles meet, none is cut off.
    script = (
        f"[...{tree}.querySelectorAll('circle')].map(c => [c.cx.baseVal.value, c.cy.baseVal.value])"
    )
    places = await page.value(script)
    assert len({(x, round(y)) for x, y in places}) == len(places)
    width, height = await page.value(f"[{tree}.clientWidth, {tree}.clientHeight]")
    assert all(5 <= x <= width - 5 and 5 <= y <= height - 5 for x, y in places)


async def test_nothing_else_is_loaded_and_nothing_is_complained_of(
    gateway: Gateway, page: Page
) -> None:
    await page.open(address(gateway))
    first = await page.value("document.querySelector('main').dataset.at")
    await page.until(f"document.querySelector('main').dataset.at != '{first}'")
    assert set(page.requested) == {address(gateway)}
    assert page.complaints == []


@pytest.mark.parametrize("width", [390, 1280])
async def test_the_page_fits_the_window(gateway: Gateway, page: Page, width: int) -> None:
    await page.resize(width, 900)
    await page.open(address(gateway))
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert await page.value(overflow) == 0


async def test_it_reads_without_scripts_and_only_on_the_admin_port(gateway: Gateway) -> None:
    async with gateway.http.get(address(gateway)) as answer:
        text = await answer.text()
        policy = answer.headers["content-security-policy"]
    assert "1 of 1 ready" in text
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert not re.search(r"(?:src|href)\s*=|@import|url\(", text), "an asset"
    async with gateway.http.get(gateway.url + "/ui") as answer:
        assert answer.status == 404
    async with gateway.http.post(address(gateway)) as answer:
        assert answer.status == 405


async def test_a_replica_that_is_gone_and_a_gateway_that_is_gone(page: Page) -> None:
    with (
        running_engine("--served-model-name", "tiny") as one,
        running_engine("--served-model-name", "tiny") as other,
    ):
        async with running_gateway(one.url, other.url, ready=2) as gateway:
            one.process.send_signal(signal.SIGKILL)
            await page.open(address(gateway))
            await page.until("document.querySelector('main').innerText.includes('1 of 2 ready')")
            rows = {row[0]: row for row in await cells(page, "replicas")}
            assert rows[other.url][1] == "ready"
            assert "not told" in rows[one.url]
            assert f"cannot connect to {one.url}" in rows[one.url][1]
        await page.until("!document.getElementById('lost').hidden")
        said = await page.value("document.getElementById('lost').innerText")
        assert re.fullmatch(r"The gateway has not answered for \d+ s: .*", said)
        assert (await cells(page, "replicas"))[0][0] in (one.url, other.url)


async def test_without_leave_the_engine_tells_no_text(tmp_path: Path) -> None:
    with running_engine("--served-model-name", "tiny") as engine:
        async with running_gateway(engine.url, ready=1) as gateway:
            await gateway.answer(chat(max_tokens=24, ignore_eos=True))
        trees = await asyncio.to_thread(engine.get, "/longleaf/trees")
        assert trees["trees"]
        assert all("texts" not in tree and "tokens" not in tree for tree in trees["trees"])
