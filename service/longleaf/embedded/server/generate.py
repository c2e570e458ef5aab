"""The routes that generate text, and those that only tokenize."""

from collections.abc import Sequence
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Request, Response

from longleaf.embedded.server.answer import GenerationResponse
from longleaf.embedded.server.body import read_body
from longleaf.embedded.server.errors import ApiError
from longleaf.embedded.server.params import (
    check_chat,
    check_completion,
    check_lengths,
    generation_request,
)
from longleaf.embedded.server.protocol import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    TokenizeBody,
)
from longleaf.embedded.server.render import ChatRenderer, CompletionRenderer
from longleaf.embedded.server.service import Service
from longleaf.embedded.tokenizer import TemplateError, Tokenizer

_INLINE_CHARACTERS = 16_384


def generation_routes(service: Service) -> APIRouter:
    """Chat completions, completions, abort, tokenize and detokenize."""
    router = APIRouter()
    tokenizer = service.loaded.tokenizer
    context_length = service.loaded.info.context_length
    limit = service.server.max_body_bytes
    prompts = PromptEncoder(tokenizer, context_length)
    encode, encode_chat = prompts.encode, prompts.encode_chat

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        service.check_open()
        body = await read_body(request, ChatBody, limit)
        max_tokens = check_chat(body, context_length)
        top = (body.top_logprobs or 0) if body.logprobs else None
        prompt = await encode_chat(body.messages, body.chat_template_kwargs)
        generation = generation_request(body, prompt, max_tokens, top, service.loaded.sampling)
        check_lengths(len(prompt), max_tokens, context_length)
        renderer = ChatRenderer(body, generation, tokenizer, service.fingerprint)
        return GenerationResponse(service.engine, generation, renderer, body.stream)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        service.check_open()
        body = await read_body(request, CompletionBody, limit)
        given = check_completion(body, service.loaded.info.vocab_size)
        prompt = await encode(given) if isinstance(given, str) else given
        generation = generation_request(
            body, prompt, body.max_tokens, body.logprobs, service.loaded.sampling
        )
        check_lengths(len(prompt), body.max_tokens, context_length)
        renderer = CompletionRenderer(body, generation, tokenizer, service.fingerprint)
        return GenerationResponse(service.engine, generation, renderer, body.stream)

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = await read_body(request, AbortBody, limit)
        if body.rid or body.abort_all:
            service.engine.abort("" if body.abort_all else body.rid)
        return Response()

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, TokenizeBody, limit)
        tokens: list[int] | list[list[int]]
        count: int | list[int]
        if body.messages is not None:
            if not body.messages:
                raise ApiError("Messages cannot be empty.")
            tokens = await encode_chat(body.messages, body.chat_template_kwargs)
            count = len(tokens)
        elif isinstance(body.prompt, list):
            rows = [await encode(text, body.add_special_tokens) for text in body.prompt]
            tokens, count = rows, [len(row) for row in rows]
        else:
            tokens = await encode(body.prompt or "", body.add_special_tokens)
            count = len(tokens)
        return {"tokens": tokens, "count": count, "max_model_len": context_length}

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, DetokenizeBody, limit)
        rows = [[row] if isinstance(row, int) else row for row in body.tokens]
        for token in (token for row in rows for token in row):
            if not 0 <= token < tokenizer.vocab_size:
                raise ApiError(f"tokens must be in 0..{tokenizer.vocab_size - 1}, got {token}.")
        if body.tokens and isinstance(body.tokens[0], list):
            return {"text": [tokenizer.decode(row, body.skip_special_tokens) for row in rows]}
        flat = [token for row in rows for token in row]
        return {"text": tokenizer.decode(flat, body.skip_special_tokens)}

    return router


class PromptEncoder:
    """Tokenizes prompts away from the event loop, and only those that can fit the context.

    The tokenizer holds the interpreter for seconds and gigabytes on a prompt of many megabytes, so
    one that is too long by its size alone (a token stands for at most so many bytes) is refused.
    """

    def __init__(self, tokenizer: Tokenizer, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._context_length = context_length

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; ``ApiError`` where its size alone shows that it is too long."""
        if len(text) < _INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens)
        size = len(text.encode("utf-8", errors="replace"))
        fewest = -(-size // self._tokenizer.longest_token_bytes)
        if fewest >= self._context_length:
            raise ApiError(
                f"The input (at least {fewest} tokens) is longer than the model's context length "
                f"({self._context_length} tokens)."
            )
        return await anyio.to_thread.run_sync(self._tokenizer.encode, text, add_special_tokens)

    async def encode_chat(
        self, messages: Sequence[Message], variables: dict[str, Any]
    ) -> list[int]:
        """Ids of the prompt that the chat template makes of ``messages``."""
        plain = [message.model_dump() for message in messages]
        try:
            text = self._tokenizer.render_chat(plain, variables)
        except TemplateError as error:
            raise ApiError(str(error)) from error
        return await self.encode(text, add_special_tokens=False)
