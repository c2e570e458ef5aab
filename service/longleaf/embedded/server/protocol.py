"""Request bodies of the HTTP API. Unknown fields are ignored, as SGLang does; ``null`` means the
default.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    model_validator,
)

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: a million of them would hold up every answer."""

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class ContentPart(_Body):
    """One part of a message; only ``text`` parts are understood."""

    type: str
    text: str = ""


class Message(_Body):
    """One message of a chat."""

    role: Annotated[Role, BeforeValidator(_lower)]
    content: str | Items[ContentPart] | None = None


class StreamOptions(_Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(_Body):
    """Only ``text`` is supported."""

    type: str = "text"


class GenerationBody(_Body):
    """Fields that chat completions and completions share.

    ``speculative`` is Longleaf's own: false decodes this request without draft trees (for
    comparisons). ``return_spec_tokens_details`` is SGLang's later field: acceptance figures in
    ``sglext`` and in the last usage object. ``metadata`` is the client's own; a simulated engine
    reads in it what kind of text it should pretend to write.
    """

    model: str = "default"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int = 1
    seed: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    rid: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    return_cached_tokens_details: bool = False
    return_spec_tokens_details: bool = False
    speculative: bool = True
    metadata: dict[str, Any] | None = None
    # Refused unless they ask for nothing.
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: dict[str, Any] | None = None
    response_format: ResponseFormat = ResponseFormat()
    regex: str | None = None
    ebnf: str | None = None
    stop_regex: str | Items[str] | None = None


class ChatBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: Items[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    continue_final_message: bool = False


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: str | Items[StrictInt] | Items[str] | Items[Items[StrictInt]]
    max_tokens: int = 16
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool = False
    suffix: str | None = None
    json_schema: str | None = None


class TokenizeBody(_Body):
    """Body of ``POST /tokenize``: a prompt, several, or a chat."""

    model: str = "default"
    prompt: str | Items[str] | None = None
    messages: Items[Message] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("Exactly one of 'prompt' or 'messages' must be provided.")
        return self


class DetokenizeBody(_Body):
    """Body of ``POST /detokenize``."""

    model: str = "default"
    tokens: Items[StrictInt] | Items[Items[StrictInt]]
    skip_special_tokens: bool = True


class AbortBody(_Body):
    """Body of ``POST /abort_request``: ids that begin with ``rid``, or all."""

    rid: str = ""
    abort_all: bool = False
