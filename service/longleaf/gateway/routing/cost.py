"""What a request is expected to cost on each replica, in seconds.

    wait for its prompt   (prompt tokens ahead of it + its own that are not cached) / prefill rate
    its own tokens        expected tokens * time per token with it
    others' tokens        running sequences * expected tokens * what it adds to each of theirs

Rates come from the step model. A replica whose model has seen nothing yet is taken for the mean of
those that have, and all for alike where none has.
"""

from collections.abc import Sequence

from longleaf.gateway.admission.demand import Demand
from longleaf.gateway.replicas.budget import ReplicaBudget
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
    budgets = [replica.budget for replica in replicas]
    rates = [budget.steps.prefill_rate for budget in budgets]
    known = [rate for rate in rates if rate is not None]
    usual = sum(known) / len(known) if known else _PREFILL_RATE
    models = [budget.steps for budget in budgets if budget.steps.observations]
    prompt = prompt_tokens(demand)
    tokens = min(demand.max_tokens or _EXPECTED_TOKENS, _EXPECTED_TOKENS)
    costs = []
    for budget, share, rate in zip(budgets, cached, rates, strict=True):
        asked = [budget.steps] if budget.steps.observations else models
        prefill = prefill_tokens(budget, share, prompt) / (rate or usual)
        context, batch, more = budget.context, budget.batch, demand.sequences
        after = _token_seconds(asked, context + prompt * more, batch + more)
        slowed = max(0.0, after - _token_seconds(asked, context, batch)) if batch else 0.0
        costs.append(prefill + tokens * (after + batch * slowed))
    return costs


def prefill_tokens(budget: ReplicaBudget, cached: float, prompt: float) -> float:
    """Prompt tokens to compute on a replica until a request has its first token: it has the share
    ``cached`` of the request's ``prompt``.
    """
    return budget.prefill_tokens + prompt * (1.0 - cached)


def prompt_tokens(demand: Demand) -> float:
    """Tokens of a request's prompt, or about so many where nobody counted them."""
    return demand.size if demand.prompt_tokens is not None else demand.size * _TOKENS_PER_BYTE


def _token_seconds(models: Sequence[StepModel], context: float, batch: float) -> float:
    """Seconds a token, by the mean of ``models``."""
    if models:
        told = [model.token_seconds(context, batch) for model in models]
        known = [one for one in told if one is not None]
        if known:
            return sum(known) / len(known)
    return _TOKEN_SECONDS + _TOKEN_SECONDS_MORE * batch
