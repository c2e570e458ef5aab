"""Bodies are parsed, and their prompts counted exactly, away from the event loop."""

import asyncio
import base64
import io
import json
import logging
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tiktoken
from tokenizers import Tokenizer as HfTokenizer

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.tokenizer import Tokenizer as EngineTokenizer
from longleaf.gateway.prompts.chat_template import ChatTemplate, TemplateError
from longleaf.gateway.prompts.inspection import Route, inspect, parse
from longleaf.gateway.prompts.pool import PoolFullError, WorkerError, WorkerPool, _Process
from longleaf.gateway.prompts.tiktoken_files import load_tiktoken
from longleaf.gateway.prompts.tokenizer import Count, Tokenizer, TokenizerError
from tests.gateway.faulty_replica import FaultyReplica, answer_captured_chat
from tests.gateway.running import chat, eventually, gateway_over, running_gateway
from tests.gateway.test_requests import error_of

pytestmark = pytest.mark.anyio

TINY = DEFAULT_MODELS / "tiny-target"
TEXTS = [
    "",
    "hello",
    "  two  spaces\n\n\ttab ",
    "1234567890" * 7,
    "naïve café — 東京 🙂🙃 \u0000\u200b",
    "a<|end|>b<|user|>",
    "x" * 5000,
    json.dumps({"deep": [1, 2, {"a": "b"}]}),
]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.fixture(scope="module")
def engines() -> EngineTokenizer:
    return EngineTokenizer.load(TINY)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_counts_are_the_engines(ours: Tokenizer, engines: EngineTokenizer, text: str) -> None:
    parts = [{"type": "text", "text": text}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text},
        {"role": "user", "content": parts},
    ]
    prompt = engines.render_chat(messages)
    exact = len(engines.encode(prompt, False))
    assert ours.count_chat(messages, {}, None) == Count(exact, exact)
    assert ours.count_prompts([text, "b"], None) == Count(
        max(len(engines.encode(text)), 1), len(engines.encode(text)) + 1
    )
    extra = {"add_generation_prompt": False}
    shorter = engines.render_chat(messages, extra)
    assert ours.count_chat(messages, extra, None).longest == len(engines.encode(shorter, False))


def test_what_must_be_too_long_by_its_size_is_not_counted(ours: Tokenizer) -> None:
    longest = max(len(token.encode()) for token in _vocabulary(TINY))
    text = "x" * (longest * 100)
    assert ours.count_prompts([text], 99) == Count(100, 100, at_least=True)
    assert not ours.count_prompts([text], 100).at_least


def _vocabulary(directory: Path) -> dict[str, int]:
    tokenizer: HfTokenizer = HfTokenizer.from_file(str(directory / "tokenizer.json"))
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return vocabulary


@pytest.mark.parametrize(
    ("source", "content", "rendered"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["a", "b"], "a b"),
        (
            "{% for m in messages %}{% for part in m['content'] %}<{{ part.text }}>"
            "{% endfor %}{% endfor %}",
            ["a", "b"],
            "<a><b>",
        ),
        ("{{ bos_token }}{{ messages[0] | tojson }}", "é", '<s>{"role": "user", "content": "é"}'),
        ("{% for m in messages %}{% break %}{% endfor %}x", "a", "x"),
        ("{% if tools is none %}none{% endif %}{{ thinking }}", "a", "noneTrue"),
    ],
)
def test_templates_render_as_the_engine_renders_them(
    source: str, content: str | list[str], rendered: str
) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    parts: Any = content
    if isinstance(content, list):
        parts = [{"type": "text", "text": text} for text in content]
    assert template.render([{"role": "user", "content": parts}], {"thinking": True}) == rendered


def test_templates_that_are_wrong_or_refuse() -> None:
    with pytest.raises(TemplateError, match="chat_template"):
        ChatTemplate("{% for %}", {})
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateError, match="roles must alternate"):
        refusing.render([], {})


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, r"no tokenizer\.json or tiktoken\.model"),
        ({"tokenizer.json": "{"}, "nowhere|EOF|expected|line"),
        ({"tokenizer_config.json": "{"}, r"tokenizer_config\.json"),
        ({"tokenizer_config.json": "[]"}, "must be a JSON object"),
        ({"tiktoken.model": "not base64 at all\n"}, r"tiktoken\.model, line 1"),
        ({"tiktoken.model": "\n"}, "holds no token"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, files: dict[str, str], why: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=why):
        Tokenizer.load(tmp_path)


