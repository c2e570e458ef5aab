"""Views of many replicas, of which some answer nonsense."""

import asyncio
import json
import re
import threading
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from starlette.requests import Request

from longleaf.metrics import EngineMetrics, GatewayMetrics
from longleaf.ui import state
from longleaf.ui.page import render
from longleaf.ui.routes import ui_routes
from longleaf.ui.state import View, Watch

pytestmark = pytest.mark.anyio
LIMIT = 30.0
NO_TREES = b'{"trees": []}'


class Told:
    """A replica that answers what it is given, and counts how many are asked at once."""

    state = "ready"
    in_flight = 0

    def __init__(self, url: str, metrics: bytes, trees: bytes = NO_TREES) -> None:
        self.url = url
        self.metrics, self.trees = metrics, trees
        self.asked = self.most = 0
        self.turns = self

    @property
    def client(self) -> "Told":
        return self

    async def fetch(self, method: str, path: str, limit: float) -> tuple[int, bytes]:
        turns = self.turns
        turns.asked += 1
        turns.most = max(turns.most, turns.asked)
        await asyncio.sleep(0)
        turns.asked -= 1
        return 200, self.metrics if path == "/metrics" else self.trees


async def page_of(watch: Watch, query: str = "") -> str:
    """What ``/ui`` answers."""
    (route,) = ui_routes(watch)
    request = Request({"type": "http", "query_string": query.encode(), "headers": []})
    answer = await route.endpoint(request)
    assert answer.status_code == 200
    return bytes(answer.body).decode()


def steps(*commits: int, nodes: int = 8) -> bytes:
    """An engine's exposition after steps at 1k that committed so many tokens of so many nodes."""
    registry = CollectorRegistry()
    engine = EngineMetrics(registry)
    for commit in commits:
        engine.commit_len.labels("1k").observe(commit)
        engine.tree_nodes.labels("1k").observe(nodes)
        engine.step_seconds.labels("total", "1k").observe(0.01)
    return generate_latest(registry)


POOL = b'longleaf_kv_pool_tokens{state="used"} 5\nlongleaf_kv_pool_tokens{state="free"} 7\n'


def watching(*replicas: Told, clock: Callable[[], float] = lambda: 1000.0) -> Watch:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    return Watch(lambda: replicas, registry, clock)


async def view_of(*replicas: Told) -> View:
    return await watching(*replicas).view()


async def test_steps_of_all_replicas_are_shown_together() -> None:
    view = await view_of(Told("http://a", steps(2, 4)), Told("http://b", steps(6)))
    (context,) = view.contexts
    assert (context.bucket, context.commit_len.count, context.commit_len.mean) == ("1k", 3, 4)
    text = render(view)
    assert "<td>4.00</td>" in text
    assert "<td>50%</td>" in text
    assert "<td>2.5 ms</td>" in text


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        (b'longleaf_commit_len_bucket{context_bucket="1k"} 3\n', "without an upper bound"),
        (b'longleaf_commit_len_bucket{le="abc"} 3\n', "without an upper bound"),
        (b'longleaf_commit_len_bucket{le="+Inf"} NaN\n', "no count"),
        (b"longleaf_commit_len_sum -3\n", "no count"),
        (b"longleaf_commit_len{oops\n", "no sample"),
        (b'longleaf_tree_nodes_bucket{le="1.0"} 3\n', "do not add up"),
    ],
)
async def test_one_replica_that_answers_nonsense_hides_no_other(metrics: bytes, why: str) -> None:
    view = await view_of(Told("http://a", POOL + metrics), Told("http://b", POOL + steps(5)))
    bad, good = view.replicas
    assert why in bad.why
    assert (good.why, good.pool) == ("", {"used": 5, "free": 7})
    assert [context.commit_len.mean for context in view.contexts] == [5]
    assert "http://b" in render(view)


