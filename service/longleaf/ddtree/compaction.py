"""Compaction: the accepted path's KV rows move to the front of the step's slots."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class CompactionPlan:
    """Row moves within the slots of one step; row i was written by node i.

    src, dst: int32[k], both strictly ascending, dst[i] < src[i]. Rows 0..m-1 hold the path of m
    nodes afterwards; rows before dst[0] are in place already.

    A dst may be the src of an earlier move, never of a later one: src ascends, so a later src
    is above its own dst and thus above this one. Moving one at a time in order is therefore
    right, and so is gathering every src before the first write. Moving all in parallel without
    that gather is not.
    """

    src: npt.NDArray[np.int32]
    dst: npt.NDArray[np.int32]

    def __len__(self) -> int:
        """Return the number of rows that move."""
        return self.src.size

    def apply(self, rows: npt.NDArray[np.generic]) -> None:
        """Move `rows` [n, ...] in place, gathering first."""
        if len(self):
            rows[self.dst] = rows[self.src]


def compaction_plan(path: npt.NDArray[np.integer]) -> CompactionPlan:
    """Return the moves that bring rows `path` to rows 0..m-1; none for the spine 0, 1, 2, ...

    path: [m], accepted node ids from the root down, as in `Accepted.path`. Raises ValueError
    unless it starts at 0 and ascends strictly.
    """
    if path.ndim != 1 or path.size == 0 or path[0] != 0:
        raise ValueError(f"path must be [m] and start at the root, node 0, got {path.tolist()}")
    if not (path[1:] > path[:-1]).all():
        raise ValueError(f"path must ascend strictly, got {path.tolist()}")
    moves = np.flatnonzero(path != np.arange(path.size))
    return CompactionPlan(path[moves].astype(np.int32), moves.astype(np.int32))
