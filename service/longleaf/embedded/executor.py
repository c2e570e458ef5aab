"""Runs prefill chunks and decode steps so that an exception ends only the requests concerned."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from longleaf.ddtree import Accepted
from longleaf.embedded.loads import LoadCounters
from longleaf.embedded.memory import KvMemory
from longleaf.embedded.model_set import Models
from longleaf.embedded.prefill import Chunk, PrefillResult, finish_chunk, forward_chunks
from longleaf.embedded.recorder import Recorder
from longleaf.embedded.request import Finish, RequestState
from longleaf.embedded.slots import SlotError
from longleaf.embedded.step import DecodeStep, PhaseSeconds, StepResult, VerifiedTree


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that cannot go on. What it holds is consistent and its to give back."""

    state: RequestState
    error: Exception


class BatchExecutor(Protocol):
    """What a scheduler needs of whoever runs its batches: nothing that it holds is lost, whatever
    fails.
    """

    def rows_needed(self, state: RequestState) -> int:
        """Slots that the next step of ``state`` takes at most."""

    def prefill(self, chunks: Sequence[Chunk]) -> tuple[list[PrefillResult], list[Failure]]:
        """Compute ``chunks``; their slots go to their requests, or back to the pool."""

    def step(self, batch: Sequence[RequestState]) -> tuple[list[StepResult], list[Failure]]:
        """Run one decode step of ``batch``."""


class Executor:
    """Runs batches and counts what they did.

    A forward that raises is run again request by request: those that raise alone have failed, the
    others go on. A ``SlotError`` is no request's fault: it means that the accounting is wrong, and
    goes up.
    """

    def __init__(
        self,
        models: Models,
        memory: KvMemory,
        decode: DecodeStep,
        recorder: Recorder,
        counters: LoadCounters,
    ) -> None:
        self._models = models
        self._memory = memory
        self._decode = decode
        self._recorder = recorder
        self._counters = counters

    def rows_needed(self, state: RequestState) -> int:
        """Slots that the next step of ``state`` takes at most: the root and its drafted nodes."""
        return self._decode.rows_needed(state)

    def prefill(self, chunks: Sequence[Chunk]) -> tuple[list[PrefillResult], list[Failure]]:
        """Compute ``chunks`` in one forward; their slots go to their requests, or back
        to the pool.
        """
        results: list[PrefillResult] = []
        failures: list[Failure] = []
        try:
            output = forward_chunks(self._models, chunks)
        except Exception as error:
            if len(chunks) == 1:
                self._memory.release(chunks[0].slots)
                return [], [Failure(chunks[0].state, error)]
            for chunk in chunks:
                good, bad = self.prefill([chunk])
                results += good
                failures += bad
            return results, failures
        self._recorder.kv_read(output.kv_bytes_read)
        self._counters.add_prefill(sum(len(chunk.slots) for chunk in chunks), output.seconds)
        for chunk, hidden, features in zip(chunks, output.hidden, output.features, strict=True):
            start = chunk.state.kv.length
            try:
                results.append(finish_chunk(self._models, chunk, hidden, features))
            except SlotError:
                raise
            except Exception as error:
                if chunk.state.kv.length == start:
                    self._memory.release(chunk.slots)
                failures.append(Failure(chunk.state, error))
        return results, failures

    def step(self, batch: Sequence[RequestState]) -> tuple[list[StepResult], list[Failure]]:
        """Run one decode step of ``batch`` in one verify forward."""
        results: list[StepResult] = []
        failures: list[Failure] = []
        seconds = PhaseSeconds()
        try:
            verified = self._decode.verify(batch, self._memory.available, seconds)
        except SlotError:
            raise
        except Exception as error:
            if len(batch) == 1:
                return [], [Failure(batch[0], error)]
            for state in batch:
                good, bad = self.step([state])
                results += good
                failures += bad
            return results, failures
        self._recorder.kv_read(verified.kv_bytes_read)
        self._recorder.verify(verified.kv_bytes_read, seconds.verify)
        begin = time.perf_counter()
        walks: list[tuple[VerifiedTree, Accepted, Finish | None]] = []
        for tree in verified.trees:
            try:
                walks.append((tree, *self._decode.accept(tree)))
            except Exception as error:
                self._decode.discard(tree)
                failures.append(Failure(tree.state, error))
        middle = time.perf_counter()
        for tree, accepted, finish in walks:
            try:
                results.append(self._decode.compact(tree, accepted, finish))
            except SlotError:
                raise
            except Exception as error:
                self._decode.discard(tree)
                failures.append(Failure(tree.state, error))
        seconds.accept, seconds.compact = middle - begin, time.perf_counter() - middle
        self._count(batch, results, seconds)
        return results, failures

    def _count(
        self, batch: Sequence[RequestState], results: Sequence[StepResult], seconds: PhaseSeconds
    ) -> None:
        committed = sum(result.outcome.commit_len for result in results)
        self._counters.add_step(len(batch), seconds.total, committed)
        plain = all(result.span is None for result in results)
        for result in results:
            self._recorder.step(result, seconds, plain=plain)
            if result.state.request.speculative and self._models.drafter is not None:
                self._counters.add_outcome(result.outcome, result.nodes - 1)