@pytest.mark.parametrize("family", ["commit_len", "tree_nodes"])
async def test_a_sum_of_nothing_divides_nothing(family: str) -> None:
    pattern = rf'(longleaf_{family}_sum{{context_bucket="1k"}}) .*'.encode()
    metrics, count = re.subn(pattern, rb"\1 0", steps(3, 5))
    assert count == 1
    text = render(await view_of(Told("http://a", metrics)))
    assert "up to 1k" in text
    assert "not told" in text.split("id=contexts")[1].split("</table>")[0]


async def test_a_bad_tree_hides_no_pool() -> None:
    view = await view_of(Told("http://a", POOL, b'{"trees": [{}]}'))
    (replica,) = view.replicas
    assert replica.pool == {"used": 5, "free": 7}
    assert "a tree lacks or mistypes a field" in replica.why


async def test_texts_that_are_no_characters_are_served() -> None:
    tree = {"time": 1, "context": 5, "parents": [-1], "log_probs": [0], "path": [0]}
    trees = json.dumps({"trees": [{**tree, "texts": ["\ud800"]}]}).encode()
    assert ">?</text>" in await page_of(watching(Told("http://a", POOL, trees)))


class Held(bytes):
    """A body that can only be read while the event loop runs."""

    released: threading.Event

    def decode(self, *args: str) -> str:
        assert self.released.wait(LIMIT), "the event loop stood still"
        return super().decode(*args)


async def test_the_event_loop_goes_on_while_answers_are_read() -> None:
    body = Held(steps(3))
    body.released = threading.Event()
    task = asyncio.create_task(view_of(Told("http://a", body)))
    for _ in range(20):
        await asyncio.sleep(0.01)
    body.released.set()
    view = await asyncio.wait_for(task, LIMIT)
    assert view.contexts[0].commit_len.mean == 3


async def test_a_large_fleet_is_asked_in_turns_and_shown_in_pages() -> None:
    replicas = [Told(f"http://r{number}", steps(3)) for number in range(250)]
    for replica in replicas:
        replica.turns = replicas[0]
    replicas[240].state = "unhealthy"
    view = await view_of(*replicas)
    assert replicas[0].most == 32
    assert view.contexts[0].commit_len.count == 250

    def shown(page: int) -> list[str]:
        return re.findall(r"<td class=text>(http://r\d+)", render(view, page))

    first, last = shown(1), shown(3)
    assert (len(first), first[0], first[1]) == (100, "http://r240", "http://r0")
    assert (len(last), last[-1]) == (50, "http://r249")
    assert {*first, *shown(2), *last} == {replica.url for replica in replicas}
    assert shown(99) == last
    assert shown(0) == first
    assert re.findall(r'href="([^"]*)"', render(view, 2)) == ["?page=1", "?page=3"]
    assert "href" not in render(await view_of(*replicas[:100]))


async def test_replicas_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_LOOK_SECONDS", 0.0)
    view = await view_of(Told("http://a", steps(3)))
    assert [replica.why for replica in view.replicas] == ["not asked: the others took 0 s"]
    assert "http://a" in render(view)


async def test_a_view_that_costs_much_is_kept_longer() -> None:
    now = [1000.0]
    watch = watching(Told("http://a", steps(3)), clock=lambda: now[0])
    first = await watch.view()
    now[0] += 0.9
    assert await watch.view() is first
    now[0] += 0.2
    second = await watch.view()
    assert second is not first
    assert "over the last 1 s" in render(second)
    assert "<p class=note id=contexts>None in that time.</p>" in render(second), "not: none ever"
    watch._busy = 10.0
    now[0] += 39.0
    assert await watch.view() is second
    now[0] += 2.0
    assert await watch.view() is not second


async def test_pages_are_asked_for_by_number() -> None:
    watch = watching(*(Told(f"http://r{number}", b"") for number in range(101)))
    pages = {page: await page_of(watch, f"page={page}") for page in "12x"}
    assert "Page 2 of 2" in pages["2"]
    assert "http://r100<" in pages["2"]
    assert pages["x"] == pages["1"] == await page_of(watch)
