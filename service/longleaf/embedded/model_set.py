"""The loaded models of one engine and the arrays that they share."""

from dataclasses import dataclass

from longleaf.embedded.drafter import Drafter
from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.target import Target


@dataclass(frozen=True, slots=True)
class Models:
    """Target, drafter (None without speculation), their KV pool, and the ids that end an answer."""

    target: Target
    drafter: Drafter | None
    pool: KvPool
    eos_ids: frozenset[int]
