"""The KV rows of the target and of the drafter, addressed by slot (page size 1)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longleaf.embedded.config import DrafterConfig, TargetConfig
from longleaf.embedded.weights import F32


@dataclass(frozen=True, slots=True)
class ExpandedKv:
    """Keys and values of every target layer, per head.

    Attributes:
        keys: float32[layers, heads, capacity, nope], without the rotary part.
        rope_keys: float32[layers, capacity, rope], shared by the heads; the latent row's, packed.
        values: float32[layers, heads, capacity, v].
    """

    keys: F32
    rope_keys: F32
    values: F32


class KvPool:
    """Arrays of ``capacity`` slots; one slot holds one token in every layer of both models.

    Which slots are free is the scheduler's knowledge, not the pool's. Memory is touched, and so
    taken, only as slots are written.

    Attributes:
        latent: float32[layers, capacity, kv_lora + rope]: the MLA latent (normalized compressed KV)
            and the rotated shared key.
        expanded: Each head's K and V as projected from the latent, kept so that no pass projects a
            cached prefix again; None to save the memory.
        draft_keys, draft_values: float32[draft layers, KV heads, capacity, head width].
    """

    def __init__(
        self,
        target: TargetConfig,
        drafter: DrafterConfig | None,
        capacity: int,
        expanded: bool = True,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 slot, got {capacity}")
        self.capacity = capacity
        self.latent = np.zeros((target.num_layers, capacity, target.latent_width), np.float32)
        per_head = (target.num_layers, target.num_heads, capacity)
        self.expanded: ExpandedKv | None = None
        if expanded:
            self.expanded = ExpandedKv(
                np.zeros((*per_head, target.qk_nope_head_dim), np.float32),
                np.zeros((target.num_layers, capacity, target.qk_rope_head_dim), np.float32),
                np.zeros((*per_head, target.v_head_dim), np.float32),
            )
        draft_shape = (
            (drafter.num_layers, drafter.num_kv_heads, capacity, drafter.head_dim)
            if drafter is not None
            else (0, 0, capacity, 0)
        )
        self.draft_keys = np.zeros(draft_shape, np.float32)
        self.draft_values = np.zeros(draft_shape, np.float32)

    def move(self, src: npt.NDArray[np.integer], dst: npt.NDArray[np.integer]) -> None:
        """Copy every layer's rows from slots ``src`` to slots ``dst`` (same length, may overlap).

        All rows are read before any is written. ``dst`` must not name a slot twice.
        """
        if len(src) != len(dst):
            raise ValueError(f"move takes as many src as dst slots, got {len(src)} and {len(dst)}")
        if len(src) == 0:
            return
        for rows in self.arrays():
            rows[..., dst, :] = rows[..., src, :]

    def arrays(self) -> list[F32]:
        """Every array, slots along the last axis but one."""
        kept = self.expanded
        expanded = [kept.keys, kept.rope_keys, kept.values] if kept is not None else []
        return [self.latent, *expanded, self.draft_keys, self.draft_values]
