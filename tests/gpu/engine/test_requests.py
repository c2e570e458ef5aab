"""What else a request may ask for: schemas, log-probabilities, stops; and leaving early."""

import http.client
import json
import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from ops.bench.prompts import PromptSource
from ops.gpu.client import Client
from ops.gpu.judge import GAP, partings, wrong
from ops.gpu.reference import NODES
from tests.gpu.engine.fleet import Fleet, ask_all

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}


@pytest.mark.servers("ddtree")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_to_a_schema_are_valid_beside_free_ones(
    fleet: Fleet, source: PromptSource, temperature: float
) -> None:
    client = fleet.client("ddtree")
    free = [prompt.tokens.tolist() for prompt in source.cut("prose", 200, 1)]
    alone = [client.generate(prompt, 96).tokens for prompt in free]

    def constrained(number: int) -> str:
        return client.generate(
            f"A record with a name, a count and tags, number {number}: ",
            160,
            temperature=temperature,
            ignore_eos=False,
            json_schema=json.dumps(SCHEMA),
        ).text

    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(constrained, number) for number in range(6)]
        beside = [pool.submit(client.generate, prompt, 96) for prompt in free]
        records = [json.loads(text.result()) for text in texts]
    for record in records:
        assert set(record) == {"name", "count", "tags"}
        assert isinstance(record["name"], str)
        assert 0 <= record["count"] <= 999
        assert set(record["tags"]) <= {"a", "b", "c"}
        assert 1 <= len(record["tags"]) <= 3
    same = [future.result().tokens == tokens for future, tokens in zip(beside, alone, strict=True)]
    assert sum(same) >= len(same) - 1  # one may part by rounding: another batch, other kernels


@pytest.mark.servers("plain", "ddtree")
def test_log_probabilities_are_those_without_speculation(
    fleet: Fleet, source: PromptSource
) -> None:
    prompts = [prompt.tokens.tolist() for prompt in source.cut("code", 400, 1)]
    references = ask_all(fleet.client("plain"), prompts, 64, top_logprobs=3)
    answers = ask_all(fleet.client("ddtree"), prompts, 64, top_logprobs=3)
    assert wrong(partings(answers, references)) == []
    ends = {item.prompt: item.position for item in partings(answers, references)}
    compared = 0
    for index, (answer, reference) in enumerate(zip(answers, references, strict=True)):
        assert len(answer.logprobs) == len(answer.top_logprobs) == 64
        for at in range(ends.get(index, 64)):
            compared += 1
            assert answer.logprobs[at] == pytest.approx(reference.logprobs[at], abs=GAP)
            assert answer.logprobs[at] == answer.top_logprobs[at][0][0]
    assert compared >= 64 * len(prompts) // 2


@pytest.mark.servers("plain", "ddtree")
def test_penalties_are_those_of_every_token_before(fleet: Fleet, source: PromptSource) -> None:
    """Each token is what plain decoding takes where the same is asked for as a bias."""
    prompt = source.cut("prose", 200, 1)[0].tokens.tolist()
    answer = fleet.client("ddtree").generate(prompt, 48, frequency_penalty=1.5)
    free = fleet.client("ddtree").generate(prompt, 48)
    assert answer.tokens != free.tokens
    plain = fleet.client("plain")
    for at, token in enumerate(answer.tokens):
        before = answer.tokens[:at]
        bias = {str(known): -1.5 * count for known, count in Counter(before).items()}
        one = plain.generate([*prompt, *before], 1, top_logprobs=3, logit_bias=bias or None)
        known = {other: value for value, other in one.top_logprobs[0]}
        assert known[one.tokens[0]] - known.get(token, -math.inf) <= GAP, at


@pytest.mark.servers("ddtree")
def test_a_least_number_of_tokens_holds(fleet: Fleet) -> None:
    prompt = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "
    client = fleet.client("ddtree")
    ends = client.generate(prompt, 40).tokens
    stops = sorted(set(ends[4:8]))
    answer = client.generate(prompt, 40, ignore_eos=False, stop_token_ids=stops, min_new_tokens=20)
    assert len(answer.tokens) > 20
    assert answer.finish == ("length" if len(answer.tokens) == 40 else "stop")
    assert not set(answer.tokens[:20]) & set(stops)


