"""Load figures of the engine: counters while it runs, an immutable snapshot for the
server to read.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from longleaf.ddtree import StepOutcome
from longleaf.metrics import EngineLoad

_WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """State of the scheduler when ``timestamp`` (Unix seconds) was taken; SGLang's field names,
    tokens throughout.
    """

    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_used_tokens: int
    num_cached_tokens: int
    num_free_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    gen_throughput: float
    cache_hit_rate: float
    total_prefill_uncached_tokens: int
    total_prefill_busy_us: int
    decode_moments: tuple[float, ...] | None
    accept_length: float
    accept_rate: float
    spec_verify_calls: int
    num_retracted_reqs: int

    def engine_load(self) -> EngineLoad:
        """The figures that metrics publish."""
        return EngineLoad(
            num_running_reqs=self.num_running_reqs,
            num_queue_reqs=self.num_waiting_reqs,
            token_usage=self.token_usage,
            kv_used_tokens=self.num_used_tokens,
            max_total_num_tokens=self.max_total_num_tokens,
            gen_throughput=self.gen_throughput,
            cache_hit_rate=self.cache_hit_rate,
            spec_accept_length=self.accept_length,
            spec_accept_rate=self.accept_rate,
            spec_verify_calls_total=self.spec_verify_calls,
        )

    @property
    def token_usage(self) -> float:
        """Used share of the pool, 0 to 1."""
        return self.num_used_tokens / self.max_total_num_tokens


@dataclass(slots=True)
class LoadCounters:
    """What the scheduler adds up. ``moments``: steps, Σ batch, Σ µs, Σ batch², Σ batch·µs, Σ
    tokens, as SGLang's. ``clock``: monotonic seconds.
    """

    clock: Callable[[], float] = time.monotonic
    moments: list[float] = field(default_factory=lambda: [0.0] * 6)
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    spec_calls: int = 0
    spec_committed: int = 0
    spec_correct: int = 0
    spec_proposed: int = 0
    _window: deque[tuple[float, int]] = field(default_factory=deque)

    def add_prefill(self, tokens: int, seconds: float) -> None:
        """Count one prefill forward."""
        self.prefill_tokens += tokens
        self.prefill_seconds += seconds

    def add_admission(self, tokens: int, cached: int) -> None:
        """Count the tokens of an admitted request, and how many of them the prefix cache had."""
        self.prompt_tokens += tokens
        self.cached_tokens += cached

    def add_step(self, batch: int, seconds: float, tokens: int) -> None:
        """Count one decode step of the whole batch."""
        micros = seconds * 1e6
        for index, value in enumerate(
            (1.0, batch, micros, batch * batch, batch * micros, float(tokens))
        ):
            self.moments[index] += value
        now = self.clock()
        self._window.append((now, tokens))
        self._trim(now)

    def add_outcome(self, outcome: StepOutcome, drafted: int) -> None:
        """Count one verify step of one speculating request."""
        self.spec_calls += 1
        self.spec_committed += outcome.commit_len
        self.spec_correct += outcome.accepted_drafts
        self.spec_proposed += drafted

    @property
    def throughput(self) -> float:
        """Tokens a second over the last ten seconds."""
        self._trim(self.clock())
        return sum(tokens for _, tokens in self._window) / _WINDOW_SECONDS

    @property
    def cache_hit_rate(self) -> float:
        """Share of admitted tokens that the prefix cache had."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens a speculating step, the bonus token included."""
        return self.spec_committed / self.spec_calls if self.spec_calls else 0.0

    @property
    def accept_rate(self) -> float:
        """Accepted share of the verified drafted nodes."""
        return self.spec_correct / self.spec_proposed if self.spec_proposed else 0.0

    def _trim(self, now: float) -> None:
        while self._window and now - self._window[0][0] > _WINDOW_SECONDS:
            self._window.popleft()
