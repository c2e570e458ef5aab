"""The ``longleaf gateway`` command as a process: configuration, ports, signals, logs."""

import asyncio
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import aiohttp
import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from longleaf.gateway.auth import KeyRing
from longleaf.gateway.command import gateway_command, load_config
from longleaf.gateway.config import GatewayConfig
from tests.gateway.faulty_replica import DONE, FaultyReplica, Received, event
from tests.gateway.running import LIMIT, chat

pytestmark = pytest.mark.anyio

REPLICA = ("--replica", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("no replica given",)),
        (("--replica", "127.0.0.1:30000"), ("--replica", "'127.0.0.1:30000'", "http://host:30000")),
        (("--replica", "ftp://a"), ("--replica", "'ftp://a'")),
        (("--replica", "http://"), ("--replica", "'http://'")),
        (("--replica", "http://a:x"), ("--replica", "'http://a:x'")),
        (("--replica", "http://a:99999"), ("--replica", "out of range")),
        (("--replica", "http://a?b=1"), ("--replica", "plain base URL")),
        ((*REPLICA, *REPLICA), ("replica given twice", "http://127.0.0.1:9")),
        ((*REPLICA, "--port", "70000"), ("--port", "65535", "70000")),
        ((*REPLICA, "--port", "9080"), ("must differ", "9080")),
        ((*REPLICA, "--max-body-bytes", "0"), ("--max-body-bytes", "greater than 0")),
        ((*REPLICA, "--idle-timeout", "-1"), ("--idle-timeout", "greater than 0")),
        ((*REPLICA, "--health-timeout", "1"), ("--health-timeout", "more than 1 s")),
        ((*REPLICA, "--api-key-file", "/nowhere/keys"), ("api_key_file", "/nowhere/keys")),
        ((*REPLICA, "--routing", "random"), ("--routing", "random")),
    ],
)
def test_bad_configuration_is_one_clear_error(
    arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = CliRunner().invoke(gateway_command, arguments)
    assert result.exit_code != 0
    assert not isinstance(result.exception, Exception)
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGLEAF_GATEWAY_REPLICAS", "http://a:1, http://b:2/")
    monkeypatch.setenv("LONGLEAF_GATEWAY_PORT", "1234")
    monkeypatch.setenv("LONGLEAF_GATEWAY_UPSTREAM_API_KEY", "secret")
    config = load_config(port=5678, replicas=(), host=None)
    assert config.replicas == ("http://a:1", "http://b:2")
    assert (config.port, config.host) == (5678, "127.0.0.1")
    assert "secret" not in repr(config)
    assert load_config(replicas=("http://c:3",)).replicas == ("http://c:3",)


def test_configuration_cannot_be_changed() -> None:
    config = GatewayConfig(replicas=("http://a:1",))
    with pytest.raises(ValidationError, match="frozen"):
        config.port = 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no key"),
        ("# only a comment\n", "holds no key"),
        ("sha256:12\n", "line 1: sha256: needs 64 hex digits"),
        ("good\ntwo words\n", "line 2: a key holds no blanks"),
    ],
)
def test_key_files_that_cannot_be_used(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=why):
        KeyRing.load(path)


def test_keys_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a-very-secret-key\n")
    ring = KeyRing.load(path)
    assert ring.find("Bearer a-very-secret-key") is not None
    assert ring.find("bearer a-very-secret-key ") is not None
    assert ring.find("Basic a-very-secret-key") is None
    assert b"a-very-secret-key" not in repr(vars(ring)).encode()


