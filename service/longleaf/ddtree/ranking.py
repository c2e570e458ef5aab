"""One ranking for drafter and target: value descending, equal values by lower index."""

import numpy as np
import numpy.typing as npt


def rank_descending(values: npt.NDArray[np.floating], k: int) -> npt.NDArray[np.int64]:
    """Return the indices int64[k] of the `k` greatest of `values` [V], greatest first.

    Equal values keep index order, so index 0 of the answer is what argmax returns. Needs
    1 <= k <= V and no NaN.
    """
    size = values.shape[0]
    if k >= size:
        return np.argsort(-values, kind="stable")
    threshold = np.partition(values, size - k)[size - k]
    # Every tie with the k-th value is a candidate; the stable sort then prefers low indices.
    candidates = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[candidates], kind="stable")[:k]
    return candidates[order]
