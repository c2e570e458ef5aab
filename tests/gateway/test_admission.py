"""Who starts, who waits, who is refused: over real sockets, with replicas in the test's hands."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from longleaf.gateway.replicas.loads import parse_step_totals
from tests.gateway.engine import running_engine
from tests.gateway.faulty_replica import (
    DONE,
    FaultyReplica,
    Received,
    answer_captured_chat,
    event,
)
from tests.gateway.running import (
    LIMIT,
    Gateway,
    chat,
    eventually,
    gateway_over,
    running_gateway,
)
from tests.gateway.test_prompts import TINY
from tests.gateway.test_requests import error_of

pytestmark = pytest.mark.anyio

ADMISSION = "/v1/admission"
DEPTH = "longleaf_gateway_queue_depth"
KEEP_READY = {"unhealthy_after": 10**6}


class Held:
    """Generations that the test lets go one by one, in the order of its choice."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self._gates: dict[str, asyncio.Event] = {}
        self._first: dict[str, asyncio.Event] = {}

    async def __call__(self, request: Received) -> None:
        name = str(request.json["user"])
        self.started.append(name)
        await request.start_stream()
        first = self._first.setdefault(name, asyncio.Event())
        await first.wait()
        await request.chunk(event(name))
        await self._gates.setdefault(name, asyncio.Event()).wait()
        await request.chunk(DONE)
        await request.end_stream()

    def has(self, name: str) -> bool:
        return name in self.started

    def count(self, least: int) -> bool:
        return len(self.started) >= least

    def first_token(self, name: str) -> None:
        self._first.setdefault(name, asyncio.Event()).set()

    def end(self, name: str) -> None:
        self.first_token(name)
        self._gates.setdefault(name, asyncio.Event()).set()


def small(replica: FaultyReplica, tokens: int = 1_000, running: int = 1_000) -> None:
    """Give a replica a pool of so many tokens."""
    replica.server_info["max_total_num_tokens"] = tokens
    replica.load = {"max_total_num_tokens": tokens, "max_running_requests": running}


def ask(name: str, prompt: int = 10, **fields: object) -> dict[str, object]:
    """A completion of ``prompt`` token ids: its length is exact without any tokenizer."""
    tokens = [sum(name.encode())] * prompt  # another prefix for each name: nothing is cached
    return {"model": "tiny", "prompt": tokens, "user": name, "stream": True, **fields}


async def post(gateway: Gateway, body: object, **options: Any) -> tuple[int, bytes, Any]:
    status, answer, response = await gateway.raw(body, "/v1/completions", **options)
    return status, answer, response.headers


async def until_depth(gateway: Gateway, depth: int) -> None:
    async with asyncio.timeout(LIMIT):
        while await gateway.metric(DEPTH) != depth:  # noqa: ASYNC110 - it lies behind HTTP
            await asyncio.sleep(0.005)


async def nothing_is_left(gateway: Gateway, replica: FaultyReplica) -> None:
    """No reservation, no waiting request."""
    labels = f'{{replica="{replica.url}"}}'
    names = ("reservations", "reserved_tokens", "prefill_tokens_in_flight")
    async with asyncio.timeout(LIMIT):
        for name in names:
            while await gateway.metric(f"longleaf_gateway_{name}{labels}") != 0:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    await until_depth(gateway, 0)


Use = Callable[[Gateway, FaultyReplica, Held], Awaitable[None]]


async def with_pool(use: Use, tokens: int = 1_000, running: int = 1_000, **settings: Any) -> None:
    """Run ``use`` with a gateway over one replica of that pool; nothing may be left after it."""
    held = Held()
    async with FaultyReplica(held) as replica:
        small(replica, tokens, running)
        async with running_gateway(replica.url, ready=1, **settings) as gateway:
            await use(gateway, replica, held)
            await nothing_is_left(gateway, replica)