class Process:
    """``longleaf gateway`` as a child process."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.log: list[dict[str, object]] = []
        self.port = 0

    async def line(self, message: str) -> dict[str, object]:
        """The first log line with that message, read so far or still to come."""
        assert self.child.stderr is not None
        async with asyncio.timeout(LIMIT):
            while True:
                for entry in self.log:
                    if entry["message"] == message:
                        return entry
                raw = await self.child.stderr.readline()
                assert raw, f"no line {message!r} in {self.log}"
                self.log.append(json.loads(raw))

    async def read_on(self) -> None:
        """Read the log as it comes, to its end."""
        assert self.child.stderr is not None
        async for raw in self.child.stderr:
            self.log.append(json.loads(raw))

    async def rest(self) -> int:
        """Read the log to its end; the exit status."""
        assert self.child.stderr is not None
        async with asyncio.timeout(LIMIT):
            self.log += [json.loads(raw) async for raw in self.child.stderr]
            return await self.child.wait()


@asynccontextmanager
async def gateway_process(
    url: str,
    *arguments: str,
    preexec_fn: Callable[[], None] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Process]:
    """A gateway process on free ports, with a ready replica."""
    command = ("-m", "longleaf", "gateway", "--port", "0", "--metrics-port", "0")
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *(*command, "--replica", url, *arguments),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "error", **environment},
        preexec_fn=preexec_fn,
    )
    process = Process(child)
    try:
        listens = await process.line("gateway listens")
        process.port = int(str(listens["url"]).rsplit(":", 1)[1])
        await process.line("replica ready")
        yield process
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_drains_and_exits_0(number: signal.Signals) -> None:
    release = asyncio.Event()

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("one"))
        await release.wait()
        await request.chunk(event("two") + DONE)
        await request.end_stream()

    async with (
        FaultyReplica(behaviour) as replica,
        gateway_process(replica.url) as process,
        aiohttp.ClientSession() as http,
    ):
        url = f"http://127.0.0.1:{process.port}"
        request = chat(stream=True, messages=[{"role": "user", "content": "a very private word"}])
        async with http.post(url + "/v1/chat/completions", json=request) as running:
            await running.content.readexactly(len(event("one")))
            process.child.send_signal(number)
            await process.line("draining")
            async with http.get(url + "/readyz") as response:
                assert response.status == 503
            async with http.post(url + "/v1/chat/completions", json=chat()) as response:
                assert response.status == 503
            release.set()
            assert await running.read() == event("two") + DONE
        assert await process.rest() == 0
        assert len(replica.generations) == 1
        lines = [entry for entry in process.log if entry["message"] == "request"]
        done = next(entry for entry in lines if entry["status"] == 200)
        assert done["rid"] == replica.generations[0].json["rid"]
        assert (done["route"], done["reason"]) == ("chat_completions", "ok")
        assert (done["stream"], done["model"], done["replica"]) == (True, "tiny", replica.url)
        assert done["sent_bytes"] == len(event("one") + event("two") + DONE)
        assert "private" not in json.dumps(process.log)


async def test_a_low_soft_limit_of_open_files_bounds_no_streams() -> None:
    count, release = 80, asyncio.Event()

    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("one"))
        await release.wait()
        await request.chunk(DONE)
        await request.end_stream()

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with (
        FaultyReplica(behaviour) as replica,
        gateway_process(replica.url, preexec_fn=lambda: few_files(most)) as process,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):

        async def stream() -> bytes:
            url = f"http://127.0.0.1:{process.port}/v1/chat/completions"
            async with http.post(url, json=chat(stream=True)) as running:
                return await running.read()

        streams = [asyncio.create_task(stream()) for _ in range(count)]
        async with asyncio.timeout(LIMIT):
            for _ in range(count):
                await replica.arrived.get()
            release.set()
            assert await asyncio.gather(*streams) == [event("one") + DONE] * count


def few_files(most: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, most))


async def test_second_signal_ends_running_answers_at_once() -> None:
    async def behaviour(request: Received) -> None:
        await request.start_stream()
        await request.chunk(event("one"))
        await request.until_gone()

    async with (
        FaultyReplica(behaviour) as replica,
        gateway_process(replica.url) as process,
        aiohttp.ClientSession() as http,
    ):
        url = f"http://127.0.0.1:{process.port}/v1/chat/completions"
        async with http.post(url, json=chat(stream=True)) as running:
            await running.content.readexactly(len(event("one")))
            process.child.send_signal(signal.SIGINT)
            await process.line("draining")
            process.child.send_signal(signal.SIGINT)
            assert b'"code": "service_unavailable"' in await running.read()
        assert await replica.aborted.get() == replica.generations[0].json["rid"]
        assert await process.rest() == 0


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
async def test_port_in_use_is_named(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = "--metrics-port" if option == "--port" else "--port"
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "longleaf", "gateway", *REPLICA),
            *(option, str(port), other, "0"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, output = await child.communicate()
    assert child.returncode == 1
    expected = f"Error: {option}: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert output.decode().strip() == expected


def test_help_says_what_every_setting_means() -> None:
    text = " ".join(CliRunner().invoke(gateway_command, ["--help"]).output.split())
    flags = {parameter.name for parameter in gateway_command.params}
    assert "LONGLEAF_GATEWAY_MIN_BODY_RATE Bytes a second, on the whole" in text
    assert "LONGLEAF_GATEWAY_BREAKER_FAILURES" in text
    for name, field in GatewayConfig.model_fields.items():
        assert name in flags or (f"LONGLEAF_GATEWAY_{name.upper()} " in text and field.description)
