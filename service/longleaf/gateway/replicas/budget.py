"""What a replica can hold, and what of it is promised to requests.

One ``Reservation`` a request: made before anything is sent, released exactly once, whatever ends
the request. What the replica itself reports corrects the sums: tokens and sequences that are not
ours (another gateway's, or cached rows that came into use) count as taken too.

The KV pool is counted in tokens, which are bytes by another name: SGLang divides the bytes that it
may use by those of one token over all layers, the drafter's too, makes every layer's buffer with
that many rows, and gives out rows (``pool_configurator.DefaultPoolConfigurator``: MHA, MLA and DSA
models). So what fits in tokens fits in bytes, and the other way round; the bytes of what is
reserved are published.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from longleaf.gateway.replicas.drain_rate import DrainRate
from longleaf.gateway.replicas.facts import ReplicaLimits
from longleaf.gateway.replicas.loads import LoadReport
from longleaf.gateway.replicas.step_model import StepModel

Obstacle = Literal["kv_pool", "sequences", "prefill", "tpot", "ttft"]
"""Why a request must wait."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a replica may be filled."""

    max_prefill_tokens: int
    """Prompt tokens in flight at most; one longer prompt goes when no other long one is."""
    short_prompt_tokens: int
    """A prompt up to this length is short: it may start beside a long one."""
    tpot: float | None = None
    """Seconds a token that running requests must not exceed, by prediction."""
    ttft: float | None = None
    """Seconds to the first token that requests in prefill must not exceed, by prediction."""


@dataclass(slots=True)
class Need:
    """What one request takes of a replica, in tokens and sequences."""

    kv_tokens: int
    """Prompt tokens that are not cached, completions, tree nodes."""
    prefill_tokens: int
    """Prompt tokens that are not cached."""
    context_tokens: int
    """The whole prompt, once for each sequence."""
    sequences: int = 1


