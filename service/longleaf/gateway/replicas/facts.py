"""What a replica says about itself: models and the lengths it can take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class ReplicaLimits:
    """Lengths in tokens; ``None`` where the replica does not say."""

    context_length: int | None
    """Prompt and completion together."""
    max_req_input_len: int | None
    """A prompt must be shorter than this (the pool's limit for prompts)."""
    max_total_num_tokens: int | None
    """Slots of the KV pool: prompt and completion of one request must fit in it."""
    max_running_requests: int | None = None
    """Sequences that run together."""
    tree_nodes: int = 0
    """Rows that a speculating step may need beyond a sequence's committed tokens."""

    @cached_property
    def prompt_limit(self) -> int | None:
        """Longest prompt that is accepted: it must leave room for one token."""
        limits = [
            limit - 1
            for limit in (self.context_length, self.max_req_input_len, self.max_total_num_tokens)
            if limit is not None
        ]
        return min(limits, default=None)

    @cached_property
    def total_limit(self) -> int | None:
        """Most tokens that prompt and completion may have together."""
        limits = [
            limit for limit in (self.context_length, self.max_total_num_tokens) if limit is not None
        ]
        return min(limits, default=None)

    def admits(self, prompt_tokens: int, max_tokens: int | None) -> bool:
        """Whether a request of that size can ever run here."""
        prompt_limit, total_limit = self.prompt_limit, self.total_limit
        return (prompt_limit is None or prompt_tokens <= prompt_limit) and (
            total_limit is None or prompt_tokens + (max_tokens or 1) <= total_limit
        )


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Models (as the replica's ``/v1/models`` lists them) and limits."""

    models: tuple[Mapping[str, Any], ...]
    limits: ReplicaLimits
    model_names: frozenset[str] = field(init=False)
    """Names that requests may use."""

    def __post_init__(self) -> None:
        names = frozenset(str(model["id"]) for model in self.models)
        object.__setattr__(self, "model_names", names)


def parse_facts(models: object, server_info: object) -> ReplicaFacts:
    """Read the answers of ``/v1/models`` and ``/server_info``; ``ValueError`` says what is wrong.

    The context length is the model card's ``max_model_len``: ``/server_info`` has a
    ``context_length`` only where it was set by hand.
    """
    if not isinstance(models, dict) or not isinstance(models.get("data"), list):
        raise ValueError("/v1/models answered without a list 'data'")
    listed = models["data"]
    cards = tuple(
        card for card in listed if isinstance(card, dict) and isinstance(card.get("id"), str)
    )
    if not cards:
        raise ValueError("/v1/models lists no model")
    if not isinstance(server_info, dict):
        raise ValueError("/server_info answered no object")
    from_card = next(
        (length for card in cards if (length := _count(card, "max_model_len")) is not None), None
    )
    context_length = from_card or _count(server_info, "context_length")
    limits = ReplicaLimits(
        context_length,
        _count(server_info, "max_req_input_len"),
        _count(server_info, "max_total_num_tokens"),
        _count(server_info, "max_running_requests"),
        _count(server_info, "speculative_num_draft_tokens") or 0,
    )
    return ReplicaFacts(cards, limits)


def _count(source: Mapping[str, Any], name: str) -> int | None:
    value = source.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return None
