"""A two-sample test for token histograms."""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

LEAST = 10
"""Smallest expected count of a cell; rarer values share one."""


def two_sample_p_value(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """Probability that two samples of one distribution differ as much: chi-squared, pooled cells.

    The tail is Wilson and Hilferty's normal approximation, good to a few percent of 1e-5.
    """
    total = Counter(first) + Counter(second)
    share = len(first) / (len(first) + len(second))
    common = [value for value, count in total.items() if count * min(share, 1.0 - share) >= LEAST]
    counts = []
    for sample in (first, second):
        counter = Counter(sample)
        kept = [counter[value] for value in common]
        counts.append([*kept, len(sample) - sum(kept)])
    table = np.asarray(counts, dtype=np.float64)
    table = table[:, table.sum(0) > 0]
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    statistic = float(((table - expected) ** 2 / expected).sum())
    freedom = table.shape[1] - 1
    if freedom == 0:
        return 1.0
    spread = 2.0 / (9.0 * freedom)
    score = ((statistic / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / spread**0.5
    return _normal_tail(score)


def _normal_tail(score: float) -> float:
    from math import erfc

    return 0.5 * erfc(score / 2.0**0.5)
