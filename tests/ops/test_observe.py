"""Every query of every panel and rule, against a Prometheus that scrapes the stack under load."""

import asyncio
import contextlib
import json
import math
import re
import shutil
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from longleaf.metrics import GPU_METRICS
from longleaf.probes.commit import CommitPlan, CommitRun
from longleaf.probes.judge import Cell
from ops.dashboards.build import BOARDS, stale
from ops.dashboards.panels import Board, to_json
from ops.observe.__main__ import RECORDING, main
from ops.observe.load import Load
from ops.observe.options import Address
from ops.observe.prometheus import (
    RULES,
    Prometheus,
    StartError,
    Target,
    configuration,
    running_gpu_exporter,
    running_prometheus,
)
from ops.observe.replay import replaying
from tests.gateway.engine import Engine, running_engine
from tests.gateway.running import running_gateway

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="needs prometheus (apt-get install prometheus)"
    ),
]

LIMIT = 220.0
ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {"$namespace": ".*", "$context": ".*", "$__rate_interval": "30s"}
QUERIES = sorted(
    {query.expr for board in BOARDS for panel in board.panels for query in panel.queries}
)
RULES_TEXT = "".join(path.read_text() for path in RULES)
EXPRS = "\n".join(
    line for line in RULES_TEXT.splitlines() if not re.match(r" *(#|summary:|runbook:)", line)
)
# What only happens where something is wrong: the test makes it happen first.
TROUBLE = ("longleaf_gateway_upstream_errors_total",)


def plain(expr: str) -> str:
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr
    return expr


def metric_names(expr: str) -> set[str]:
    text = re.sub(r'"[^"]*"', "", expr)
    return set(re.findall(r"\b(?:longleaf|sglang)[:_][a-zA-Z0-9:_]+", text))


