"""DDTree in numpy: build the tree, mask it, accept, compact. Pure functions, no I/O.

The reference that every accelerated version is held against.
"""

from longleaf.ddtree.accept import (
    Accepted,
    accept_greedy,
    accept_sampled,
    committed_tokens,
    shorten,
)
from longleaf.ddtree.compaction import CompactionPlan, compaction_plan
from longleaf.ddtree.outcome import AccountingError, StepOutcome, step_outcome
from longleaf.ddtree.sampling import SamplingParams, draw, target_distribution
from longleaf.ddtree.tree import Tree, build_tree, top_k_marginals
from longleaf.ddtree.visibility import ancestor_bits, dense_mask, positions

__all__ = [
    "Accepted",
    "AccountingError",
    "CompactionPlan",
    "SamplingParams",
    "StepOutcome",
    "Tree",
    "accept_greedy",
    "accept_sampled",
    "ancestor_bits",
    "build_tree",
    "committed_tokens",
    "compaction_plan",
    "dense_mask",
    "draw",
    "positions",
    "shorten",
    "step_outcome",
    "target_distribution",
    "top_k_marginals",
]