async def test_what_does_not_fit_now_waits_until_it_does() -> None:
    async def use(gateway: Gateway, replica: FaultyReplica, held: Held) -> None:
        first = asyncio.create_task(post(gateway, ask("first", 100, max_tokens=500)))
        await eventually(lambda: held.started == ["first"])
        reserved = f'longleaf_gateway_reserved_tokens{{replica="{replica.url}"}}'
        assert await gateway.metric(reserved) == 600
        second = asyncio.create_task(post(gateway, ask("second", 300, max_tokens=101)))
        await until_depth(gateway, 1)
        third = asyncio.create_task(post(gateway, ask("third", 300, max_tokens=100)))
        await eventually(lambda: held.started == ["first", "third"])  # 400: fits beside the first
        held.end("first")
        await eventually(lambda: held.started == ["first", "third", "second"])
        held.end("second")
        held.end("third")
        answers = await asyncio.gather(first, second, third)
        assert [status for status, _, _ in answers] == [200] * 3
        decided = "longleaf_gateway_admission_decisions_total"
        assert await gateway.metric(f'{decided}{{decision="admitted",reason="at_once"}}') == 1
        assert await gateway.metric(f'{decided}{{decision="admitted",reason="waited"}}') == 2

    await with_pool(use)


async def test_reserved_tokens_are_reserved_bytes_of_the_pool() -> None:
    async def use(gateway: Gateway, replica: FaultyReplica, held: Held) -> None:
        gib, labels = 2**30, f'{{replica="{replica.url}"}}'
        assert replica.load is not None
        replica.load["memory"] = {"kv_cache_gb": 4.0}
        first = asyncio.create_task(post(gateway, ask("first", 100, max_tokens=500)))
        await eventually(lambda: held.started == ["first"])
        sample = "longleaf_gateway_reserved_kv_bytes" + labels
        async with asyncio.timeout(LIMIT):
            while await gateway.metric(sample) != 0.6 * 4 * gib:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # 400 rows are left: neither 401 tokens nor their bytes fit.
        second = asyncio.create_task(post(gateway, ask("second", 300, max_tokens=101)))
        await until_depth(gateway, 1)
        held.end("first")
        held.end("second")
        assert [answer[0] for answer in await asyncio.gather(first, second)] == [200, 200]
        assert await gateway.metric(sample) == 0

    await with_pool(use, loads_interval=0.05)


async def test_sequences_are_held_back_too() -> None:
    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        tasks = [
            asyncio.create_task(post(gateway, ask(name, max_tokens=5))) for name in ("a", "b", "c")
        ]
        await until_depth(gateway, 1)
        assert len(held.started) == 2
        for name in ("a", "b", "c"):
            held.end(name)
        assert [answer[0] for answer in await asyncio.gather(*tasks)] == [200] * 3

    await with_pool(use, running=2)


async def test_no_place_until_the_deadline_is_429_with_retry_after() -> None:
    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        first = asyncio.create_task(post(gateway, ask("first", 100, max_tokens=800)))
        await eventually(lambda: held.started == ["first"])
        status, body, headers = await post(gateway, ask("late", 100, max_tokens=100))
        error = error_of(json.loads(body))
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
        assert headers["retry-after"] == "10"  # nothing was ever given back: unknown
        assert "x-should-retry" not in headers
        held.end("first")
        assert (await first)[0] == 200
        refused = 'admission_decisions_total{decision="refused",reason="queue_timeout"}'
        assert await gateway.metric("longleaf_gateway_" + refused) == 1
        assert held.started == ["first"]

    await with_pool(use, queue_timeout=0.1)


async def test_a_full_queue_is_429_at_once() -> None:
    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        first = asyncio.create_task(post(gateway, ask("first", 100, max_tokens=800)))
        await eventually(lambda: held.started == ["first"])
        second = asyncio.create_task(post(gateway, ask("second", 100, max_tokens=100)))
        await until_depth(gateway, 1)
        status, body, _ = await post(gateway, ask("third", 100, max_tokens=100))
        assert (status, b"queue is full" in body) == (429, True)
        held.end("first")
        held.end("second")
        assert [answer[0] for answer in await asyncio.gather(first, second)] == [200, 200]

    await with_pool(use, queue_size=1)


