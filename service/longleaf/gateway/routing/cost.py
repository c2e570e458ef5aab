"""What a request is expected to cost on each replica, in seconds.

    wait for its prompt   (prompt tokens ahead of it + its own that are not cached) / prefill rate
    its own tokens        expected tokens * time per token with it
    others' tokens        running sequences * expected tokens * what it adds to each of theirs

Rates come from the step model. A replica whose model has seen nothing yet is taken for the mean of
those that have, and all for alike where none has.
"""

from collections.abc import Sequence

from longleaf.gateway.admission.demand import Demand
from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.replicas.step_model import StepModel

_EXPECTED_TOKENS = 512
"""Of a completion: limits say little about how long they become."""
_PREFILL_RATE = 3_000.0
_TOKEN_SECONDS = 0.02
_TOKEN_SECONDS_MORE = 0.002
_TOKENS_PER_BYTE = 0.25


def expected_costs(
    replicas: Sequence[Replica], cached: Sequence[float], demand: Demand
) -> list[float]:
    """Seconds on each of ``replicas``, which have the shares ``cached`` of the prompt."""
    rates = [replica.budget.steps.prefill_rate for replica in replicas]
    known = [rate for rate in rates if rate is not None]
    usual = sum(known) / len(known) if known else _PREFILL_RATE
    models = [one.budget.steps for one in replicas if one.budget.steps.observations]
    return [
        _cost(replica, share, demand, rate or usual, models)
        for replica, share, rate in zip(replicas, cached, rates, strict=True)
    ]


def prefill_tokens(replica: Replica, cached: float, demand: Demand) -> float:
    """Prompt tokens to compute on ``replica`` until the request has its first token."""
    return replica.budget.prefill_tokens + _prompt_tokens(demand) * (1.0 - cached)


def _prompt_tokens(demand: Demand) -> float:
    return demand.size if demand.prompt_tokens is not None else demand.size * _TOKENS_PER_BYTE


def _cost(
    replica: Replica,
    cached: float,
    demand: Demand,
    rate: float,
    models: Sequence[StepModel],
) -> float:
    budget = replica.budget
    asked = [budget.steps] if budget.steps.observations else models
    prompt = _prompt_tokens(demand)
    prefill = prefill_tokens(replica, cached, demand) / rate
    tokens = min(demand.max_tokens or _EXPECTED_TOKENS, _EXPECTED_TOKENS)
    context, batch, more = budget.context, budget.batch, demand.sequences
    after = _token_seconds(asked, context + prompt * more, batch + more)
    slowed = max(0.0, after - _token_seconds(asked, context, batch)) if batch else 0.0
    return prefill + tokens * (after + batch * slowed)


def _token_seconds(models: Sequence[StepModel], context: float, batch: float) -> float:
    """Seconds a token, by the mean of ``models``."""
    if models:
        told = [model.token_seconds(context, batch) for model in models]
        known = [one for one in told if one is not None]
        if known:
            return sum(known) / len(known)
    return _TOKEN_SECONDS + _TOKEN_SECONDS_MORE * batch
