"""Request bodies: what the gateway itself must understand of them.

Every field that is not named here is the engine's business and passes untouched.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: a million of them would hold up every stream."""

Count = Annotated[StrictInt, Field(ge=1, le=2**53)]
Completions = Annotated[StrictInt, Field(ge=1, le=128)]
"""As OpenAI limits them."""
Probability = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]


class Lenient(BaseModel):
    """Takes any further field."""

    model_config = ConfigDict(extra="allow")


class Message(Lenient):
    """One message of a chat."""

    role: StrictStr
    content: StrictStr | Items[dict[str, Any]] | None = None


class StreamOptions(Lenient):
    """Options of a streamed answer."""

    include_usage: StrictBool | None = None


class GenerationRequest(Lenient):
    """What chat completions and completions have in common."""

    model: Annotated[StrictStr, Field(min_length=1)]
    max_tokens: Count | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    n: Completions | None = None
    stop: StrictStr | Items[StrictStr] | None = None
    seed: StrictInt | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: (
        StrictStr
        | Annotated[Items[StrictStr], Field(min_length=1)]
        | Annotated[Items[StrictInt], Field(min_length=1)]
        | Annotated[Items[Items[StrictInt]], Field(min_length=1)]
    )


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    """Body of every error answer."""

    error: ErrorDetail


class ModelCard(Lenient):
    """One served model."""

    id: str
    object: str = "model"
    created: int | None = None
    owned_by: str | None = None
    max_model_len: int | None = None


class ModelList(BaseModel):
    """The models that the ready replicas serve."""

    object: str = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """State of the gateway."""

    status: str
    ready_replicas: int