def empty(prometheus: Prometheus, exprs: set[str]) -> set[str]:
    """Those of ``exprs`` that have no sample but NaN."""
    return {
        expr
        for expr in exprs
        if not any(
            math.isfinite(float(sample["value"][1])) for sample in prometheus.query(plain(expr))
        )
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def probe_metrics(path: Path) -> Path:
    """What the commit probe writes."""
    cells = [Cell("predictable", 1024, [7.5], [1024]), Cell("prose", 1024, [2.5], [1024])]
    CommitRun(CommitPlan("u", "m", (1024,)), cells).write_textfile(path, {})
    return path


@contextlib.asynccontextmanager
async def stack(directory: Path) -> AsyncIterator[tuple[Prometheus, str, Engine]]:
    """Two small engines behind a gateway (its URL), watched by a Prometheus."""
    small = ("--max-total-tokens", "6144", "--max-running-requests", "3")
    name = ("--served-model-name", "tiny")
    with contextlib.ExitStack() as parts:
        engines = [parts.enter_context(running_engine(*small, *name)) for _ in range(2)]
        urls = [engine.url for engine in engines]
        async with running_gateway(*urls, ready=2, loads_interval=0.2) as gateway:
            exporter = running_gpu_exporter(directory, port=free_port(), recording=RECORDING)
            gpu = await asyncio.to_thread(parts.enter_context, exporter)
            probe = parts.enter_context(replaying(probe_metrics(directory / "probe.prom")))
            targets = [
                Target("longleaf-gateway", f"127.0.0.1:{gateway.server.metrics_port}"),
                *(Target("longleaf-engine", url.removeprefix("http://")) for url in urls),
                Target("longleaf-gpu", gpu),
                Target("longleaf-probe", f"127.0.0.1:{probe}"),
            ]
            config = configuration(targets, interval="1s", namespace="test")
            prometheus = await asyncio.to_thread(
                parts.enter_context, running_prometheus(directory, config, port=free_port())
            )
            yield prometheus, gateway.url, engines[1]


@contextlib.asynccontextmanager
async def under(load: Load) -> AsyncIterator[None]:
    task = asyncio.create_task(load.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until_answered(prometheus: Prometheus, exprs: set[str]) -> None:
    """Wait until each of ``exprs`` has an answer; fails with those that never had one."""
    deadline = time.monotonic() + LIMIT
    while missing := await asyncio.to_thread(empty, prometheus, exprs):
        assert time.monotonic() < deadline, f"no answer to {sorted(missing)}"
        exprs = missing
        await asyncio.sleep(1.0)


async def test_every_query_of_panels_and_rules_has_an_answer(tmp_path: Path) -> None:
    # Of rules each input and each result: an alert itself has no answer while all is well.
    of_rules = metric_names(EXPRS) - {"sglang_token_usage"}
    trouble = {expr for expr in QUERIES if any(name in expr for name in TROUBLE)}
    plain_steps = {name for name in of_rules if "plain_step" in name}
    async with stack(tmp_path) as (prometheus, url, victim):
        # An answer of two tokens, one from prefill: nothing is drafted for its only step. A mean
        # needs a hundred of them from one engine, a line twenty steps of each bucket in it.
        async with under(Load(url, "tiny", width=6, max_tokens=2, lengths=(40,))):
            await until_answered(prometheus, plain_steps)
        async with under(Load(url, "tiny", width=6, max_tokens=64, lengths=(400, 3500))):
            await until_answered(prometheus, (set(QUERIES) | of_rules) - plain_steps - trouble)
            victim.process.kill()
            await until_answered(prometheus, trouble)

        known = set(await asyncio.to_thread(prometheus.get, "label/__name__/values"))
        groups = (await asyncio.to_thread(prometheus.get, "rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) > 30
        for rule in rules:
            assert rule["health"] == "ok", rule
            assert metric_names(rule["query"]) <= of_rules <= known
        for expr in QUERIES:
            assert metric_names(expr) <= known, expr
        down = await asyncio.to_thread(prometheus.query, "up == 0")
        assert [sample["metric"]["job"] for sample in down] in ([], ["longleaf-engine"])


def fetched(url: str) -> str:
    """What is answered there; empty while nothing is."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
    return ""


async def test_make_observe_runs_everything_and_leaves_nothing() -> None:
    """As a user runs it: service, load, GPU exporter, probe, Prometheus, status page; Ctrl-C."""
    names = ("port", "metrics-port", "engine-port", "prometheus-port", "alertmanager-port")
    ports = {name: free_port() for name in (*names, "gpu-port", "probe-port")}
    options = [part for name, port in ports.items() for part in (f"--{name}", str(port))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.observe", "--interval", "1s", "--load", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        cwd=ROOT,
    )
    prometheus = Prometheus(f"http://127.0.0.1:{ports['prometheus-port']}")
    page = f"http://127.0.0.1:{ports['metrics-port']}/ui"

    def all_is_there() -> bool:
        if "1 of 1 ready" not in (text := fetched(page)) or '<svg class="tree"' not in text:
            return False
        samples = prometheus.query("up == 1")
        jobs = {sample["metric"]["job"].removeprefix("longleaf-") for sample in samples}
        wanted = ("longleaf:tokens_per_step:mean5m > 1", "longleaf_probe_commit_len > 1")
        return jobs == {"gateway", "engine", "gpu", "probe"} and all(map(prometheus.query, wanted))

    try:
        deadline = time.monotonic() + LIMIT
        while not await asyncio.to_thread(all_is_there):
            assert process.returncode is None
            assert time.monotonic() < deadline
            await asyncio.sleep(0.5)
        # What this machine reads is no share of the recorded card's peak.
        of_card = "{__name__=~'longleaf_gpu_memory_peak.*|longleaf:kv_read_bandwidth:peak.*'}"
        assert await asyncio.to_thread(prometheus.query, of_card) == []
        assert await asyncio.to_thread(prometheus.query, "longleaf_gpu_memory_total_bytes")
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0, err.decode()
    assert page in out.decode()
    for name, port in ports.items():
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)), f"{name} is still served"


@pytest.mark.parametrize("interval", ["abc", "5", "0s", "", "5s\n"])
def test_an_interval_that_prometheus_does_not_take_is_refused(interval: str) -> None:
    done = CliRunner().invoke(main, ["--interval", interval])
    assert done.exit_code == 2
    assert "is no duration above 0, such as 5s or 1m30s" in done.output


@pytest.mark.parametrize("address", ["foo", "foo:0", "foo:99999", ":9400", "http://a:1", "a:1/m"])
def test_a_gpu_exporter_that_is_no_address_is_refused(address: str) -> None:
    done = CliRunner().invoke(main, ["--gpu-exporter", address])
    assert done.exit_code == 2
    assert f"{address!r} is not HOST:PORT" in done.output


@pytest.mark.parametrize("address", ["10.0.0.7:9400", "gpu-node.local:9400", "[::1]:9400"])
def test_addresses_of_exporters(address: str) -> None:
    assert Address().convert(address, None, None) == address


def test_a_port_in_use_or_wanted_twice_is_refused_before_anything_starts() -> None:
    names = ("port", "metrics-port", "engine-port", "prometheus-port", "alertmanager-port")
    ports = {name: str(free_port()) for name in (*names, "gpu-port", "probe-port")}
    with socket.create_server(("127.0.0.1", 0)) as used:
        ports["prometheus-port"] = str(used.getsockname()[1])
        done = CliRunner().invoke(main, [x for n, p in ports.items() for x in (f"--{n}", p)])
    assert done.exit_code == 1
    assert f"--prometheus-port {ports['prometheus-port']}: Address already in use" in done.output
    ports["prometheus-port"] = ports["port"]
    done = CliRunner().invoke(main, [x for n, p in ports.items() for x in (f"--{n}", p)])
    assert f"--prometheus-port {ports['port']}: --port is the same" in done.output


def test_what_does_not_start_says_why(tmp_path: Path) -> None:
    config = json.dumps({"global": {"scrape_interval": "soon"}})
    with (
        pytest.raises(StartError, match="not a valid duration string"),
        running_prometheus(tmp_path, config, port=free_port()),
    ):
        pass


def test_committed_dashboards_are_what_the_code_builds() -> None:
    assert stale() == [], "run make dashboards"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboard_is_grafanas_own_model(board: Board) -> None:
    """Whole, as its SDK reads it; ids by which panels are linked to and queries told apart."""
    built = json.loads(to_json(board))
    again = JSONEncoder(sort_keys=True).encode(Dashboard.from_json(built))
    assert json.loads(again) == built
    panels = built["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + across, place["y"] + down)
            for across in range(place["w"])
            for down in range(place["h"])
        }
        assert max(across for across, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            names = [target["refId"] for target in panel["targets"]]
            assert names == list("ABCDEF"[: len(names)])


def test_panels_have_descriptions_units_and_the_namespace() -> None:
    for board in BOARDS:
        assert board.description
        titles = [panel.title for panel in board.panels]
        assert len(titles) == len(set(titles))
        for panel in board.panels:
            assert panel.description.endswith((".", "?")), panel.title
            assert panel.unit
            assert panel.queries
            for query in panel.queries:
                assert 'namespace=~"$namespace"' in query.expr, query.expr
            if panel.by_context:
                assert all('context_bucket=~"$context"' in query.expr for query in panel.queries)


def test_the_recording_has_every_gpu_metric() -> None:
    found = json.loads(RECORDING.read_text())
    told = {name for source in found["sources"] for name in source.get("supported", ())}
    assert told == set(GPU_METRICS)
