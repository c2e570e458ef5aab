"""What the engine is configured with, validated once."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class SpeculativeAlgorithm(StrEnum):
    """How the engine speculates."""

    NONE = "none"
    DDTREE = "ddtree"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeOptions:
    """Shape of the draft tree.

    ``budget``: drafted nodes a step at most. ``topk``: candidates a depth (1 makes every tree a
    chain). ``block``: anchor plus drafted depths, at most the drafter's own; None takes the
    drafter's. ``seed_chain``: the most probable chain is always in the tree.
    """

    algorithm: SpeculativeAlgorithm = SpeculativeAlgorithm.DDTREE
    budget: int = 16
    topk: int = 8
    block: int | None = None
    seed_chain: bool = True

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"speculative budget must be at least 1 node, got {self.budget}")
        if self.topk < 1:
            raise ValueError(f"speculative topk must be at least 1, got {self.topk}")
        if self.block is not None and self.block < 2:
            raise ValueError(f"speculative block must be at least 2, got {self.block}")

    @property
    def enabled(self) -> bool:
        """Whether a drafter is used at all."""
        return self.algorithm is not SpeculativeAlgorithm.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Limits of the scheduler; lengths in tokens.

    ``max_total_tokens``: slots of the KV pool. ``chunked_prefill_size``: prompt tokens computed
    between two decode steps. ``max_queued_requests``: waiting requests beyond which a new one is
    refused; None for no limit. ``decode_headroom``: room that must be left for each running answer
    before another request is admitted; answers that need more than there is are retracted, newest
    first, and computed again later. ``prefill_first``: no decode step while there is a prompt to
    compute, as SGLang does; else one chunk and one step take turns.
    """

    context_length: int
    max_total_tokens: int
    max_running_requests: int = 8
    max_queued_requests: int | None = None
    chunked_prefill_size: int = 512
    decode_headroom: int = 256
    prefill_first: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("context_length", 16),
            ("max_total_tokens", 16),
            ("max_running_requests", 1),
            ("chunked_prefill_size", 1),
            ("decode_headroom", 0),
        ):
            value: int = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise ValueError(
                f"max_queued_requests must be at least 0, got {self.max_queued_requests}"
            )

    @property
    def max_request_len(self) -> int:
        """Prompt and answer of one request at most, as SGLang counts it."""
        return min(self.context_length, self.max_total_tokens) - 1

    @property
    def max_input_len(self) -> int:
        """A prompt of this length or more is refused (SGLang's ``max_req_input_len``)."""
        return self.max_request_len - 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Everything that ``load_engine`` needs. ``context_length`` None takes the model's own."""

    target: Path
    drafter: Path
    served_model_name: str
    context_length: int | None = None
    max_total_tokens: int = 40_960
    max_running_requests: int = 8
    max_queued_requests: int | None = None
    chunked_prefill_size: int = 512
    speculative: SpeculativeOptions = SpeculativeOptions()
