"""From a request's body to its place on a replica."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from longleaf.gateway.admission.admission import (
    Admission,
    Ask,
    Forecast,
    Grant,
    NoReplicaError,
    SaturatedError,
)
from longleaf.gateway.admission.demand import (
    Demand,
    NeverFitsError,
    TooManyCompletionsError,
    never_fits,
)
from longleaf.gateway.admission.limits import Charge, KeyLimitError, KeyLimits
from longleaf.gateway.auth import ApiKey
from longleaf.gateway.prompts.pool import PoolFullError
from longleaf.gateway.prompts.reader import Prompt, PromptReader
from longleaf.gateway.replicas.registry import ReplicaRegistry
from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.routing.prefix import prefix_of
from longleaf.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_COMPLETION_TOKENS = 16
"""Of ``/v1/completions`` without ``max_tokens``: OpenAI's default, and SGLang's."""


class UnknownModelError(Exception):
    """No replica serves the model, and every replica has told what it serves."""


@dataclass(slots=True)
class Ticket:
    """An admitted request: its place, and what is needed to ask for another."""

    ask: Ask
    grant: Grant
    charge: Charge


class Intake:
    """Counts where it matters, checks limits, reserves."""

    def __init__(
        self,
        registry: ReplicaRegistry,
        reader: PromptReader,
        admission: Admission,
        limits: KeyLimits,
        metrics: GatewayMetrics,
        assumed_completion_tokens: int,
    ) -> None:
        self.registry = registry
        self.reader = reader
        self.admission = admission
        self.limits = limits
        self.metrics = metrics
        self._assumed = assumed_completion_tokens
        self._at_once = metrics.admission.labels("admitted", "at_once")
        self._waited = metrics.admission.labels("admitted", "waited")

    async def enter(self, prompt: Prompt, key: ApiKey | None) -> Ticket:
        """A place for ``prompt``, once there is one.

        Raises ``UnknownModelError``, ``NoReplicaError``, ``NeverFitsError``, ``KeyLimitError``,
        ``PoolFullError`` or ``SaturatedError``. Cancelling it leaves nothing behind.
        """
        try:
            return await self._enter(prompt, key)
        except Exception as error:
            self.metrics.admission.labels("refused", reason(error)).inc()
            raise

    async def again(self, ticket: Ticket, tried: Sequence[Replica]) -> Ticket:
        """Another place, on none of ``tried``. Raises as ``enter``."""
        ask = replace(ticket.ask, exclude=tuple(tried))
        return replace(ticket, ask=ask, grant=await self.admission.admit(ask))

    async def forecast(self, prompt: Prompt, key: ApiKey | None) -> tuple[Demand, Forecast]:
        """What would happen to ``prompt`` now, counted exactly; runs and takes nothing.

        Raises as ``enter`` where it would be refused at once.
        """
        demand = await self._counted(_bounded(prompt), prompt)
        self.limits.peek(key, charged_tokens(demand, self._assumed))
        return demand, self.admission.forecast(_ask(demand, prompt, key))

    async def _enter(self, prompt: Prompt, key: ApiKey | None) -> Ticket:
        self.limits.peek(key, 0)
        demand = _bounded(prompt)
        by_tokens = key is not None and key.tokens_per_minute is not None
        if by_tokens or not self._surely_fits(demand, prompt):
            demand = await self._counted(demand, prompt)
        charge = self.limits.charge(key, charged_tokens(demand, self._assumed))
        try:
            ask = _ask(demand, prompt, key)
            grant = self.admission.at_once(ask)
            if grant is not None:
                if demand.prompt_tokens is None:
                    self.reader.bounded()
                self._at_once.inc()
                return Ticket(ask, grant, charge)
            if demand.prompt_tokens is None:  # by its bound it finds no room: now the count decides
                ask = replace(ask, demand=await self._counted(ask.demand, prompt))
                grant = await self.admission.admit(ask)
            else:
                grant = await self.admission.wait(ask)
            self._waited.inc()
            return Ticket(ask, grant, charge)
        except BaseException:
            charge.settle(0)
            raise

    def _surely_fits(self, demand: Demand, prompt: Prompt) -> bool:
        """Whether the bound settles that ``prompt``, whose count is not known, can be held."""
        serving = self._serving(demand.model)
        if prompt.count is not None or prompt.inspection.given_tokens is not None:
            return False
        return all(map(demand.surely_fits, serving))

    async def _counted(self, demand: Demand, prompt: Prompt) -> Demand:
        serving = self._serving(demand.model)
        count = await self.reader.count(prompt, serving)
        if count is None:
            demand = replace(demand, bound=demand.bound or len(prompt.text))
        else:
            demand = replace(
                demand,
                prompt_tokens=count.longest,
                all_prompts=count.total,
                at_least=count.at_least,
            )
        if not any(demand.fits(replica) for replica in serving):
            raise never_fits(demand, serving, prompt.inspection.prompt_field)
        return demand

    def _serving(self, model: str) -> list[Replica]:
        """Replicas that serve ``model``, of which one is ready."""
        replicas = self.registry.replicas
        serving = [one for one in replicas if one.facts and model in one.facts.model_names]
        if not serving and replicas and all(replica.facts is not None for replica in replicas):
            raise UnknownModelError
        for replica in serving:
            if replica.ready:
                return serving
        raise NoReplicaError


def charged_tokens(demand: Demand, assumed: int) -> int:
    """Tokens that a request is charged until its true usage is known.

    ``assumed``: of a completion whose request names no limit and has no known default.
    """
    completion = demand.max_tokens or demand.default_tokens or assumed
    return demand.counted_prompts + demand.sequences * completion


def reason(error: Exception) -> str:
    """Why a request was refused, for metrics: from a closed set."""
    match error:
        case UnknownModelError():
            return "model_not_found"
        case NoReplicaError():
            return "no_replica"
        case TooManyCompletionsError():
            return "too_many_completions"
        case NeverFitsError():
            return "context_length_exceeded"
        case KeyLimitError():
            return f"key_{error.what}"
        case PoolFullError():
            return "tokenizer_full"
        case SaturatedError():
            return error.reason
        case _:
            return "error"


def _bounded(prompt: Prompt) -> Demand:
    """What ``prompt`` asks for, as long as nobody has counted it."""
    said = prompt.inspection
    return Demand(
        said.model,
        None,
        said.max_tokens,
        bound=said.bound,
        sequences=said.completions * said.prompts,
        default_tokens=None if said.chat else _COMPLETION_TOKENS,
        completion_field=said.completion_field,
    )


def _ask(demand: Demand, prompt: Prompt, key: ApiKey | None) -> Ask:
    said = prompt.inspection
    # Only now: what can never fit may be long, and is refused already.
    demand.prefix = prefix_of(prompt.text, said.model, said.names)
    wish = said.priority
    if key is None:
        return Ask(demand, said.prompt_field, "", wish or 0, body_bytes=len(prompt.text))
    priority = key.priority if wish is None else min(key.priority, wish)
    return Ask(demand, said.prompt_field, key.id, priority, body_bytes=len(prompt.text))
