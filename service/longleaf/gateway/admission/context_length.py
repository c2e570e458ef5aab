"""Context length: refuse what no replica could ever hold, before anything runs.

A token of a byte-level tokenizer stands for at least one byte, so a request's size in bytes bounds
its tokens. Where even that bound fits, nothing is counted; otherwise a replica's ``/tokenize``,
which renders the chat template too, gives the exact number.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longleaf.gateway.replicas.client import ReplicaError
from longleaf.gateway.replicas.facts import ReplicaLimits
from longleaf.gateway.replicas.replica import Replica
from longleaf.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_TEMPLATE_TOKENS = 256
"""Room for what a chat template adds once (a default system prompt, the generation prompt)."""
_MESSAGE_TOKENS = 16
"""Room for what it adds to each message (role, separators)."""
_UNBOUNDED_FIELDS = ("tools", "functions", "chat_template_kwargs", "documents", "chat_template")
"""Fields that a template may render at more than their own length."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a replica, in tokens."""

    model: str
    prompt_tokens: int | None
    """Exact; ``None`` where the bound in bytes fits everywhere (or counting failed)."""
    max_tokens: int | None
    """Longest completion asked for; ``None`` where the request leaves it to the engine."""

    def fits(self, replica: Replica) -> bool:
        """Whether ``replica`` serves the model and could ever hold the request."""
        facts = replica.facts
        if facts is None or self.model not in facts.model_names:
            return False
        return facts.limits.admits(self.prompt_tokens or 1, self.max_tokens)


class NeverFitsError(Exception):
    """The request is longer than any replica could ever hold. The message has the counts."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthCheck:
    """Works out a request's demand and refuses it where it can never be met."""

    def __init__(self, metrics: GatewayMetrics, tokenize_timeout: float) -> None:
        self._metrics = metrics
        self._timeout = tokenize_timeout

    async def demand(
        self, request: Mapping[str, Any], body: bytes, replicas: Sequence[Replica]
    ) -> Demand:
        """The demand of ``request`` (whose JSON text is ``body``) on ``replicas``.

        These serve its model and have told their limits. ``NeverFitsError`` where none of them
        could ever hold it.
        """
        model, max_tokens = str(request["model"]), completion_limit(request)
        limits = [replica.facts.limits for replica in replicas if replica.facts is not None]
        bound = token_bound(request, len(body))
        if bound is not None and all(limit.admits(bound, max_tokens) for limit in limits):
            self._metrics.token_counts.labels("bounded").inc()
            return Demand(model, None, max_tokens)
        demand = Demand(model, await self._count(request, body, replicas), max_tokens)
        if not any(demand.fits(replica) for replica in replicas):
            raise _never_fits(demand, limits, "messages" if "messages" in request else "prompt")
        return demand

    async def _count(
        self, request: Mapping[str, Any], body: bytes, replicas: Sequence[Replica]
    ) -> int | None:
        """Tokens of the (longest) prompt; ``None`` where no replica could count them."""
        given = _given_tokens(request)
        if given is not None:
            self._metrics.token_counts.labels("counted").inc()
            return given
        # The whole request: every field that shapes the prompt counts, known to us or not.
        ready_first = sorted(replicas, key=lambda replica: (not replica.ready, replica.in_flight))
        for replica in ready_first[:2]:
            try:
                answer = await replica.client.fetch_json("POST", "/tokenize", self._timeout, body)
                count = _counted(answer)
            except (ReplicaError, ValueError) as error:
                replica.count_error("tokenize")
                fields = {"replica": replica.url, "why": str(error)}
                logger.warning("prompt tokens not counted", extra={"fields": fields})
            else:
                self._metrics.token_counts.labels("counted").inc()
                return count
        self._metrics.token_counts.labels("failed").inc()
        return None


def completion_limit(request: Mapping[str, Any]) -> int | None:
    """``max_completion_tokens``, or else ``max_tokens``."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = request.get(name)
        if isinstance(value, int):
            return value
    return None


def token_bound(request: Mapping[str, Any], body_bytes: int) -> int | None:
    """Most tokens that the prompt can have, judged by size alone; ``None`` where size says nothing
    (images and other parts that are not text, templates that take tools or arguments).
    """
    if any(request.get(name) for name in _UNBOUNDED_FIELDS):
        return None
    messages = request.get("messages")
    if messages is None:
        return body_bytes + _MESSAGE_TOKENS
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text":
                    return None
    return body_bytes + _TEMPLATE_TOKENS + _MESSAGE_TOKENS * len(messages)


def _given_tokens(request: Mapping[str, Any]) -> int | None:
    """Length of a prompt that is given as token ids (the longest of several)."""
    prompt = request.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return None
    if all(isinstance(token, int) for token in prompt):
        return len(prompt)
    if all(isinstance(tokens, list) for tokens in prompt):
        return max(len(tokens) for tokens in prompt)
    return None


def _counted(answer: object) -> int:
    count = answer.get("count") if isinstance(answer, dict) else None
    if isinstance(count, list) and count:
        count = max(count)
    if not isinstance(count, int):
        raise ValueError("/tokenize answered without a count")
    return count


def _never_fits(demand: Demand, limits: Sequence[ReplicaLimits], param: str) -> NeverFitsError:
    prompt, completion = demand.prompt_tokens, demand.max_tokens
    asked = []
    if prompt is not None:
        asked.append(f"{prompt} in the prompt")
    if completion is not None:
        asked.append(f"{completion} for the completion")
    total = (prompt or 0) + (completion or 0)
    context = max((limit.context_length or 0 for limit in limits), default=0)
    largest = max((limit.total_limit or 0 for limit in limits), default=0)
    longest = max((limit.prompt_limit or 0 for limit in limits), default=0)
    requested = f"However, you requested {total} tokens ({', '.join(asked)})."
    if context and total > context:
        limit = f"This model's maximum context length is {context} tokens."
    elif total > largest:
        limit = f"The KV cache of no replica can hold more than {largest} tokens of one request."
    else:
        limit = f"The longest prompt that a replica can take has {longest} tokens."
    prompt_fits = prompt is not None and prompt <= longest
    hint = "Ask for a shorter completion." if prompt_fits else "Shorten the prompt."
    return NeverFitsError(f"{limit} {requested} {hint}", param)