@pytest.mark.servers("plain", "ddtree")
def test_stop_strings_end_an_answer_within_a_step(fleet: Fleet, source: PromptSource) -> None:
    prompt = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "
    plain, ours = (
        fleet.client(name).generate(prompt, 64, stop=["17"]) for name in ("plain", "ddtree")
    )
    assert ours.finish == "stop"
    assert ours.text == plain.text
    assert "16" in ours.text
    assert "17" not in ours.text


@pytest.mark.servers("ddtree")
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 31])
def test_max_tokens_is_exact(fleet: Fleet, source: PromptSource, tokens: int) -> None:
    answer = fleet.client("ddtree").generate("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ", tokens)
    assert (len(answer.tokens), answer.finish) == (tokens, "length")


def wait_until_free(client: Client, tokens: int, seconds: float = 20.0) -> int:
    """Wait until that many slots are free, and return how many are in the end."""
    end = time.monotonic() + seconds
    while (free := client.free_tokens()) < tokens and time.monotonic() < end:
        time.sleep(0.1)
    return free


@pytest.mark.servers("ddtree")
def test_slots_of_abandoned_answers_come_back(fleet: Fleet, source: PromptSource) -> None:
    client = fleet.client("ddtree")
    prompts = [prompt.tokens.tolist() for prompt in source.cut("prose", 600, 2)][:8]
    start = wait_until_free(client, client.free_tokens())
    streams: list[http.client.HTTPResponse] = []
    for prompt in prompts:
        response = client.start_stream(
            {
                "input_ids": prompt,
                "stream": True,
                "sampling_params": {
                    "max_new_tokens": 4000,
                    "temperature": 0.8,
                    "ignore_eos": True,
                },
            }
        )
        response.readline()
        streams.append(response)
    for response in streams:
        response.close()
    assert wait_until_free(client, start) == start


@pytest.mark.servers("plain", "ddtree-retracting")
def test_retracted_answers_are_whole(fleet: Fleet, source: PromptSource) -> None:
    """The server retracts a request every 20 steps; answers go on as if nothing had happened."""
    prompts = [prompt.tokens.tolist() for prompt in source.cut("prose", 500, 2)][:8]
    references = ask_all(fleet.client("plain"), prompts, 200, top_logprobs=3)
    client = fleet.client("ddtree-retracting")
    start = client.free_tokens()
    answers = ask_all(client, prompts, 200)
    assert sum(int(answer.meta["num_retractions"]) for answer in answers) > 0
    assert wrong(partings(answers, references)) == []
    assert wait_until_free(client, start) == start


@pytest.mark.servers("plain", "ddtree")
def test_follow_ups_of_few_tokens_answer_as_whole_prompts_do(
    fleet: Fleet, source: PromptSource
) -> None:
    """Extends of few tokens over a cached prefix run in a verify graph, alone and batched."""
    client = fleet.client("ddtree")
    prompts = [prompt.tokens.tolist() for prompt in source.cut("code", 700, 1)][:NODES]
    client.post("/flush_cache", {})
    ask_all(client, [prompt[: -1 - index] for index, prompt in enumerate(prompts)], 1)
    log = fleet.server("ddtree").log
    seen = log.stat().st_size
    alone = [client.generate(prompt, 64) for prompt in prompts[:3]]
    together = ask_all(client, prompts[3:], 64)
    cached = [answer.cached_tokens for answer in (*alone, *together)]
    assert all(len(prompt) - count <= NODES for prompt, count in zip(prompts, cached, strict=True))
    with log.open() as text:
        text.seek(seen)
        prefills = [line for line in text if "Prefill batch" in line]
    assert prefills
    assert all("cuda graph: True" in line for line in prefills)
    references = ask_all(fleet.client("plain"), prompts, 64, top_logprobs=3)
    assert wrong(partings([*alone, *together], references)) == []
