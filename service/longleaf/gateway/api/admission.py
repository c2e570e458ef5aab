"""``POST /v1/admission``: what would happen to a request, without running it."""

from pydantic import BaseModel, Field

from longleaf.gateway.admission.intake import Intake
from longleaf.gateway.api.refusals import REFUSALS, refusal
from longleaf.gateway.auth import ApiKey
from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.prompts.reader import Prompt


class AdmissionAnswer(BaseModel):
    """Admitted now or not, why, and what to expect. Times in seconds; null: not known yet."""

    admitted: bool
    """Whether it would start at once."""
    reason: str
    """``ok``; what it would wait for (``queue``, ``kv_pool``, ``sequences``, ``prefill``, ``tpot``,
    ``ttft``); or the code of the error that it would get."""
    status: int
    """HTTP status that it would get: 200 also for one that would wait."""
    message: str | None = None
    retry_after: int | None = None
    prompt_tokens: int | None = None
    """Exact; null where no tokenizer could count them."""
    max_tokens: int | None = None
    reserved_tokens: int | None = None
    """KV pool tokens that it would reserve."""
    replica: str | None = None
    queue_position: int | None = Field(default=None, description="Requests served before it.")
    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    seconds_per_token: float | None = None


async def dry_answer(
    intake: Intake, prompt: Prompt, key: ApiKey | None, config: GatewayConfig
) -> AdmissionAnswer:
    """The answer for ``prompt``."""
    try:
        demand, forecast = await intake.forecast(prompt, key)
    except REFUSALS as error:
        told = refusal(error, prompt.inspection.model, config.health_interval)
        wait = told.headers.get("retry-after")
        return AdmissionAnswer(
            admitted=False,
            reason=told.reason,
            status=told.status,
            message=told.message,
            retry_after=None if wait is None else int(wait),
            max_tokens=prompt.inspection.max_tokens,
        )
    waits = forecast.obstacle or ("queue" if forecast.ahead else None)
    return AdmissionAnswer(
        admitted=waits is None,
        reason=waits or "ok",
        status=200,
        prompt_tokens=demand.prompt_tokens,
        max_tokens=demand.max_tokens,
        reserved_tokens=forecast.need.kv_tokens,
        replica=forecast.replica.url,
        queue_position=forecast.ahead,
        queue_seconds=forecast.queue_seconds,
        ttft_seconds=forecast.ttft_seconds,
        seconds_per_token=forecast.token_seconds,
    )
