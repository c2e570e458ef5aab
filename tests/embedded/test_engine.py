"""The engine's thread: streams, cancels, and an end that leaves nobody waiting."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from longleaf.embedded.engine import Engine, EngineDeadError
from longleaf.embedded.load import LoadedModels
from longleaf.embedded.options import EngineOptions
from longleaf.embedded.request import Finish, FinishKind, GenerationRequest, StepEvent
from longleaf.metrics import EngineMetrics

pytestmark = pytest.mark.anyio

Ask = Callable[..., GenerationRequest]


@pytest.fixture
def engine(fresh: Callable[..., LoadedModels], engine_options: EngineOptions) -> Iterator[Engine]:
    with fresh().start(engine_options, EngineMetrics(CollectorRegistry())) as engine:
        yield engine


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)


async def test_streams_equal_what_a_thread_gets(engine: Engine, ask: Ask) -> None:
    whole = engine.generate(ask("Hello there", max_tokens=24), timeout=30)
    assert whole.finish == Finish(FinishKind.LENGTH)

    async def one() -> StepEvent:
        events = [event async for event in engine.stream(ask("Hello there", max_tokens=24))]
        assert len(events) > 1
        assert "".join(event.text for event in events) == whole.text
        return events[-1]

    lasts = await asyncio.gather(*(one() for _ in range(4)))
    assert {last.usage.completion_tokens for last in lasts} == {24}


async def test_leaving_a_stream_cancels(engine: Engine, ask: Ask) -> None:
    async with engine.stream(ask("Hello", max_tokens=1500)) as stream:
        await stream.next_event()
        await until(lambda: engine.snapshot.num_running_reqs == 1)
    await until(lambda: engine.snapshot.num_running_reqs == 0)
    assert engine.snapshot.num_used_tokens == 0


async def test_abort_ends_the_stream(engine: Engine, ask: Ask) -> None:
    async with engine.stream(ask("Hello", max_tokens=1500, rid="xyz-1")) as stream:
        await stream.next_event()
        engine.abort("xyz")
        last = await stream.collect()
    assert last.finish == Finish(FinishKind.ABORT)


async def test_a_dying_thread_ends_every_request(
    fresh: Callable[..., LoadedModels], engine_options: EngineOptions, ask: Ask
) -> None:
    engine = fresh().start(engine_options, EngineMetrics(CollectorRegistry()))
    assert engine.health.alive
    async with engine.stream(ask("Hello", max_tokens=1500)) as stream:
        await stream.next_event()
        # Planted corruption: the next allocation finds that slots are lost. What comes meanwhile
        # must be answered too.
        engine._scheduler.memory.slots._num_free = 0
        late = [engine.stream(ask("Late", max_tokens=1500)) for _ in range(3)]
        last = await stream.collect()
        for other in late:
            finish = (await other.collect()).finish
            assert finish is not None
            assert finish.status == 503
    assert last.finish is not None
    assert (last.finish.kind, last.finish.status) == (FinishKind.ERROR, 503)
    assert "the engine's thread died" in last.finish.message
    await until(lambda: not engine.health.alive)
    assert "SlotError" in engine.health.cause
    with pytest.raises(EngineDeadError, match="died"):
        engine.stream(ask("Hello"))
    engine.abort("")
    engine.close()


async def test_closing_ends_what_runs(
    fresh: Callable[..., LoadedModels], engine_options: EngineOptions, ask: Ask
) -> None:
    engine = fresh().start(engine_options, EngineMetrics(CollectorRegistry()))
    stream = engine.stream(ask("Hello", max_tokens=1500))
    await stream.next_event()
    closer = threading.Thread(target=engine.close)
    closer.start()
    last = await stream.collect()
    closer.join(30)
    assert last.finish is not None
    assert last.finish.message == "the engine is closed"
    with pytest.raises(EngineDeadError):
        engine.generate(ask("Hello"))
    assert not any(thread.name == "longleaf-engine" for thread in threading.enumerate())


async def test_the_snapshot_moves_while_idle(engine: Engine) -> None:
    first = engine.snapshot.timestamp
    await until(lambda: engine.snapshot.timestamp > first)
    assert engine.health.stalled_seconds < 5


def test_a_thread_can_give_up(engine: Engine, ask: Ask) -> None:
    with pytest.raises(TimeoutError, match="no event for 0"):
        engine.generate(ask(list(range(10, 1500))), timeout=0)
    deadline = time.monotonic() + 20
    while engine.snapshot.num_running_reqs or engine.snapshot.num_used_tokens:
        assert time.monotonic() < deadline
        time.sleep(0.01)
