"""``/ui``, for the port that serves metrics."""

import hashlib
from base64 import b64encode

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from longleaf.ui.page import SCRIPT, STYLE, render
from longleaf.ui.state import Watch


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Nothing is loaded, from here or elsewhere, but the page itself again."""


def ui_routes(watch: Watch) -> list[Route]:
    """The routes of the page."""

    async def ui(_: Request) -> Response:
        return HTMLResponse(render(await watch.view()), headers=HEADERS)

    return [Route("/ui", ui)]