def test_tiktoken_files_as_kimi_has_them(tmp_path: Path) -> None:
    """A vocabulary of all bytes and a few merges, special tokens from the configuration."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"he", b"ll", b"hell", b"hello", b" w", b"or", b"ld", b"orld", b" world"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    start = len(tokens)
    config = {
        "added_tokens_decoder": {
            str(start): {"content": "<|im_user|>"},
            str(start + 3): {"content": "<|im_end|>"},
        },
        "chat_template": "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    messages = [{"role": "user", "content": "hello world"}]
    assert tokenizer.count_chat(messages, {}, None) == Count(4, 4)
    reserved = f"<|reserved_token_{start + 1}|>"
    assert tokenizer.count_prompts([f"hello{reserved}hello"], None).longest == 3
    assert tokenizer.count_prompts([f"<|reserved_token_{start}|>"], None).longest > 1
    encoder = load_tiktoken(tmp_path / "tiktoken.model", config)
    assert encoder.count("a" * 26_000 + " " * 51_000, False) == 77_000
    assert encoder.count("hello world" * 50_000, False) == 100_000 + 1  # cut at 400,000 characters
    assert isinstance(encoder._encoding, tiktoken.Encoding)


def looked_at(fields: dict[str, object], route: Route = "chat_completions") -> Any:
    text = json.dumps(fields).encode()
    return inspect(parse(text, route), len(text), route)


def test_an_inspection_says_what_admission_needs() -> None:
    said = looked_at(chat(max_tokens=5, stream=True, n=3, priority=-7, rid="x"))
    assert (said.chat, said.model, said.stream, said.max_tokens) == (True, "tiny", True, 5)
    assert (said.completions, said.prompts, said.priority) == (3, 1, -7)
    assert {"model", "messages", "rid"} <= set(said.names)
    assert looked_at(chat(priority=10**9)).priority == 100
    assert looked_at(chat(priority="high")).priority == 0
    assert looked_at(chat(priority=None)).priority is None
    ids = looked_at({"model": "m", "prompt": [[1, 2], [3]], "n": 2}, "completions")
    assert (ids.given_tokens, ids.all_given_tokens, ids.prompts) == (2, 3, 2)
    texts = looked_at({"model": "m", "prompt": ["a", "b"]}, "completions")
    assert (texts.given_tokens, texts.prompts, texts.prompt_field) == (None, 2, "prompt")


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({}, True),
        ({"temperature": 0.5, "chat_template_kwargs": {"thinking": True}, "tools": []}, True),
        ({"tools": [{"type": "function"}]}, False),
        ({"reasoning_effort": "low"}, False),
        ({"a_field_of_tomorrow": 1}, False),
        ({"messages": [{"role": "tool", "content": "x"}]}, False),
        ({"messages": [{"role": "assistant", "content": None}]}, False),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
    ],
)
def test_only_plain_prompts_are_counted_without_the_engine(
    fields: dict[str, object], plain: bool
) -> None:
    assert looked_at({**chat(), **fields}).plain is plain


@asynccontextmanager
async def pool(size: int = 2, limit: float = 20.0) -> AsyncIterator[WorkerPool]:
    workers = WorkerPool(size, limit)
    try:
        yield workers
    finally:
        await workers.close()


def job(**fields: object) -> dict[str, object]:
    header = {"kind": "prompt", "route": "chat_completions", "tokenizers": {"": str(TINY)}}
    return {**header, "most": None, **fields}


async def test_a_worker_parses_and_counts(engines: EngineTokenizer) -> None:
    messages = [{"role": "user", "content": "word " * 30_000}]
    body = json.dumps({"model": "tiny", "messages": messages, "rid": "r"}).encode()
    async with pool() as workers:
        answer = await workers.run(job(), body)
        exact = len(engines.encode(engines.render_chat(messages), False))
        assert answer["count"] == {"longest": exact, "total": exact, "at_least": False}
        assert answer["inspection"]["bound"] >= exact
        other = await workers.run(job(tokenizers={"other": str(TINY)}), body)
        assert "count" not in other
        wrong = await workers.run(job(), b'{"model": "tiny"}')
        assert (wrong["param"], "'messages'" in wrong["wrong"]) == ("messages", True)
        missing = await workers.run(job(tokenizers={"": "/nowhere"}), body)
        assert "/nowhere" in missing["tokenizer_error"]
        assert "inspection" in missing


async def test_a_worker_that_dies_is_replaced() -> None:
    body = json.dumps(chat()).encode()
    async with pool(size=1) as workers:
        await workers.run(job(), body)
        (idle,) = workers._idle
        os.kill(idle._process.pid, 9)
        await idle._process.wait()
        assert (await workers.run(job(), body))["inspection"]["model"] == "tiny"
        assert (await workers.run(job(), body))["inspection"]["model"] == "tiny"


@pytest.mark.parametrize("deaths", [1, 2])
async def test_a_job_whose_worker_dies_is_done_by_another_once(
    deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are stopped before they get the job, so that they die over it for certain."""
    body = json.dumps(chat()).encode()
    started: list[int] = []
    start = _Process.start

    async def noted() -> _Process:
        process = await start()
        started.append(process._process.pid)
        if len(started) <= deaths:
            os.kill(process._process.pid, signal.SIGSTOP)
        return process

    monkeypatch.setattr(_Process, "start", noted)
    async with pool(size=1) as workers:
        busy = asyncio.create_task(workers.run(job(), body))
        for number in range(deaths):
            await eventually(partial(started.__getitem__, slice(number, None)))
            os.kill(started[number], signal.SIGKILL)
        if deaths == 1:
            assert (await busy)["inspection"]["model"] == "tiny"
            assert len(started) == 2
        else:
            with pytest.raises(WorkerError, match="died"):
                await busy
        assert (await workers.run(job(), body))["inspection"]["model"] == "tiny"


