"""A generation request, what the engine reports of it, and its state while it runs."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from longleaf.ddtree import SamplingParams, StepOutcome
from longleaf.embedded.memory import KvLease
from longleaf.embedded.sampling import TokenLogprob
from longleaf.embedded.text import TextAssembler


class FinishKind(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer.

    ``matched``: the stop token's id or the stop string. ``message`` and ``status`` (HTTP) explain
    an ``ERROR``.
    """

    kind: FinishKind
    matched: int | str | None = None
    message: str = ""
    status: int = 500


@dataclass(slots=True)
class SpecStats:
    """Decode steps of one request. Every answer's first token comes from prefill, so for an answer
    of at least one token ``committed`` equals its completion tokens minus one.
    """

    steps: int = 0
    committed: int = 0
    correct_drafts: int = 0
    proposed_drafts: int = 0
    histogram: list[int] = field(default_factory=list)

    def add(self, outcome: StepOutcome, drafted: int) -> None:
        """Count one step that verified ``drafted`` drafted nodes."""
        self.steps += 1
        self.committed += outcome.commit_len
        self.correct_drafts += outcome.accepted_drafts
        self.proposed_drafts += drafted
        missing = outcome.accepted_drafts + 1 - len(self.histogram)
        self.histogram.extend([0] * missing)
        self.histogram[outcome.accepted_drafts] += 1

    @property
    def mean_commit_len(self) -> float:
        """Tokens a step, the bonus token included; 0 before the first step."""
        return self.committed / self.steps if self.steps else 0.0

    def copy(self) -> "SpecStats":
        """A snapshot that later steps do not change."""
        return SpecStats(
            self.steps,
            self.committed,
            self.correct_drafts,
            self.proposed_drafts,
            list(self.histogram),
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    spec: SpecStats


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What one step adds to an answer: token ids, the text that is now certain, and the end if it
    is one.
    """

    rid: str
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage
    finish: Finish | None = None


GREEDY = SamplingParams(temperature=0.0)

EventSink = Callable[[StepEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue.

    ``prompt``: int64 [P], P >= 1. ``max_tokens``: None means up to what context and pool allow.
    ``logprobs``: how many alternatives to report a token, None for no log-probabilities.
    ``speculative=False`` decodes without draft trees. ``cache_salt`` keeps the prompt's cached
    prefix from other salts. ``text``: what kind of text the client says it is; told to nobody
    but a simulated engine.
    """

    rid: str
    prompt: NDArray[np.int64]
    sampling: SamplingParams = GREEDY
    seed: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    keep_stop: bool = False
    logprobs: int | None = None
    speculative: bool = True
    cache_salt: str = ""
    text: str = ""


@dataclass(eq=False, slots=True)
class RequestState:
    """A request inside the scheduler.

    ``tokens``: int64, prompt and answer, the first ``length`` valid. Every token before ``length``
    has its KV row, save the last one of a decoding request: it is the root of the next step.
    """

    request: GenerationRequest
    sink: EventSink
    text: TextAssembler
    max_tokens: int
    tokens: NDArray[np.int64]
    length: int
    lease: KvLease | None = None
    cached_tokens: int = 0
    retractions: int = 0
    stats: SpecStats = field(default_factory=SpecStats)
    arrived: float = field(default_factory=time.monotonic)

    @property
    def rid(self) -> str:
        """The request's id."""
        return self.request.rid

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def completion_len(self) -> int:
        """Tokens of the answer so far."""
        return self.length - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that the answer may still get."""
        return self.max_tokens - self.completion_len

    @property
    def prefill_end(self) -> int:
        """Tokens whose KV prefill computes: the prompt; after a retraction, all but the next step's
        root.
        """
        return self.prompt_len if self.completion_len == 0 else self.length - 1

    @property
    def kv(self) -> KvLease:
        """The request's rows; only while it is admitted."""
        assert self.lease is not None, f"request {self.rid} is not admitted"
        return self.lease

    @property
    def namespace(self) -> str:
        """Cache namespace: rows of an unspeculated request lack draft K/V."""
        return f"{'draft' if self.request.speculative else 'plain'}:{self.request.cache_salt}"

    def append(self, token: int) -> None:
        """Commit one token of the answer."""
        if self.length == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros(self.length, dtype=np.int64)])
        self.tokens[self.length] = token
        self.length += 1

    def commit(self, token: int, eos_ids: frozenset[int]) -> Finish | None:
        """Append ``token`` to the answer; returns the end of the answer if this token is it."""
        self.append(token)
        stops = token in eos_ids and not self.request.ignore_eos
        if stops or token in self.request.stop_token_ids:
            return Finish(FinishKind.STOP, matched=token)
        matched = self.text.push(token)
        if matched is not None:
            return Finish(FinishKind.STOP, matched=matched)
        if self.remaining <= 0:
            return Finish(FinishKind.LENGTH)
        return None

    def usage(self) -> Usage:
        """Counts as of now."""
        return Usage(self.prompt_len, self.completion_len, self.cached_tokens, self.stats.copy())


def refusal(request: GenerationRequest, message: str, status: int) -> StepEvent:
    """The single event of a request that is not taken; ``status`` is the HTTP status
    that says why.
    """
    finish = Finish(FinishKind.ERROR, message=message, status=status)
    return StepEvent(request.rid, (), "", (), Usage(len(request.prompt), 0, 0, SpecStats()), finish)


def join(first: StepEvent, second: StepEvent) -> StepEvent:
    """Two consecutive events of one request as one."""
    return replace(
        second,
        tokens=first.tokens + second.tokens,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
    )
