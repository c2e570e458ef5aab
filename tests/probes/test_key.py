"""Who is shown the key: the server that is probed, and nobody whose metrics are read."""

import io
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from longleaf.probes.commit import CommitPlan, CommitRun
from longleaf.probes.commit import measure as measure_commit
from longleaf.probes.progress import Progress
from longleaf.probes.step import StepPlan, StepRun
from longleaf.probes.step import measure as measure_steps

pytestmark = pytest.mark.anyio
SHOWN = "Bearer a-secret"
DETAILS = {"steps": 1, "commit_len": 1.0}
USAGE = {"prompt_tokens": 64, "completion_tokens": 2, "spec_tokens_details": DETAILS}


class Seen:
    """A server with metrics; remembers who showed which key where."""

    def __init__(self) -> None:
        self.keys: list[tuple[str, str | None]] = []
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/metrics", self._metrics)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    def _note(self, request: web.Request) -> None:
        self.keys.append((request.path, request.headers.get("authorization")))

    async def _models(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.json_response({"data": [{"id": "longleaf"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        self._note(request)
        chunks = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}], "usage": USAGE}]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream")

    async def _metrics(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.Response(text='longleaf_commit_len_count{context_bucket="1k"} 1\n')


async def test_only_the_probed_server_is_shown_the_key() -> None:
    probed, other = Seen(), Seen()
    async with probed.server, other.server:
        metrics = f"{other.url}/metrics"
        commit = CommitRun(
            CommitPlan(probed.url, metrics, (64,), repeats=1, max_tokens=2, api_key="a-secret")
        )
        await measure_commit(commit, Progress(io.StringIO()))
        plan = StepPlan((probed.url,), (metrics,), (64,), 1, 2, api_key="a-secret")
        await measure_steps(StepRun(plan), Progress(io.StringIO()))
    paths = {path for path, key in probed.keys if key == SHOWN}
    assert paths == {"/v1/models", "/v1/completions"}
    assert {key for path, key in probed.keys if path in paths} == {SHOWN}
    assert other.keys == [("/metrics", None)] * 4