async def test_keys_take_turns_and_priorities_go_first(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("greedy\nmodest\nurgent priority=5\n")
    order = ["g1", "g2", "g3", "m1", "u1", "low"]

    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        def send(name: str, key: str, **fields: object) -> "asyncio.Task[tuple[int, bytes, Any]]":
            headers = {"authorization": f"Bearer {key}"}
            body = ask(name, 100, max_tokens=800, **fields)
            return asyncio.create_task(post(gateway, body, headers=headers))

        tasks = [send("g1", "greedy")]
        await eventually(lambda: held.started == ["g1"])
        asks: list[tuple[str, str, dict[str, object]]] = [
            *[("g2", "greedy", {}), ("g3", "greedy", {}), ("m1", "modest", {})],
            ("u1", "urgent", {}),
            ("low", "urgent", {"priority": -1}),
        ]
        for depth, (name, key, fields) in enumerate(asks, 1):
            tasks.append(send(name, key, **fields))
            await until_depth(gateway, depth)
        expected = ["g1", "u1", "g2", "m1", "g3", "low"]
        for number, name in enumerate(expected, 1):
            held.end(name)
            await eventually(partial(held.count, min(number + 1, 6)))
        assert held.started == expected
        assert [answer[0] for answer in await asyncio.gather(*tasks)] == [200] * len(order)

    await with_pool(use, api_key_file=keys, short_prompt_tokens=10)


async def test_a_wish_for_priority_gets_nobody_above_his_key(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("plain\nurgent priority=5\n")

    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        tasks = []
        for name, key, wish in (("a", "plain", 0), ("b", "plain", 99), ("c", "urgent", 5)):
            body = ask(name, 100, max_tokens=800, priority=wish)
            headers = {"authorization": f"Bearer {key}"}
            tasks.append(asyncio.create_task(post(gateway, body, headers=headers)))
            if name == "a":
                await eventually(lambda: held.started == ["a"])
            else:
                await until_depth(gateway, len(tasks) - 1)
        for name in ("a", "c", "b"):
            held.end(name)
        await asyncio.gather(*tasks)
        assert held.started == ["a", "c", "b"]

    await with_pool(use, api_key_file=keys, short_prompt_tokens=10)


async def test_short_prompts_overtake_a_long_one_within_a_bound() -> None:
    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        first = asyncio.create_task(post(gateway, ask("first", 100, max_tokens=500)))
        await eventually(lambda: held.started == ["first"])
        tasks = [first, asyncio.create_task(post(gateway, ask("long", 600, max_tokens=1)))]
        await until_depth(gateway, 1)
        for name in ("s1", "s2"):
            tasks.append(asyncio.create_task(post(gateway, ask(name, 10, max_tokens=10))))
            await eventually(partial(held.has, name))
        tasks.append(asyncio.create_task(post(gateway, ask("s3", 10, max_tokens=10))))
        await until_depth(gateway, 2)  # there is room, but two have overtaken
        assert held.started == ["first", "s1", "s2"]
        for name in ("first", "s1", "s2"):
            held.end(name)
        await eventually(lambda: held.started[3:] == ["long", "s3"])
        held.end("long")
        held.end("s3")
        assert {answer[0] for answer in await asyncio.gather(*tasks)} == {200}

    await with_pool(use, max_overtakes=2, short_prompt_tokens=50)


async def test_a_full_queue_keeps_none_from_a_place_that_it_may_overtake_for() -> None:
    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        tasks = [asyncio.create_task(post(gateway, ask("first", 100, max_tokens=500)))]
        await eventually(lambda: held.started == ["first"])
        tasks.append(asyncio.create_task(post(gateway, ask("long", 600, max_tokens=1))))
        await until_depth(gateway, 1)  # the queue is full
        tasks.append(asyncio.create_task(post(gateway, ask("short", 10, max_tokens=10))))
        await eventually(lambda: held.started == ["first", "short"])
        refused, _, headers = await post(gateway, ask("more", 10, max_tokens=10))
        assert refused == 429  # there is room, but one has overtaken
        assert int(headers["retry-after"]) >= 1
        assert (await post(gateway, ask("longer", 600, max_tokens=1)))[0] == 429
        for name in ("first", "short", "long"):
            held.end(name)
        assert {answer[0] for answer in await asyncio.gather(*tasks)} == {200}
        assert held.started == ["first", "short", "long"]

    await with_pool(use, max_overtakes=1, short_prompt_tokens=50, queue_size=1)


async def test_who_is_pushed_out_while_his_replica_is_gone_is_told_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice\nbob\n")
    held = Held()
    settings: dict[str, Any] = {"api_key_file": keys, "queue_size": 3, "unhealthy_after": 1}
    settings |= {"health_interval": 0.1, "recovery_interval": 0.1, "short_prompt_tokens": 10}
    async with FaultyReplica(held) as large, FaultyReplica(held) as little:
        small(large, 3_000, 1_000)
        small(little, 1_000, 1_000)
        async with running_gateway(large.url, little.url, ready=2, **settings) as gateway:

            def send(
                key: str, *given: Any, **fields: Any
            ) -> "asyncio.Task[tuple[int, bytes, Any]]":
                headers = {"authorization": f"Bearer {key}"}
                return asyncio.create_task(post(gateway, ask(*given, **fields), headers=headers))

            runs = [send("alice", "a", 1500, max_tokens=1200)]
            await eventually(partial(held.has, "a"))
            runs.append(send("alice", "x", 100, max_tokens=800))
            await eventually(partial(held.has, "x"))
            waits = []
            for depth in (1, 2, 3):  # only the large one holds them
                waits.append(send("alice", f"a{depth}", 1500, max_tokens=100))
                await until_depth(gateway, depth)
            large.health_status = 503
            await gateway.until_ready(1)
            runs.append(send("bob", "b", 300, max_tokens=300))
            status, body, _ = await waits[2]
            assert status == 503
            assert b"ready" in body
            await until_depth(gateway, 3)
            held.end("x")
            await eventually(partial(held.has, "b"))
            large.health_status = 200
            for name in ("a", "b"):
                held.end(name)
            for name in ("a1", "a2"):
                await eventually(partial(held.has, name))
                held.end(name)
            assert [answer[0] for answer in await asyncio.gather(*runs, *waits[:2])] == [200] * 5
            for replica in (large, little):
                await nothing_is_left(gateway, replica)


async def test_one_long_prefill_at_a_time_and_short_ones_beside_it() -> None:
    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        tasks = [asyncio.create_task(post(gateway, ask("long1", 3_000, max_tokens=1)))]
        await eventually(lambda: held.started == ["long1"])
        tasks.append(asyncio.create_task(post(gateway, ask("long2", 1_100, max_tokens=1))))
        await until_depth(gateway, 1)
        tasks.append(asyncio.create_task(post(gateway, ask("short", 50, max_tokens=1))))
        await eventually(lambda: held.started == ["long1", "short"])
        held.first_token("long1")  # its prefill is over, its answer is not
        await eventually(lambda: held.started == ["long1", "short", "long2"])
        for name in ("long1", "short", "long2"):
            held.end(name)
        assert {answer[0] for answer in await asyncio.gather(*tasks)} == {200}

    await with_pool(
        use, tokens=20_000, max_prefill_tokens=1_000, short_prompt_tokens=100, max_body_bytes=10**7
    )


@pytest.mark.parametrize("when", ["waiting", "running", "streaming"])
async def test_clients_that_vanish_leave_no_reservation(when: str) -> None:
    async def use(gateway: Gateway, replica: FaultyReplica, held: Held) -> None:
        for _ in range(5):
            names = [f"{when}{number}" for number in range(4)]
            held.started.clear()
            tasks = [
                asyncio.create_task(post(gateway, ask(name, 100, max_tokens=700))) for name in names
            ]
            await until_depth(gateway, 3)
            await eventually(lambda: len(held.started) == 1)
            if when == "streaming":
                held.first_token(held.started[0])
            gone = [
                task
                for name, task in zip(names, tasks, strict=True)
                if (name in held.started) == (when != "waiting")
            ]
            for task in gone:
                task.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            for name in names:
                held.end(name)
            await asyncio.gather(*tasks, return_exceptions=True)
            await nothing_is_left(gateway, replica)
            held._gates.clear()
            held._first.clear()

    await with_pool(use)


async def test_a_replica_that_dies_gives_everything_back_and_the_queue_moves_on() -> None:
    async def die(request: Received) -> None:
        request.reset()

    async def use(gateway: Gateway, replica: FaultyReplica, held: Held) -> None:
        tasks = [
            asyncio.create_task(post(gateway, ask(str(number), 100, max_tokens=700)))
            for number in range(3)
        ]
        await until_depth(gateway, 2)
        replica.behaviour = die
        await replica.stop()
        await replica.start()
        answers = await asyncio.gather(*tasks)
        assert [status for status, _, _ in answers] == [503] * 3
        await nothing_is_left(gateway, replica)
        replica.behaviour = held
        held.end("again")
        await gateway.until_ready(1)
        assert (await post(gateway, ask("again", 100, max_tokens=700)))[0] == 200

    await with_pool(use, **KEEP_READY)


async def test_a_replica_that_returns_with_a_smaller_pool() -> None:
    """What waits and can no longer fit is refused at once; what fits goes on; so do the limits."""

    async def use(gateway: Gateway, replica: FaultyReplica, held: Held) -> None:
        first = asyncio.create_task(post(gateway, ask("first", 100, max_tokens=700)))
        await eventually(lambda: held.started == ["first"])
        large = asyncio.create_task(post(gateway, ask("large", 500, max_tokens=300)))
        fitting = asyncio.create_task(post(gateway, ask("fitting", 100, max_tokens=300)))
        await until_depth(gateway, 2)
        held.end("fitting")
        await replica.stop()
        small(replica, 450)
        await replica.start()
        status, body, _ = await large
        error = error_of(json.loads(body))
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert "450" in error["message"]
        assert (await fitting)[0] == 200
        assert (await first)[0] == 503
        status, body, _ = await post(gateway, ask("new", 100, max_tokens=351))
        assert status == 400
        capacity = f'longleaf_gateway_kv_capacity_tokens{{replica="{replica.url}"}}'
        assert await gateway.metric(capacity) == 450

    await with_pool(use, loads_interval=0.02, unhealthy_after=1, short_prompt_tokens=0)


async def test_what_others_use_is_seen_in_the_reports() -> None:
    async def use(gateway: Gateway, replica: FaultyReplica, held: Held) -> None:
        first = asyncio.create_task(post(gateway, ask("first", 10, max_tokens=90)))
        await eventually(lambda: held.started == ["first"])
        assert replica.load is not None
        replica.load |= {"num_running_reqs": 3, "num_used_tokens": 900}
        external = f'longleaf_gateway_external_tokens{{replica="{replica.url}"}}'
        async with asyncio.timeout(LIMIT):
            while await gateway.metric(external) != 800:  # noqa: ASYNC110 - it lies behind HTTP
                await asyncio.sleep(0.005)
        second = asyncio.create_task(post(gateway, ask("second", 100, max_tokens=100)))
        await until_depth(gateway, 1)
        replica.load |= {"num_running_reqs": 1, "num_used_tokens": 50}
        await eventually(lambda: held.started == ["first", "second"])
        held.end("first")
        held.end("second")
        await asyncio.gather(first, second)

    await with_pool(use, loads_interval=0.02)


async def test_retry_after_is_the_time_that_draining_takes() -> None:
    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        for number in range(3):  # three times 900 tokens
            running = asyncio.create_task(post(gateway, ask(str(number), 100, max_tokens=800)))
            await eventually(partial(held.count, number + 1))
            await asyncio.sleep(0.4)
            held.end(str(number))
            await running
        last = asyncio.create_task(post(gateway, ask("last", 100, max_tokens=800)))
        await eventually(lambda: len(held.started) == 4)
        waiting = [
            asyncio.create_task(post(gateway, ask(f"w{number}", 100, max_tokens=800)))
            for number in range(9)
        ]
        await until_depth(gateway, 9)
        status, _, headers = await post(gateway, ask("more", 100, max_tokens=800))
        # Ten times 900 tokens, of which 100 are free, at 2,700 tokens in the busy time.
        expected = (10 * 900 - 100) / (2_700 / (loop.time() - begin))
        assert status == 429
        assert int(headers["retry-after"]) == pytest.approx(expected, rel=0.3, abs=1)
        for name in ("last", *(f"w{number}" for number in range(9))):
            held.end(name)
        assert {answer[0] for answer in await asyncio.gather(last, *waiting)} == {200}

    await with_pool(use, queue_size=9)


async def test_retry_after_goes_by_the_turns_of_those_who_waited() -> None:
    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(post(gateway, ask("0", 100, max_tokens=800)))]
        await eventually(partial(held.count, 1))
        begin = loop.time()
        for number in range(1, 13):
            tasks.append(asyncio.create_task(post(gateway, ask(str(number), 100, max_tokens=800))))
            await until_depth(gateway, number)
        for number in range(4):  # four turns, whatever the pool has been giving back before
            await asyncio.sleep(0.4)
            held.end(held.started[-1])
            await eventually(partial(held.count, number + 2))
        tasks += [
            asyncio.create_task(post(gateway, ask(str(number), 100, max_tokens=800)))
            for number in range(13, 17)
        ]
        await until_depth(gateway, 12)
        status, _, headers = await post(gateway, ask("more", 100, max_tokens=800))
        assert status == 429
        expected = 13 * (loop.time() - begin) / 4
        assert int(headers["retry-after"]) == pytest.approx(expected, rel=0.3, abs=1)
        for number in range(17):
            held.end(str(number))
        assert {answer[0] for answer in await asyncio.gather(*tasks)} == {200}

    await with_pool(use, queue_size=12)


async def test_a_place_at_once_is_no_turn_of_those_who_waited() -> None:
    """Short prompts that found room beside a long one say nothing of how long a full pool takes."""

    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(post(gateway, ask("running", 100, max_tokens=800)))]
        await eventually(partial(held.count, 1))
        begin = loop.time()
        tasks.append(asyncio.create_task(post(gateway, ask("long", 100, max_tokens=800))))
        await until_depth(gateway, 1)
        for number in range(2, 8):
            short = asyncio.create_task(post(gateway, ask(str(number), 10, max_tokens=40)))
            await eventually(partial(held.count, number))
            await asyncio.sleep(0.2)
            held.end(str(number))
            await short
        for number in range(8, 10):  # the hundred tokens that are free
            tasks.append(asyncio.create_task(post(gateway, ask(str(number), 10, max_tokens=40))))
            await eventually(partial(held.count, number))
        tasks.append(asyncio.create_task(post(gateway, ask("10", 10, max_tokens=40))))
        await until_depth(gateway, 2)
        status, _, headers = await post(gateway, ask("more", 10, max_tokens=40))
        # 900 + 50 + 50 tokens, at the 300 that the pool gave back meanwhile.
        expected = 1_000 / (300 / (loop.time() - begin))
        assert status == 429
        assert int(headers["retry-after"]) == pytest.approx(expected, rel=0.3, abs=1)
        for name in ("running", "long", "8", "9", "10"):
            held.end(name)
        assert {answer[0] for answer in await asyncio.gather(*tasks)} == {200}

    await with_pool(use, queue_size=2, short_prompt_tokens=50)


