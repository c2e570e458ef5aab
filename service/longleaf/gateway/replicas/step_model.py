"""How long a decode step of a replica takes, and how fast it prefills: fitted while it runs.

    step seconds = a + b * sum(context) + c * batch

by recursive least squares on relative errors, so that steps of 8 ms and of 1.4 s count alike.
"""

from collections.abc import Sequence

from longleaf.gateway.replicas.loads import LoadReport

_CONTEXT_UNIT = 100_000.0
"""Contexts enter the fit in units of so many tokens, which keeps its numbers of one size."""
_FORGET = 0.995
_PRIOR_VARIANCE = 1e4
_DECAY = 0.9
_LEAST_VARIANCE = 0.05
_BULK_SHARE = 0.25
"""Of the tokens of the longest prefill that was seen: from so many on a window tells how fast
prompts are prefilled. A prompt that is cached but for its end takes the time of a launch."""
_LEAST_SHARE = 0.5
"""No prediction is below this share of the shortest step that was seen."""

Row = tuple[float, float, float]


class RecursiveLeastSquares:
    """Linear least squares over rows that come one at a time, old ones slowly forgotten."""

    def __init__(self, size: int, forget: float, variance: float) -> None:
        self.weights = [0.0] * size
        self._forget = forget
        self._variance = variance
        self._covariance = [
            [variance if row == column else 0.0 for column in range(size)] for row in range(size)
        ]

    def predict(self, row: Sequence[float]) -> float:
        """The fitted value for ``row``."""
        return sum(weight * value for weight, value in zip(self.weights, row, strict=True))

    def update(self, row: Sequence[float], target: float) -> None:
        """Take in one row."""
        covariance, size = self._covariance, len(row)
        spread = [sum(line[i] * row[i] for i in range(size)) for line in covariance]
        scale = self._forget + sum(value * part for value, part in zip(row, spread, strict=True))
        error = target - self.predict(row)
        for i in range(size):
            self.weights[i] += spread[i] / scale * error
        forget = self._forget
        if max(covariance[i][i] for i in range(size)) > self._variance:
            forget = 1.0  # a direction that no row shows must not grow without bound
        for i in range(size):
            for j in range(size):
                covariance[i][j] = (covariance[i][j] - spread[i] * spread[j] / scale) / forget


class StepModel:
    """Step time, commit length and prefill speed of one replica."""

    def __init__(self) -> None:
        self._fit = RecursiveLeastSquares(3, _FORGET, _PRIOR_VARIANCE)
        self._observed = 0
        self._least = float("inf")
        self._residual: float | None = None
        self._tokens = self._sequences = 0.0
        self._prefilled = self._prefill_seconds = 0.0
        self._longest_prefill = 0
        self._least_prefill: float | None = None

    @property
    def observations(self) -> int:
        """Windows that the fit has seen."""
        return self._observed

    @property
    def residual(self) -> float | None:
        """Mean relative error of the latest predictions, each made before its window was seen."""
        return self._residual

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """``a`` (seconds), ``b`` (seconds a token of context), ``c`` (seconds a sequence)."""
        a, b, c = self._fit.weights
        return a, b / _CONTEXT_UNIT, c

    @property
    def commit_len(self) -> float | None:
        """Tokens that one sequence gains in a step, lately."""
        return self._tokens / self._sequences if self._sequences else None

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second, lately, where there were many."""
        return self._prefilled / self._prefill_seconds if self._prefill_seconds else None

    def learn(self, earlier: LoadReport, later: LoadReport) -> None:
        """Take in what happened between two reports; nothing if the engine restarted."""
        tokens = later.prefilled_tokens - earlier.prefilled_tokens
        seconds = later.prefill_seconds - earlier.prefill_seconds
        if tokens > 0 and seconds > 0:
            self._learn_prefill(tokens, seconds)
        if earlier.decode is None or later.decode is None:
            self._learn_totals(earlier, later)
            return
        window = later.decode.since(earlier.decode)
        if window.steps < 1 or window.seconds <= 0 or window.batch < window.steps:
            return
        self._tokens = _DECAY * self._tokens + window.tokens
        self._sequences = _DECAY * self._sequences + window.batch
        batch, step = window.batch / window.steps, window.seconds / window.steps
        context = (earlier.used_tokens + later.used_tokens) / 2
        self.observe(context, batch, step)
        variance = window.batch_squared / window.steps - batch * batch
        if variance > _LEAST_VARIANCE:  # within the window: step time grows with the batch
            deviation = variance**0.5
            together = window.batch_seconds / window.steps - batch * step
            row = (0.0, context / batch * deviation / _CONTEXT_UNIT, deviation)
            self._fit.update(_scaled(row, step), together / deviation / step)

    def _learn_prefill(self, tokens: int, seconds: float) -> None:
        if tokens * _BULK_SHARE > self._longest_prefill:  # what was seen before was no bulk
            self._prefilled = self._prefill_seconds = 0.0
        self._longest_prefill = max(self._longest_prefill, tokens)
        if tokens >= _BULK_SHARE * self._longest_prefill:
            self._prefilled = _DECAY * self._prefilled + tokens
            self._prefill_seconds = _DECAY * self._prefill_seconds + seconds
        else:
            self._least_prefill = min(self._least_prefill or seconds, seconds)

    def _learn_totals(self, earlier: LoadReport, later: LoadReport) -> None:
        """Without moments: the engine's own metrics, which know no batch; that of the reports."""
        if earlier.step_totals is None or later.step_totals is None:
            return
        steps = later.step_totals.steps - earlier.step_totals.steps
        seconds = later.step_totals.seconds - earlier.step_totals.seconds
        if steps < 1 or seconds <= 0:
            return
        tokens = later.step_totals.tokens - earlier.step_totals.tokens
        self._tokens = _DECAY * self._tokens + tokens
        self._sequences = _DECAY * self._sequences + steps
        batch = max(1.0, (earlier.running + later.running) / 2)
        self.observe((earlier.used_tokens + later.used_tokens) / 2, batch, seconds / steps)

    def observe(self, context: float, batch: float, step: float) -> None:
        """Take in one mean step (seconds) at a summed context (tokens) and batch (sequences)."""
        if self._observed:
            error = abs(self._predict(context, batch) - step) / step
            known = self._residual
            self._residual = error if known is None else _DECAY * known + (1 - _DECAY) * error
        self._fit.update(_scaled((1.0, context / _CONTEXT_UNIT, batch), step), 1.0)
        self._least = min(self._least, step)
        self._observed += 1

    def step_seconds(self, context: float, batch: float) -> float | None:
        """Predicted step time; ``None`` before the first window."""
        return self._predict(context, batch) if self._observed else None

    def token_seconds(self, context: float, batch: float) -> float | None:
        """Predicted time per token of one sequence: step time over commit length."""
        step, commit_len = self.step_seconds(context, batch), self.commit_len
        return None if step is None else step / max(1.0, commit_len or 1.0)

    def prefill_seconds(self, tokens: float) -> float | None:
        """Predicted time to prefill ``tokens``; ``None`` before the first prefill."""
        rate = self.prefill_rate
        return None if rate is None else max(tokens / rate, self._least_prefill or 0.0)

    def _predict(self, context: float, batch: float) -> float:
        fitted = self._fit.predict((1.0, context / _CONTEXT_UNIT, batch))
        return max(fitted, _LEAST_SHARE * self._least)


def _scaled(row: Row, step: float) -> Row:
    return row[0] / step, row[1] / step, row[2] / step
