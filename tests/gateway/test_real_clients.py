"""Clients of other projects against the gateway before a real engine: LiteLLM, LangChain, aiperf.

They live in a Python of their own (``make test-clients`` makes it): each brings half a framework.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.engine import Engine, running_engine
from tests.gateway.running import LIMIT, Gateway, running_gateway

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-clients/bin/python"
READY = ROOT / ".venv-clients/.ready"
"""Written once everything is installed."""
TOKENIZER = ROOT / "service/longleaf/embedded/models/tiny-target"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not READY.exists(), reason="no .venv-clients: run make test-clients"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def model(engine: Engine) -> str:
    return str(engine.get("/v1/models")["data"][0]["id"])


async def output_of(*command: str) -> str:
    environment = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "*",
    }
    child = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    async with asyncio.timeout(10 * LIMIT):
        output, log = await child.communicate()
    assert child.returncode == 0, log.decode()[-3000:] + output.decode()[-3000:]
    return output.decode()


async def told(gateway: Gateway, client: str, model: str) -> dict[str, Any]:
    script = Path(__file__).parent / "clients/ask.py"
    url = gateway.url + "/v1"
    output = await output_of(str(PYTHON), str(script), client, url, model)
    answer = json.loads(output.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


async def test_litellm(engine: Engine, model: str) -> None:
    async with running_gateway(engine.url, ready=1, health_interval=5.0) as gateway:
        answer = await told(gateway, "litellm", model)
    assert answer["whole"] == answer["stream"]
    assert answer["completion_tokens"] == [24, 24]
    assert answer["errors"] == {
        "too_long": "ContextWindowExceededError",  # else its fallbacks never fire
        "too_long_streamed": "ContextWindowExceededError",
        "unknown_model": "NotFoundError",
        "wrong_value": "BadRequestError",
    }


async def test_langchain_openai(engine: Engine, model: str) -> None:
    async with running_gateway(engine.url, ready=1, health_interval=5.0) as gateway:
        answer = await told(gateway, "langchain", model)
    assert answer["whole"] == answer["stream"]
    assert answer["completion_tokens"] == [24, 24]
    assert "BadRequestError" in answer["errors"]["too_long"]
    assert "NotFoundError" in answer["errors"]["unknown_model"]


async def test_aiperf(engine: Engine, model: str, tmp_path: Path) -> None:
    async with running_gateway(engine.url, ready=1, health_interval=5.0) as gateway:
        await output_of(
            *(str(PYTHON.parent / "aiperf"), "profile", "--model", model, "--url", gateway.url),
            *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(TOKENIZER)),
            *("--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"),
            *("--request-count", "8", "--concurrency", "2", "--ui", "simple"),
            *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"),
            *("--artifact-dir", str(tmp_path)),
        )
        ok = 'code="200",reason="ok",route="chat_completions"'
        assert await gateway.metric(f"longleaf_gateway_requests_total{{{ok}}}") >= 8
    measured = report_in(tmp_path)
    assert measured["request_count"]["avg"] == 8
    assert measured["time_to_first_token"]["avg"] > 0


def report_in(folder: Path) -> dict[str, Any]:
    (report,) = folder.rglob("profile_export_aiperf.json")
    measured = json.loads(report.read_text())
    assert isinstance(measured, dict)
    return measured