async def test_a_model_whose_replica_is_still_starting_is_503_not_404() -> None:
    async with FaultyReplica() as running, FaultyReplica() as starting:
        starting.health_status = 503
        async with running_gateway(running.url, starting.url, ready=1) as gateway:
            status, body, response = await gateway.answer(chat(model="theirs"))
            assert (status, error_of(body)["code"]) == (503, "service_unavailable")
            assert "retry-after" in response.headers
            starting.health_status = 200
            await gateway.until_ready(2)
            status, body, _ = await gateway.answer(chat(model="theirs" * 1000))
            error = error_of(body)
            assert (status, error["code"]) == (404, "model_not_found")
            assert len(error["message"]) < 200


async def test_admission_answers_without_running_anything() -> None:
    async with gateway_over(answer_captured_chat) as (gateway, (replica,)):
        status, body, _ = await gateway.answer(chat(max_tokens=100), ADMISSION)
        assert status == 200
        assert (body["admitted"], body["reason"], body["status"]) == (True, "ok", 200)
        assert (body["prompt_tokens"], body["max_tokens"]) == (14, 100)
        assert (body["reserved_tokens"], body["replica"]) == (114, replica.url)
        assert (body["queue_position"], body["queue_seconds"]) == (0, 0.0)
        assert body["ttft_seconds"] is None
        assert body["seconds_per_token"] is None
        _, body, _ = await gateway.answer({"model": "tiny", "prompt": [1, 2]}, ADMISSION)
        assert (body["admitted"], body["prompt_tokens"], body["reserved_tokens"]) == (True, 2, 18)
        _, body, _ = await gateway.answer(chat(n=3), ADMISSION)
        assert body["reserved_tokens"] == 14 + 3 * 4_096
        _, body, _ = await gateway.answer(chat(model="other"), ADMISSION)
        assert (body["admitted"], body["reason"], body["status"]) == (False, "model_not_found", 404)
        _, body, _ = await gateway.answer(chat(max_tokens=5_000), ADMISSION)
        assert (body["reason"], body["status"]) == ("context_length_exceeded", 400)
        assert "5014" in body["message"]
        status, body, _ = await gateway.answer({"model": "tiny"}, ADMISSION)
        assert (status, error_of(body)["param"]) == (400, "messages")
        status, body, _ = await gateway.answer(chat(temperature=-1), ADMISSION)
        assert (status, error_of(body)["param"]) == (400, "temperature")
        assert replica.generations == []
        replica.health_status = 503
        async with running_gateway(replica.url) as starting:
            _, body, _ = await starting.answer(chat(), ADMISSION)
            assert (body["admitted"], body["status"]) == (False, 503)
            assert body["retry_after"] >= 1


