"""Fuzz the OpenAPI document: every answer is a declared one, no 5xx, never FastAPI's 422 shape."""

import asyncio
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core.result import Ok

from tests.gateway.faulty_replica import answer_captured_chat
from tests.gateway.running import gateway_over

pytestmark = pytest.mark.anyio

CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]
EVERYTHING = list(HealthCheck)


def fuzz(url: str, document: dict[str, Any], mode: GenerationMode) -> Counter[tuple[str, int]]:
    """Ask as the document allows, or forbids; statuses seen, by path."""
    seen: Counter[tuple[str, int]] = Counter()
    schema = schemathesis.openapi.from_dict(document)

    def check(operation: APIOperation[Any, Any, Any, Any]) -> None:
        @settings(
            max_examples=15,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=EVERYTHING,
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Case[Any]) -> None:
            if isinstance(case.body, dict) and case.body.get("model"):
                case.body["model"] = "tiny"  # else all that is seen is 404
            response = case.call(base_url=url)
            seen[operation.path, response.status_code] += 1
            assert response.status_code < 500
            if response.status_code >= 400 and operation.method != "head":
                answer = response.json()
                assert answer.keys() == {"error"}
                assert answer["error"].keys() == {"message", "type", "param", "code"}
            if response.status_code != 405:  # of methods that nothing declares
                case.validate_response(response, checks=CHECKS)

        ask()

    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        if (
            mode is GenerationMode.POSITIVE or operation.method == "post"
        ):  # a GET takes no wrong data
            check(operation)
    return seen


@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_fuzz(mode: GenerationMode) -> None:
    async with gateway_over(answer_captured_chat) as (gateway, _):
        async with gateway.http.get(gateway.url + "/openapi.json") as response:
            document = await response.json()
        seen = await asyncio.to_thread(fuzz, gateway.url, document, mode)
    paths = {path for path, _ in seen}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/admission"} <= paths
    expected = 200 if mode is GenerationMode.POSITIVE else 400
    assert seen["/v1/chat/completions", expected] > 0
