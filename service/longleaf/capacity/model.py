"""How many replicas a traffic needs, by formulas that are shown with their numbers.

Time of one replica that a request takes, with b answers decoded together:

    P = prefill of its uncached tokens           from the curve
    n = (answer - 1) / commit_len                steps after the first token
    S = P + n * step(b) / b                      a step serves b answers

A replica serves at most 1 / mean(S) requests a second, b being what its sequences and its KV pool
allow. Below that, b follows from the load (Little's law); while a prompt is prefilled no step runs,
so decoding has only the rest of the time:

    b    = rate * mean(n) * step(b) / (1 - rate * mean(P))
    TPOT = step(b) / commit_len / (1 - rate * mean(P))       prompts that come in bursts cost more

A prompt waits for the prompts before it, not for answers: prefill comes first. With R replicas
behind one queue (Allen and Cunneen's formula with Sakasegawa's term; c is the coefficient of
variation of P):

    W    = (1 + c^2) / 2 * mean(P) * u^(sqrt(2 (R + 1)) - 1) / (R (1 - u)),  u = rate * mean(P) / R
    TTFT = W + P

That it also waits while all sequences are taken is left out: simulated, a mix of 4k and 32k waits a
third longer at half of what a replica serves at most, two to three times as long at 0.8 of it.

Where sequences or pool hold one request at a time (b below 2), nothing interrupts an answer and a
prompt waits for answers too: no (1 - rate * mean(P)) above, and S in place of P in W.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longleaf.capacity.traffic import Kind
from longleaf.simulate.commits import CommitLengths
from longleaf.simulate.curve import Curve

_ROUNDS = 200
_MOST_REPLICAS = 10_000


class CapacityError(ValueError):
    """The objective cannot be met, with however many replicas; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Mean times in milliseconds; ``ttft_ms`` grows by ``ttft_ms_per_1k`` for each 1,000 prompt
    tokens. ``utilization``: the share of a replica's time that may be planned.
    """

    ttft_ms: float | None = None
    ttft_ms_per_1k: float = 0.0
    tpot_ms: float | None = None
    utilization: float = 0.9

    def ttft_bound(self, kind: Kind) -> float:
        """Seconds to the first token that are allowed."""
        if self.ttft_ms is None:
            return math.inf
        return (self.ttft_ms + self.ttft_ms_per_1k * kind.prompt_tokens / 1e3) / 1e3


@dataclass(frozen=True, slots=True)
class State:
    """A fleet of ``replicas`` under a load; seconds. ``ttft``: of each kind of request."""

    replicas: int
    rate: float
    utilization: float
    batch: float
    step: float
    tpot: float
    wait: float
    ttft: tuple[float, ...]
    kv_tokens: float
    """Slots in use on a replica, on average."""


class Model:
    """One curve under one mix. ``pool_tokens`` and ``sequences``: of a replica."""

    def __init__(
        self,
        curve: Curve,
        commits: CommitLengths,
        kinds: Sequence[Kind],
        pool_tokens: int,
        sequences: int,
    ) -> None:
        self.curve = curve
        self.kinds = tuple(kinds)
        self._speculates = curve.nodes > 1
        self.commit_len = tuple(commits.mean(k.text) if self._speculates else 1.0 for k in kinds)
        self.prefill = tuple(curve.prompt_seconds(k.prompt_tokens, k.cached_tokens) for k in kinds)
        self.steps = tuple(
            (kind.answer_tokens - 1) / each
            for kind, each in zip(kinds, self.commit_len, strict=True)
        )
        self.footprint = self._mean(lambda i: self._size(i), by=self.steps)
        largest = max(kind.prompt_tokens + kind.answer_tokens for kind in kinds) + curve.nodes
        if largest > pool_tokens:
            raise CapacityError(
                f"a request of {largest} tokens does not fit a KV pool of {pool_tokens}"
            )
        longest = max(kind.prompt_tokens for kind in kinds)
        if longest > curve.prefill.xs[-1]:
            raise CapacityError(
                f"curve {curve.name} has prefill up to {curve.prefill.xs[-1]:.0f} tokens, "
                f"which does not tell that of {longest}"
            )
        self.largest = largest
        self.batch_limit = max(1.0, min(float(sequences), pool_tokens / self.footprint))

    def _size(self, index: int) -> float:
        """Slots that a request holds while it decodes, on average."""
        kind = self.kinds[index]
        return kind.prompt_tokens + kind.answer_tokens / 2 + self.curve.nodes

    def _mean(self, value: Callable[[int], float], by: Sequence[float] | None = None) -> float:
        """Mean over the kinds; ``by`` weights them by what they do once they run."""
        weights = [k.share * (1.0 if by is None else by[i]) for i, k in enumerate(self.kinds)]
        total = sum(weights)
        if not total:
            return self._mean(value)
        return sum(w * value(i) for i, w in enumerate(weights)) / total

    @property
    def one_at_a_time(self) -> bool:
        """Whether no two requests of the mix's mean size run together."""
        return self.batch_limit < 2

    @property
    def mean_prefill(self) -> float:
        """Seconds."""
        return self._mean(lambda i: self.prefill[i])

    @property
    def mean_steps(self) -> float:
        """Steps of an answer."""
        return self._mean(lambda i: self.steps[i])

    @property
    def mean_commit_len(self) -> float:
        """Tokens a step, over all steps."""
        return self._mean(lambda i: self.commit_len[i], by=self.steps)

    @property
    def tokens(self) -> tuple[float, float]:
        """Prompt and answer tokens of a request."""
        return (
            self._mean(lambda i: self.kinds[i].prompt_tokens),
            self._mean(lambda i: self.kinds[i].answer_tokens),
        )

    def step_seconds(self, batch: float) -> float:
        """A step of ``batch`` sequences of the mix's contexts; linear between whole batches."""
        context = round(self.footprint)
        low = max(1, math.floor(batch))
        first = self.curve.step_seconds([context] * low)
        if batch <= 1:
            return first
        return first + (batch - low) * (self.curve.step_seconds([context] * (low + 1)) - first)

    def token_seconds(self, state: State) -> float:
        """A token of an answer in ``state`` that no prompt interrupts: what a tree is for."""
        return state.step / self.mean_commit_len

    def service_seconds(self, index: int, batch: float) -> float:
        """Time of a replica that one request takes."""
        return self.prefill[index] + self.steps[index] * self.step_seconds(batch) / max(1.0, batch)

    @property
    def most_per_replica(self) -> float:
        """Requests a second that a replica serves when it never rests."""
        return 1 / self._mean(lambda i: self.service_seconds(i, self.batch_limit))

    def at(self, rate: float, replicas: int) -> State:
        """The fleet under ``rate`` requests a second; infinite times where it cannot keep up."""
        each = rate / replicas
        held = self.prefill
        decoding = 1 - each * self.mean_prefill
        if self.one_at_a_time:
            held = tuple(self.service_seconds(i, 1.0) for i in range(len(self.kinds)))
            decoding = 1.0
        batch, busy = 1.0, rate / replicas / self.most_per_replica
        endless = State(
            replicas, rate, busy, self.batch_limit, self.step_seconds(self.batch_limit),
            math.inf, math.inf, (math.inf,) * len(self.kinds), self.batch_limit * self.footprint,
        )  # fmt: skip
        if busy >= 1 or each * self._mean(lambda i: held[i]) >= 1:
            return endless
        for _ in range(_ROUNDS):
            wanted = each * self.mean_steps * self.step_seconds(max(1.0, batch)) / decoding
            batch += 0.5 * (min(wanted, self.batch_limit) - batch)
        step = self.step_seconds(max(1.0, batch))
        mean = self._mean(lambda i: held[i])
        prompts = each * mean
        variation = self._mean(lambda i: (held[i] - mean) ** 2) / mean**2
        exponent = math.sqrt(2 * (replicas + 1)) - 1
        wait = (1 + variation) / 2 * mean * prompts**exponent / (replicas * (1 - prompts))
        return State(
            replicas, rate, busy, batch, step, step / self.mean_commit_len / decoding, wait,
            tuple(wait + one for one in self.prefill), batch * self.footprint,
        )  # fmt: skip

    def replicas_for(self, rate: float, objective: Objective) -> State:
        """The smallest fleet that meets ``objective``. ``CapacityError`` says what never would."""
        for kind, prefill in zip(self.kinds, self.prefill, strict=True):
            if prefill > objective.ttft_bound(kind):
                raise CapacityError(
                    f"the prefill of {kind.prompt_tokens - kind.cached_tokens} tokens alone takes "
                    f"{prefill * 1e3:.0f} ms, the objective for its first token is "
                    f"{objective.ttft_bound(kind) * 1e3:.0f} ms"
                )
        alone = self.step_seconds(1.0) / self.mean_commit_len * 1e3
        if objective.tpot_ms is not None and alone > objective.tpot_ms:
            raise CapacityError(
                f"one answer alone takes {alone:.2f} ms a token, the objective is "
                f"{objective.tpot_ms:g} ms"
            )
        least = math.ceil(rate / (self.most_per_replica * objective.utilization) - 1e-9)
        for replicas in range(max(1, least), _MOST_REPLICAS):
            state = self.at(rate, replicas)
            late = any(
                ttft > objective.ttft_bound(kind)
                for kind, ttft in zip(self.kinds, state.ttft, strict=True)
            )
            slow = objective.tpot_ms is not None and state.tpot * 1e3 > objective.tpot_ms
            if not late and not slow:
                return state
        raise CapacityError(f"more than {_MOST_REPLICAS} replicas would be needed")
