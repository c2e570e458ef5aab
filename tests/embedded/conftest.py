"""Real models for the engine's tests, loaded once; a pool and a scheduler for each test."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.load import DEFAULT_MODELS, LoadedModels, load_models
from longleaf.embedded.options import EngineOptions, SpeculativeAlgorithm, SpeculativeOptions
from longleaf.embedded.recorder import Recorder
from longleaf.embedded.request import GenerationRequest, StepEvent, join
from longleaf.embedded.scheduler import Scheduler
from longleaf.metrics import EngineMetrics

MODELS = Path(os.environ.get("LONGLEAF_TEST_MODELS", DEFAULT_MODELS))


class Bench:
    """A scheduler driven by hand, and the events of every request."""

    def __init__(self, scheduler: Scheduler, registry: CollectorRegistry) -> None:
        self.scheduler = scheduler
        self.registry = registry
        self.events: dict[str, list[StepEvent]] = {}

    def add(self, request: GenerationRequest) -> None:
        events = self.events.setdefault(request.rid, [])
        self.scheduler.add(request, events.append)

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if self.scheduler.idle:
                return
            self.scheduler.step()
        raise AssertionError(f"requests still there after {limit} steps")

    def complete(self, *requests: GenerationRequest) -> list[StepEvent]:
        """Run ``requests`` together; the whole answer of each."""
        for request in requests:
            self.add(request)
        self.run()
        return [self.answer(request.rid) for request in requests]

    def answer(self, rid: str) -> StepEvent:
        events = self.events[rid]
        whole = events[0]
        for event in events[1:]:
            whole = join(whole, event)
        assert whole.finish is not None, f"{rid} has not ended"
        assert sum(event.finish is not None for event in events) == 1
        return whole

    def owners(self) -> tuple[int, int, int]:
        """Slots used by requests, cached, free: counted slot by slot."""
        memory = self.scheduler.memory
        memory.slots.audit()
        counts = (memory.used, memory.cache.num_evictable, memory.slots.num_free)
        assert sum(counts) == memory.slots.capacity
        return counts


MakeBench = Callable[..., Bench]


@pytest.fixture(scope="session")
def engine_options() -> EngineOptions:
    return EngineOptions(
        target=MODELS / "tiny-target",
        drafter=MODELS / "tiny-drafter",
        served_model_name="tiny",
        max_total_tokens=4096,
    )


@pytest.fixture(scope="session")
def loaded(engine_options: EngineOptions) -> LoadedModels:
    return load_models(engine_options)


@pytest.fixture(scope="session")
def fresh(loaded: LoadedModels, engine_options: EngineOptions) -> Callable[..., LoadedModels]:
    """The same weights with a pool and limits of their own."""

    def make(**limits: int | None) -> LoadedModels:
        bounds = replace(loaded.limits, **{"max_total_tokens": 2048, **limits})  # type: ignore[arg-type]
        target, drafter = loaded.models.target, loaded.models.drafter
        assert drafter is not None
        pool = KvPool(target.config, drafter.config, bounds.max_total_tokens)
        return replace(loaded, models=replace(loaded.models, pool=pool), limits=bounds)

    return make


@pytest.fixture
def make_bench(
    fresh: Callable[..., LoadedModels], engine_options: EngineOptions
) -> Iterator[MakeBench]:
    """Builds schedulers; at the end of the test each must have given back every slot."""
    made: list[Bench] = []

    def make(
        speculative: SpeculativeOptions | None = None,
        edit: Callable[[LoadedModels], LoadedModels] = lambda models: models,
        **limits: int | None,
    ) -> Bench:
        registry = CollectorRegistry()
        recorder = Recorder(EngineMetrics(registry))
        options = replace(engine_options, speculative=speculative or SpeculativeOptions())
        models = edit(fresh(**limits))
        bench = Bench(models.scheduler(options, recorder), registry)
        made.append(bench)
        return bench

    yield make
    for bench in made:
        if bench.scheduler.idle:
            assert bench.owners()[0] == 0
            bench.scheduler.memory.cache.clear()
            assert bench.owners() == (0, 0, bench.scheduler.memory.slots.capacity)


@pytest.fixture(scope="session")
def plain() -> SpeculativeOptions:
    return SpeculativeOptions(algorithm=SpeculativeAlgorithm.NONE)


@pytest.fixture(scope="session")
def ask(loaded: LoadedModels) -> Callable[..., GenerationRequest]:
    """A request from text or ids."""
    count = iter(range(10**9))

    def make(prompt: str | Sequence[int], **fields: object) -> GenerationRequest:
        ids = loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        values: dict[str, object] = {
            "rid": f"r{next(count)}",
            "prompt": np.asarray(ids, dtype=np.int64),
            "max_tokens": 32,
            "ignore_eos": True,
        }
        return GenerationRequest(**{**values, **fields})  # type: ignore[arg-type]

    return make
