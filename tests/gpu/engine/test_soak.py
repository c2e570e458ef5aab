"""Two thousand requests, with prefixes to 60k tokens, leaves and retractions: nothing is lost."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from ops.gpu.client import Client, EngineError
from ops.gpu.timing import random_prompt
from tests.gpu.engine.fleet import Fleet
from tests.gpu.engine.test_requests import wait_until_free

REQUESTS = 2000
AT_ONCE = 24
DOCUMENTS = 3
"""Together a little more than the pool holds: most prefixes are found, some are evicted."""
LONGEST = 60_000
SHORTEST = 10_000


@dataclass(frozen=True, slots=True)
class Job:
    """One request. leaves_after: events after which the client goes; None: it stays."""

    prompt: list[int]
    tokens: int
    temperature: float
    leaves_after: int | None


def jobs() -> list[Job]:
    """Requests over a few long documents: most of each prompt is a prefix that others share."""
    draw = random.Random(3)
    documents = [random_prompt(LONGEST, seed) for seed in range(DOCUMENTS)]
    made = []
    for number in range(REQUESTS):
        document = documents[draw.randrange(DOCUMENTS)]
        length = draw.randrange(SHORTEST, LONGEST - 200, 2500)
        tail = random_prompt(draw.randrange(1, 120), 1000 + number)
        made.append(
            Job(
                prompt=document[:length] + tail,
                tokens=draw.choice((1, 4, 16, 16, 48, 160)),
                temperature=draw.choice((0.0, 0.0, 0.8)),
                leaves_after=draw.choice((1, 3)) if draw.random() < 0.15 else None,
            )
        )
    return made


def run(client: Client, job: Job) -> tuple[str, int]:
    """Ask, and say how it ended and how often it was retracted."""
    if job.leaves_after is not None:
        return leave(client, job), 0
    answer = client.generate(job.prompt, job.tokens, temperature=job.temperature, timeout=240)
    retracted = int(answer.meta["num_retractions"])
    if len(answer.tokens) != job.tokens:
        return f"{len(answer.tokens)} of {job.tokens} tokens", retracted
    return answer.finish, retracted


def leave(client: Client, job: Job) -> str:
    """Ask for a long answer and close the connection after some events."""
    sampling: dict[str, Any] = {
        "max_new_tokens": 2000,
        "temperature": job.temperature,
        "ignore_eos": True,
    }
    body = {"input_ids": job.prompt, "stream": True, "sampling_params": sampling}
    with client.start_stream(body, timeout=240) as response:
        for _ in range(2 * (job.leaves_after or 1)):
            response.readline()
    return "left"


@pytest.mark.timeout(540)
@pytest.mark.servers("soak")
def test_a_soak_leaks_no_slot_and_loses_no_answer(fleet: Fleet) -> None:
    client = fleet.client("soak")
    probe = random_prompt(3000, 99)
    client.post("/flush_cache", {})
    start = client.free_tokens()
    first = client.generate(probe, 64).tokens
    ends: Counter[str] = Counter()
    retractions = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for future in [pool.submit(run, client, job) for job in jobs()]:
            try:
                end, retracted = future.result()
                ends[end] += 1
                retractions += retracted
            except (EngineError, OSError) as error:
                ends[str(error)[:120]] += 1
    print(f"ends {dict(ends)}, {retractions} retractions")
    assert set(ends) == {"length", "left"}
    assert retractions > 0
    free = wait_until_free(client, start)
    print(f"soak_leaked_tokens {start - free}")
    assert free == start
    assert client.generate(probe, 64).tokens == first
    client.post("/flush_cache", {})
    assert wait_until_free(client, start) == start