async def test_a_worker_that_takes_too_long_is_replaced() -> None:
    body = json.dumps(chat()).encode()
    async with pool(size=1, limit=0.001) as workers:
        with pytest.raises(WorkerError, match=r"over 0\.001 s"):
            await workers.run(job(), body)
        workers._timeout = 20.0
        assert (await workers.run(job(), body))["inspection"]["model"] == "tiny"


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Workers that start are stopped, until they are sent a SIGCONT."""
    started: list[int] = []
    start = _Process.start

    async def noted() -> _Process:
        process = await start()
        os.kill(process._process.pid, signal.SIGSTOP)
        started.append(process._process.pid)
        return process

    monkeypatch.setattr(_Process, "start", noted)
    return started


async def test_bodies_that_wait_for_a_worker_are_bounded(stopped: list[int]) -> None:
    body = json.dumps(chat()).encode()
    workers = WorkerPool(1, 20.0, most_waiting=2, most_bytes=2 * len(body))
    try:
        running = asyncio.create_task(workers.run(job(), body))
        await eventually(partial(len, stopped))
        first = asyncio.create_task(workers.run(job(), body + b" " * len(body)))
        await asyncio.sleep(0)
        with pytest.raises(PoolFullError, match=f"than {2 * len(body)} bytes of requests may wait"):
            await workers.run(job(), body)  # one byte more than may wait would be too many
        second = asyncio.create_task(workers.run(job(), b""))
        await asyncio.sleep(0)
        with pytest.raises(PoolFullError, match="than 2 requests may wait") as full:
            await workers.run(job(), b"")
        assert full.value.retry_after == 2.0  # two jobs before it; a second each as none is known
        second.cancel()
        await asyncio.wait([second])
        third = asyncio.create_task(workers.run(job(), b""))  # one has left
        os.kill(stopped[0], signal.SIGCONT)
        assert (await running)["inspection"]["model"] == "tiny"
        assert (await first)["inspection"]["model"] == "tiny"
        assert "wrong" in await third
        assert (await workers.run(job(), body))["inspection"]["model"] == "tiny"
        assert (workers._waiting, workers._waiting_bytes) == (0, 0)
    finally:
        await workers.close()


async def test_who_may_not_wait_for_a_worker_is_told_so(stopped: list[int]) -> None:
    long = chat(messages=[{"role": "user", "content": "x" * 70_000}])
    settings = {"tokenizer_workers": 1, "tokenizer_queue_size": 1, "max_body_bytes": 10**6}
    async with gateway_over(answer_captured_chat, **settings) as (gateway, (replica,)):
        replica.load = {"max_total_num_tokens": 10**6}
        running = asyncio.create_task(gateway.answer(long))
        await eventually(partial(len, stopped))
        both = [asyncio.create_task(gateway.answer(long)) for _ in range(2)]
        (refused,), (waiting,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        status, body, response = await refused
        error = error_of(body)
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
        assert "No more than 1 requests may wait" in error["message"]
        assert 1 <= int(response.headers["retry-after"]) <= 120
        os.kill(stopped[0], signal.SIGCONT)
        assert {(await running)[0], (await waiting)[0]} <= {200, 400}
        assert (await gateway.answer(chat()))[0] == 200


async def test_a_worker_ends_after_a_huge_body() -> None:
    huge = b'{"model": "tiny", "messages": [], "pad": "' + b"x" * (16 * 2**20) + b'"}'
    async with pool(size=1) as workers:
        assert (await workers.run(job(), huge))["param"] == "messages"
        assert workers._idle == []
        assert (await workers.run(job(), json.dumps(chat()).encode()))["inspection"]["model"] == (
            "tiny"
        )
        assert len(workers._idle) == 1


async def test_an_asker_that_leaves_costs_no_worker() -> None:
    body = json.dumps(chat()).encode()
    async with pool(size=1) as workers:
        await workers.run(job(), body)
        (idle,) = workers._idle
        askers = [asyncio.create_task(workers.run(job(), body)) for _ in range(5)]
        await asyncio.sleep(0)
        for asker in askers:
            asker.cancel()
        await asyncio.gather(*askers, return_exceptions=True)
        assert "count" in await workers.run(job(), body)
        assert workers._idle == [idle]


async def test_a_short_job_does_not_wait_for_long_ones() -> None:
    long = json.dumps(chat(messages=[{"role": "user", "content": "word " * 10**6}])).encode()
    async with pool(size=2) as workers:
        longs = [asyncio.create_task(workers.run(job(), long)) for _ in range(3)]
        await asyncio.sleep(0)
        await workers.run(job(), json.dumps(chat()).encode())
        assert not any(task.done() for task in longs[1:])
        await asyncio.gather(*longs)


async def test_long_bodies_are_checked_like_short_ones() -> None:
    filler = "x" * 200_000
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        bad = chat(messages=[{"role": "user", "content": filler}], temperature=-1)
        status, body, _ = await gateway.answer(bad)
        assert (status, error_of(body)["param"]) == (400, "temperature")
        async with gateway.http.post(
            gateway.url + "/v1/chat/completions", data=b'{"a": "' + filler.encode()
        ) as response:
            assert response.status == 400
            assert "not valid JSON" in error_of(await response.json())["message"]
        ids: dict[str, object] = {"model": "tiny", "prompt": [7] * 100_000}
        status, body, _ = await gateway.answer(ids, "/v1/completions")
        error = error_of(body)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "100000 in the prompt" in error["message"]
        assert replica.generations == []
        good = chat(messages=[{"role": "user", "content": filler}], rid="theirs")
        assert (await gateway.answer(good))[0] == 200
        (received,) = replica.generations
        assert received.json["messages"] == good["messages"]
        assert len(received.json["rid"]) == 32


LOCAL = 'longleaf_gateway_token_counts_total{outcome="local"}'


async def test_the_gateways_own_tokenizer_counts_and_no_replica_is_asked() -> None:
    settings: dict[str, Any] = {"tokenizers": (f"tiny={TINY}",)}
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(FaultyReplica())
        replica.prompt_tokens = 57  # what it is asked first, to compare
        gateway = await stack.enter_async_context(running_gateway(replica.url, ready=1, **settings))
        up = f'longleaf_gateway_tokenizer_up{{tokenizer="{TINY}"}}'
        await eventually(lambda: len(replica.tokenized) == 1)
        replica.tokenized.clear()
        long = chat(messages=[{"role": "user", "content": "1" * 5000}])
        status, body, _ = await gateway.answer(long)
        message = error_of(body)["message"]
        assert (status, "5004 in the prompt" in message) == (400, True)  # one token a digit
        longer = chat(messages=[{"role": "user", "content": "1" * 500_000}])
        status, body, _ = await gateway.answer(longer)
        assert status == 400
        assert "at least" in error_of(body)["message"] or "500004" in error_of(body)["message"]
        assert replica.tokenized == []
        assert await gateway.metric(LOCAL) == 3  # with the comparison
        assert await gateway.metric(up) == 1
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert (await gateway.answer(chat(tools=tools)))[0] == 200
        assert len(replica.tokenized) == 1  # not plain: the engine knows


async def test_a_tokenizer_that_does_not_load_is_loud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(TINY, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    (broken / "tokenizer.json").write_text("{}")
    settings: dict[str, Any] = {"tokenizers": (str(broken),)}
    up = f'longleaf_gateway_tokenizer_up{{tokenizer="{broken}"}}'
    with caplog.at_level(logging.ERROR):
        async with gateway_over(answer_captured_chat, **settings) as (gateway, (replica,)):
            replica.prompt_tokens = 5_000
            status, body, _ = await gateway.answer(
                chat(messages=[{"role": "user", "content": "word " * 2000}])
            )
            assert (status, "5000 in the prompt" in error_of(body)["message"]) == (400, True)
            assert len(replica.tokenized) == 1
            async with asyncio.timeout(20):
                while up + " 0.0" not in await gateway.metrics():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("tokenizer does not load") == 1


async def test_a_tokenizer_that_is_not_the_replicas_is_loud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings: dict[str, Any] = {"tokenizers": (str(TINY),)}
    with caplog.at_level(logging.ERROR):
        async with gateway_over(answer_captured_chat, **settings) as (gateway, (replica,)):
            replica.prompt_tokens = 5_000
            up = f'longleaf_gateway_tokenizer_up{{tokenizer="{TINY}"}}'
            async with asyncio.timeout(20):
                while up + " 0.0" not in await gateway.metrics():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert len(replica.tokenized) == 1
            long = chat(messages=[{"role": "user", "content": "1" * 100_000}])
            status, body, _ = await gateway.answer(long)
            assert (status, "5000 in the prompt" in error_of(body)["message"]) == (400, True)
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert record.getMessage() == "tokenizer is not the replica's"


async def test_a_long_body_leaves_the_event_loop_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loop does for a body is counted, not timed: it parses no long one, and takes a step
    or two for each block of the first megabytes, to route it. So ``/readyz`` is answered meanwhile.
    """
    parsed: list[int] = []
    calls: Counter[str] = Counter()

    def noted(text: bytes, route: Route) -> dict[str, Any]:
        parsed.append(len(text))
        return parse(text, route)

    def count(frame: FrameType, event: str, _: object) -> None:
        if event in {"call", "c_call"} and "longleaf" in frame.f_code.co_filename:
            calls[frame.f_code.co_filename] += 1

    monkeypatch.setattr("longleaf.gateway.prompts.reader.parse", noted)
    quiet: dict[str, Any] = {"health_interval": 600.0, "loads_interval": 600.0}
    async with gateway_over(answer_captured_chat, **quiet) as (gateway, (replica,)):

        async def work(words: int) -> int:
            """Calls of the gateway's code on the loop for a body of so many words."""
            text = json.dumps(chat(messages=[{"role": "user", "content": "word " * words}]))
            calls.clear()
            sys.setprofile(count)
            try:
                url = gateway.url + "/v1/chat/completions"
                async with gateway.http.post(url, data=io.BytesIO(text.encode())) as response:
                    assert response.status == 200
            finally:
                sys.setprofile(None)
            return calls.total()

        await work(10)
        assert len(parsed) == 1  # a short one
        few, megabyte, huge = await work(20_000), await work(200_000), await work(4_000_000)
        assert len(parsed) == 1
        assert [len(one.body) > 90_000 for one in replica.generations] == [False, True, True, True]
        assert megabyte - few < 4 * 1_000
        segments = len(replica.generations[-1].body) // 65_536
        assert huge - few < 4 * 4_096 + 50 * segments


async def test_ready_is_answered_while_a_long_body_is_worked_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker is stopped over it: whatever waits for the body waits for ever."""
    started: list[int] = []
    start = _Process.start

    async def noted() -> _Process:
        process = await start()
        started.append(process._process.pid)
        os.kill(process._process.pid, signal.SIGSTOP)
        return process

    monkeypatch.setattr(_Process, "start", noted)
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        long = chat(messages=[{"role": "user", "content": "word " * 150_000}])
        asked = asyncio.create_task(gateway.raw(long))
        await eventually(lambda: started)
        assert await gateway.ready() == 1
        assert (await gateway.raw(chat()))[0] == 200
        assert not asked.done()
        os.kill(started[0], signal.SIGCONT)
        assert (await asked)[0] == 200
        assert len(replica.generations) == 2
