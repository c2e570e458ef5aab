"""The client of a request, as far as ASGI does not show it."""

from collections.abc import Callable
from typing import Protocol

KEY = "longleaf.client"
"""Of the scope, where the connection puts it."""


class Client(Protocol):
    """A request's connection. ASGI's ``receive`` tells the same, but only to a task that waits: a
    task and a timer for each request cost more than their answers.
    """

    def whole_body(self) -> bytes | None:
        """The body, if all of it is here and none was received; nothing is left to receive then."""
        ...

    def on_leave(self, call: Callable[[], None]) -> None:
        """``call`` once the client leaves before it has its whole answer; at once if it has left.
        The body must have been received.
        """
        ...

    def forget_leave(self) -> None:
        """Call nothing any more."""
        ...
