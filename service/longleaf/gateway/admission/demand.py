"""What a request asks of a replica, and whether a replica could ever give it."""

from collections.abc import Sequence
from dataclasses import dataclass

from longleaf.gateway.replicas.budget import Need
from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.routing.prefix import Prefix

_ASSUMED_SHARE = 8
"""A completion without a limit is assumed to take at most this part of the pool."""


class NeverFitsError(Exception):
    """The request is longer than any replica could ever hold. The message has the counts."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class TooManyCompletionsError(NeverFitsError):
    """It asks for more completions than any replica runs, or holds, together."""


@dataclass(slots=True)
class Demand:
    """What a request asks of a replica, in tokens."""

    model: str
    prompt_tokens: int | None
    """Of the longest prompt, exact; ``None`` where it was not counted."""
    max_tokens: int | None
    """Longest completion asked for; ``None`` where the request leaves it to the engine."""
    bound: int | None = None
    """Most tokens that the longest prompt can have; ``None`` where nothing bounds it."""
    all_prompts: int | None = None
    """Tokens of all prompts together, where there are several."""
    sequences: int = 1
    """Completions asked for."""
    default_tokens: int | None = None
    """What the engine takes for a missing ``max_tokens``, where that is known."""
    prefix: Prefix | None = None
    """The prompt in blocks, for routing to where it is cached."""
    completion_field: str = "max_tokens"
    """The request's field that says ``max_tokens``."""
    at_least: bool = False
    """Whether ``prompt_tokens`` is only the fewest that the prompt can have (and too many)."""

    @property
    def size(self) -> int:
        """Prompt tokens by the best of our knowledge."""
        return self.prompt_tokens or self.bound or 1

    @property
    def counted_prompts(self) -> int:
        """Tokens of all prompts together; 0 where nobody counted them."""
        return max(self.all_prompts or 0, self.prompt_tokens or 0)

    @property
    def completions(self) -> int:
        """Tokens that were asked for, of all completions together."""
        return self.sequences * (self.max_tokens or 1)

    def serves(self, replica: Replica) -> bool:
        """Whether ``replica`` is known to serve the model."""
        return replica.facts is not None and self.model in replica.facts.model_names

    def fits(self, replica: Replica) -> bool:
        """Whether ``replica`` serves the model and could ever hold the request."""
        facts = replica.facts
        if facts is None or self.model not in facts.model_names:
            return False
        return self.runs_together(replica) and facts.limits.admits(
            self.prompt_tokens or 1, self.max_tokens
        )

    def surely_fits(self, replica: Replica) -> bool:
        """Whether ``replica`` could hold the request whatever its count: by its bound."""
        facts, bound = replica.facts, self.bound
        if facts is None or bound is None:
            return False
        return facts.limits.admits(bound, self.max_tokens) and self._run_together(replica, bound)

    def runs_together(self, replica: Replica) -> bool:
        """Whether ``replica`` could run and hold all its completions at once."""
        return self._run_together(replica, self.counted_prompts)

    def _run_together(self, replica: Replica, prompts: int) -> bool:
        if self.sequences == 1:
            return True
        most, pool = replica.budget.max_sequences, replica.budget.capacity
        if most is not None and self.sequences > most:
            return False
        return pool is None or prompts + self.completions <= pool

    def need(self, replica: Replica, assumed: int, cached: int = 0) -> Need:
        """What it would take of ``replica``, where ``cached`` prompt tokens lie already.

        ``assumed``: completion tokens of a request that names no limit and has no known default.
        """
        budget, size = replica.budget, self.size
        prompts = max(self.all_prompts or size, size)
        uncached = max(1, prompts - cached)
        completion = self.max_tokens or self.default_tokens
        if completion is None:
            capacity = budget.capacity
            completion = assumed if capacity is None else min(assumed, capacity // _ASSUMED_SHARE)
        tokens = uncached + self.sequences * (completion + budget.tree_nodes)
        return Need(tokens, uncached, prompts * self.sequences, self.sequences)


def never_fits(demand: Demand, replicas: Sequence[Replica], param: str) -> NeverFitsError:
    """The refusal of a demand that fits on none of ``replicas``, with the counts.

    ``param``: the field that holds the prompt.
    """
    if not any(demand.runs_together(replica) for replica in replicas):
        return _too_many(demand, replicas)
    limits = [replica.facts.limits for replica in replicas if replica.facts is not None]
    prompt, completion = demand.prompt_tokens, demand.max_tokens
    about = "at least " if demand.at_least else ""
    asked = []
    if prompt is not None:
        asked.append(f"{about}{prompt} in the prompt")
    if completion is not None:
        asked.append(f"{completion} for the completion")
    total = (prompt or 0) + (completion or 0)
    context = max((limit.context_length or 0 for limit in limits), default=0)
    largest = max((limit.total_limit or 0 for limit in limits), default=0)
    longest = max((limit.prompt_limit or 0 for limit in limits), default=0)
    requested = f"However, you requested {about}{total} tokens ({', '.join(asked)})."
    if context and total > context:
        limit = f"This model's maximum context length is {context} tokens."
    elif total > largest:
        limit = f"The KV cache of no replica can hold more than {largest} tokens of one request."
    else:
        limit = f"The longest prompt that a replica can take has {longest} tokens."
    prompt_fits = prompt is not None and prompt <= longest
    if prompt_fits:
        hint, param = f"Lower {demand.completion_field}.", demand.completion_field
    else:
        hint = "Shorten the prompt."
    return NeverFitsError(f"{limit} {requested} {hint}", param)


def _too_many(demand: Demand, replicas: Sequence[Replica]) -> TooManyCompletionsError:
    asked = f"{demand.sequences} completions were asked for at once (n for each prompt)"
    limits = [replica.budget.max_sequences for replica in replicas]
    if all(most is not None and demand.sequences > most for most in limits):
        most = max(most or 0 for most in limits)
        return TooManyCompletionsError(f"{asked}; no replica runs more than {most} together.", "n")
    pool = max(replica.budget.capacity or 0 for replica in replicas)
    message = (
        f"{asked}, which with {demand.max_tokens or 1} tokens each and {demand.counted_prompts} in "
        f"the prompt need {demand.counted_prompts + demand.completions} tokens; the KV cache of no "
        f"replica holds more than {pool}. Lower n or {demand.completion_field}."
    )
    return TooManyCompletionsError(message, "n")
