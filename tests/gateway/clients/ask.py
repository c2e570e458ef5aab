"""Asks a gateway through another project's client, and prints as JSON what that client made of it.

    python ask.py litellm|langchain BASE_URL MODEL

Runs in a Python that has these clients; imports nothing of Longleaf.
"""

import json
import sys
from importlib import import_module
from typing import Any

ASK = [{"role": "user", "content": "Count from 1 to 20."}]
LONG = [{"role": "user", "content": "one two three " * 20_000}]


def ask_litellm(url: str, model: str) -> dict[str, object]:
    """LiteLLM's own client, told that this is an OpenAI-like server."""
    litellm: Any = import_module("litellm")

    litellm.suppress_debug_info = True
    common: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": url,
        "api_key": "none",
        "temperature": 0,
    }
    few = {**common, "messages": ASK, "max_tokens": 24, "num_retries": 0}
    whole = litellm.completion(**few)
    stream = litellm.completion(**few, stream=True, stream_options={"include_usage": True})
    parts = list(stream)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    usage = [part.usage for part in parts if getattr(part, "usage", None)]
    errors = {}
    for name, wrong in (
        ("too_long", {**few, "messages": LONG}),
        ("too_long_streamed", {**few, "messages": LONG, "stream": True}),
        ("unknown_model", {**few, "model": "openai/nobody"}),
        ("wrong_value", {**few, "temperature": -1}),
    ):
        try:
            litellm.completion(**wrong)
        except Exception as error:
            errors[name] = type(error).__name__
    return {
        "whole": whole.choices[0].message.content,
        "stream": text,
        "completion_tokens": [whole.usage.completion_tokens, usage[-1].completion_tokens],
        "errors": errors,
    }


def ask_langchain(url: str, model: str) -> dict[str, object]:
    """LangChain's chat model for OpenAI."""
    make: Any = import_module("langchain_openai").ChatOpenAI

    common: dict[str, Any] = {
        "base_url": url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 24,
    }
    chat = make(model=model, max_retries=0, stream_usage=True, **common)
    whole = chat.invoke(ASK)
    parts = list(chat.stream(ASK))
    usage = [part.usage_metadata for part in parts if part.usage_metadata]
    errors = {}
    for name, model_name, messages in (
        ("too_long", model, LONG),
        ("unknown_model", "nobody", ASK),
    ):
        try:
            make(model=model_name, max_retries=0, **common).invoke(messages)
        except Exception as error:
            errors[name] = [cls.__name__ for cls in type(error).__mro__]
    return {
        "whole": whole.content,
        "stream": "".join(str(part.content) for part in parts),
        "completion_tokens": [
            whole.usage_metadata["output_tokens"],
            usage[-1]["output_tokens"],
        ],
        "errors": errors,
    }


if __name__ == "__main__":
    client, base_url, model_name = sys.argv[1:]
    ask = {"litellm": ask_litellm, "langchain": ask_langchain}[client]
    print(json.dumps(ask(base_url, model_name)))