class Reservation:
    """A request's share of one replica. Context manager: leaving it releases."""

    __slots__ = ("_budget", "need", "prefilling", "released")

    def __init__(self, budget: "ReplicaBudget", need: Need) -> None:
        self.need = need
        self.prefilling = True
        """Whether its prompt counts as being prefilled."""
        self.released = False
        self._budget = budget

    def prefilled(self) -> None:
        """The first token came: others may start their prefill. Later calls do nothing."""
        if self.prefilling:
            self.prefilling = False
            self._budget._end_prefill(self)

    def release(self) -> None:
        """Give it back; later calls do nothing."""
        if not self.released:
            ran = not self.prefilling
            self.prefilled()
            self.released = True
            self._budget._release(self, ran)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class ReplicaBudget:
    """The books of one replica. ``changed`` is called when something was given back, or reported.

    Invariants: every sum is the sum over the held reservations, and 0 when none is held.
    """

    def __init__(
        self,
        rules: Rules,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules
        self._changed = changed
        self._clock = clock
        self._held: set[Reservation] = set()
        self._limits: ReplicaLimits | None = None
        self._report: LoadReport | None = None
        self._held_before: frozenset[Reservation] = frozenset()
        self._external_tokens = 0
        self._external_sequences = 0
        self._drain = DrainRate()
        self._drained_until = clock()
        self.steps = StepModel()
        self.capacity: int | None = None
        """Slots of the KV pool, as last reported."""
        self.max_sequences: int | None = None
        """Sequences that run together at most, as last reported."""
        self.kv_tokens = 0
        self.context_tokens = 0
        self.sequences = 0
        self.long_prefill_tokens = 0
        self.short_prefill_tokens = 0

    @property
    def held(self) -> int:
        """Reservations that are held."""
        return len(self._held)

    @property
    def latest(self) -> LoadReport | None:
        """The latest report."""
        return self._report

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of one KV pool slot, where the replica reports its cache's size."""
        return None if self._report is None else self._report.bytes_per_token

    @property
    def tree_nodes(self) -> int:
        """Rows that a step may need beyond a sequence's committed tokens."""
        return 0 if self._limits is None else self._limits.tree_nodes

    @property
    def external_tokens(self) -> int:
        """KV pool slots in use, by the latest report, beyond what is reserved here."""
        return self._external_tokens

    @property
    def free_tokens(self) -> int | None:
        """Slots that may still be promised; ``None`` without a known limit."""
        capacity = self.capacity
        if capacity is None:
            return None
        return max(0, capacity - self.kv_tokens - self._external_tokens)

    @property
    def batch(self) -> int:
        """Sequences that run, or soon will."""
        return self.sequences + self._external_sequences

    @property
    def full(self) -> bool:
        """Whether it has no room whatever a request needs: all its sequences are taken."""
        most = self.max_sequences
        return most is not None and bool(self._held) and self.batch >= most

    @property
    def context(self) -> int:
        """Their summed context in tokens."""
        used = 0 if self._report is None else self._report.used_tokens
        return max(self.context_tokens + self._external_tokens, used)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens in flight that are not prefilled yet."""
        return self.long_prefill_tokens + self.short_prefill_tokens

    def obstacle(self, need: Need) -> Obstacle | None:
        """Why ``need`` must wait; ``None`` if it may start. What would be alone always may."""
        if not self._held:
            return None
        most = self.max_sequences
        if most is not None and self.batch + need.sequences > most:
            return "sequences"
        free = self.free_tokens
        if free is not None and need.kv_tokens > free:
            return "kv_pool"
        rules = self._rules
        short = self._short(need)
        ahead = self.short_prefill_tokens if short else self.long_prefill_tokens
        if ahead and ahead + need.prefill_tokens > rules.max_prefill_tokens:
            return "prefill"
        if rules.tpot is not None:
            seconds = self.steps.token_seconds(
                self.context + need.context_tokens, self.batch + need.sequences
            )
            if seconds is not None and seconds > rules.tpot:
                return "tpot"
        if rules.ttft is not None and self.prefill_tokens:
            seconds = self.steps.prefill_seconds(self.prefill_tokens + need.prefill_tokens)
            if seconds is not None and seconds > rules.ttft:
                return "ttft"
        return None

    def reserve(self, need: Need) -> Reservation:
        """Promise ``need`` to a request."""
        self._pass_time()
        reservation = Reservation(self, need)
        self._held.add(reservation)
        self.kv_tokens += need.kv_tokens
        self.context_tokens += need.context_tokens
        self.sequences += need.sequences
        if self._short(need):
            self.short_prefill_tokens += need.prefill_tokens
        else:
            self.long_prefill_tokens += need.prefill_tokens
        return reservation

    def set_limits(self, limits: ReplicaLimits) -> None:
        """The replica told its limits (again)."""
        if limits != self._limits:
            self._limits, self._report = limits, None
            self._note_sizes()
            self._held_before = frozenset()
            self._external_tokens = self._external_sequences = 0

    def snapshot(self) -> frozenset[Reservation]:
        """What is held now; taken before a report is asked for, handed over with it."""
        return frozenset(self._held)

    def report(self, report: LoadReport, held_before: frozenset[Reservation]) -> None:
        """The replica reported. ``held_before``: what was held when it was asked."""
        earlier, self._report = self._report, report
        self._note_sizes()
        settled, self._held_before = self._held_before, held_before
        ours = held_before | self._held  # what ended or began meanwhile: in the report or not
        tokens = sum(reservation.need.kv_tokens for reservation in ours)
        sequences = sum(reservation.need.sequences for reservation in ours)
        self._external_tokens = max(0, report.used_tokens - tokens)
        self._external_sequences = max(0, report.running + report.waiting - sequences)
        if earlier is not None:
            self.steps.learn(earlier, report)
            if _only_decoded(earlier, report):
                for reservation in settled:
                    reservation.prefilled()
        self._changed()

    def seconds_until_free(self, tokens: int, sequences: int) -> float | None:
        """Time until so much is given back, at the rate of late; ``None`` while it is unknown."""
        self._pass_time()
        rate = self._drain.per_second()
        if rate is None:
            return None
        missing = max(0, tokens - (self.free_tokens or 0)) if self.capacity is not None else 0
        most = self.max_sequences
        surplus = max(0, self.batch + sequences - most) if most is not None else 0
        tokens_rate, sequences_rate = rate
        return max(missing / max(tokens_rate, 1e-9), surplus / sequences_rate)

    def seconds_until_turn(self, waiting: int) -> float | None:
        """Time until ``waiting`` sequences and one more have been taken up by the replica, which
        is full, at the rate of late; ``None`` while it is unknown.
        """
        self._pass_time()
        rate = self._drain.per_second()
        return None if rate is None else (waiting + 1) / rate[1]

    def _note_sizes(self) -> None:
        limits, report = self._limits, self._report
        self.capacity = None if limits is None else limits.max_total_num_tokens
        self.max_sequences = None if limits is None else limits.max_running_requests
        if report is not None and report.capacity_tokens is not None:
            self.capacity = report.capacity_tokens
        if report is not None and report.max_running is not None:
            self.max_sequences = report.max_running

    def _short(self, need: Need) -> bool:
        return need.prefill_tokens <= self._rules.short_prompt_tokens

    def _end_prefill(self, reservation: Reservation) -> None:
        tokens = reservation.need.prefill_tokens
        if self._short(reservation.need):
            self.short_prefill_tokens -= tokens
        else:
            self.long_prefill_tokens -= tokens
        self._changed()

    def _release(self, reservation: Reservation, ran: bool) -> None:
        self._pass_time()
        need = reservation.need
        self._held.remove(reservation)
        self.kv_tokens -= need.kv_tokens
        self.context_tokens -= need.context_tokens
        self.sequences -= need.sequences
        if ran:  # what was refused, or left before it ran, says nothing about speed
            self._drain.freed(need.kv_tokens, need.sequences)
        self._changed()

    def _pass_time(self) -> None:
        now = self._clock()
        if self._held:
            self._drain.passed(now - self._drained_until)
        self._drained_until = now


def _only_decoded(earlier: LoadReport, later: LoadReport) -> bool:
    """Whether steps ran between two reports, nothing was prefilled and nothing waits for it."""
    if earlier.decode is None or later.decode is None or later.waiting:
        return False
    stepped = later.decode.steps > earlier.decode.steps
    return stepped and later.prefilled_tokens == earlier.prefilled_tokens
