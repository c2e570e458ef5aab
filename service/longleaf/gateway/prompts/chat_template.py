"""Chat templates, rendered as transformers renders them."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MULTIMODAL = ("image", "audio", "video", "vision")
_MESSAGE_NAMES = frozenset({"message", "msg", "m"})


class TemplateError(ValueError):
    """The template is wrong, or refuses the messages."""


class ChatTemplate:
    """One template; ``TemplateError`` for one that does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self._takes_parts = _takes_parts(source, environment)
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat_template: {error}") from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> str:
        """The prompt of ``messages``, ready for the answer; ``extra``: further variables."""
        given = [self._message(message) for message in messages]
        variables = {"tools": None, **self._special_tokens, "add_generation_prompt": True, **extra}
        try:
            return self._template.render({**variables, "messages": given})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from error

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Text parts become one text for a template that takes no parts, as SGLang does it."""
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts:
            content = " ".join(str(part.get("text", "")) for part in content)
        return {**{name: value for name, value in message.items() if value}, "content": content}


def _takes_parts(source: str, environment: jinja2.Environment) -> bool:
    """Whether the template goes through the parts of a message's content."""
    if any(word in source for word in _MULTIMODAL):
        return True
    for loop in environment.parse(source).find_all(nodes.For):
        for found in (loop.iter, *loop.iter.find_all((nodes.Getitem, nodes.Getattr))):
            if _is_content(found):
                return True
    return False


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getitem):
        named = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    elif isinstance(node, nodes.Getattr):
        named = node.attr == "content"
    else:
        return False
    return named and isinstance(node.node, nodes.Name) and node.node.name in _MESSAGE_NAMES


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