async def test_admission_tells_what_a_request_would_wait_for() -> None:
    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        first = asyncio.create_task(post(gateway, ask("first", 100, max_tokens=800)))
        await eventually(lambda: held.started == ["first"])
        _, body, _ = await gateway.answer(ask("x", 100, max_tokens=100), ADMISSION)
        assert (body["admitted"], body["reason"], body["status"]) == (False, "kv_pool", 200)
        assert (body["queue_position"], body["queue_seconds"]) == (0, 10.0)  # rate unknown
        second = asyncio.create_task(post(gateway, ask("second", 100, max_tokens=100)))
        await until_depth(gateway, 1)
        _, body, _ = await gateway.answer(ask("x", 10, max_tokens=10), ADMISSION)
        assert (body["admitted"], body["reason"], body["queue_position"]) == (False, "queue", 1)
        held.end("first")
        held.end("second")
        await asyncio.gather(first, second)

    await with_pool(use)


async def test_what_is_told_of_the_queue_is_that_of_the_key_and_its_priority(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("many\nfew\nurgent priority=5\nbatch priority=-5\n")

    async def use(gateway: Gateway, __: FaultyReplica, held: Held) -> None:
        headers = {"authorization": "Bearer many"}
        tasks = [asyncio.create_task(post(gateway, ask("r", 100, max_tokens=800), headers=headers))]
        await eventually(lambda: held.started == ["r"])
        for depth in range(1, 5):
            body = ask(f"w{depth}", 100, max_tokens=800)
            tasks.append(asyncio.create_task(post(gateway, body, headers=headers)))
            await until_depth(gateway, depth)
        found = {}
        for key in ("urgent", "few", "many", "batch"):
            headers = {"authorization": f"Bearer {key}"}
            _, body, _ = await gateway.answer(ask("x", 100), ADMISSION, headers=headers)
            found[key] = body["queue_position"]
        assert found == {"urgent": 0, "few": 1, "many": 4, "batch": 4}
        for name in ("r", *(f"w{depth}" for depth in range(1, 5))):
            await eventually(partial(held.has, name))
            held.end(name)
        await asyncio.gather(*tasks)

    await with_pool(use, api_key_file=keys, short_prompt_tokens=10, aging_interval=100)


async def test_with_a_real_engine() -> None:
    """Twelve answers through a pool for four: all come, all exactly counted."""
    limits = ("--max-total-tokens", "1200", "--max-running-requests", "6", "--context-length")
    settings: dict[str, Any] = {"tokenizers": (str(TINY),), "loads_interval": 0.05}
    with running_engine(*limits, "1000") as engine:
        async with running_gateway(engine.url, ready=1, queue_timeout=120, **settings) as gateway:
            word = "Count from 1 to 20 and say why. "

            async def one(number: int) -> tuple[int, int]:
                messages = [{"role": "user", "content": word * (4 + number)}]
                body = {"model": "tiny-target", "messages": messages, "max_tokens": 60}
                _, forecast, _ = await gateway.answer(body, ADMISSION)
                status, answer, _ = await gateway.answer(body)
                assert status == 200
                return forecast["prompt_tokens"], answer["usage"]["prompt_tokens"]

            async with asyncio.timeout(200):
                counts = await asyncio.gather(*(one(number) for number in range(12)))
            assert all(ours == theirs for ours, theirs in counts)
            up = f'longleaf_gateway_tokenizer_up{{tokenizer="{TINY}"}}'
            assert await gateway.metric(up) == 1  # compared with the engine's
            load = engine.get("/v1/loads")["loads"][0]
            assert load["num_waiting_reqs"] == 0
            residual = f'longleaf_gateway_step_model_residual{{replica="{engine.url}"}}'
            assert 0 <= await gateway.metric(residual) < 5
            body = {"model": "tiny-target", "messages": [{"role": "user", "content": word * 9}]}
            async with gateway.http.get(engine.url + "/metrics") as told:
                totals = parse_step_totals(await told.text())
            assert totals is not None
            assert 1 <= totals.tokens / totals.steps <= 8
            _, forecast, _ = await gateway.answer({**body, "max_tokens": 10}, ADMISSION)
            assert forecast["admitted"]
            assert 0 < forecast["ttft_seconds"] < 60
            assert 0 < forecast["seconds_per_token"] < 5
            _, refused, _ = await gateway.answer({**body, "max_tokens": 990}, ADMISSION)
            assert (refused["status"], refused["reason"]) == (400, "context_length_exceeded")


async def test_the_slo_holds_requests_back_until_the_deadline() -> None:
    async def use(gateway: Gateway, replica: FaultyReplica, held: Held) -> None:
        steps = 0

        def tell() -> None:
            """Reports of an engine whose steps take 10 ms a sequence."""
            nonlocal steps
            steps += 100
            assert replica.load is not None
            moments = [steps, steps, steps * 10_000, steps, steps * 10_000, steps]
            replica.load |= {"decode_moments": moments, "num_running_reqs": 1}

        tell()
        fitted = f'longleaf_gateway_step_model_residual{{replica="{replica.url}"}}'
        async with asyncio.timeout(LIMIT):
            while not await gateway.metric(fitted) < 0.01:
                tell()
                await asyncio.sleep(0.03)
        first = asyncio.create_task(post(gateway, ask("first", 10, max_tokens=5)))
        await eventually(lambda: held.started == ["first"])
        _, body, _ = await gateway.answer(ask("x", 10, max_tokens=5), ADMISSION)
        assert (body["admitted"], body["reason"]) == (False, "tpot")
        assert (await post(gateway, ask("second", 10, max_tokens=5)))[0] == 429
        held.end("first")
        await first

    await with_pool(use, loads_interval=0.02, tpot_ms=9.0, queue_timeout=0.2)
