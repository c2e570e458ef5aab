"""``/ui``, for the port that serves metrics."""

import asyncio
import hashlib
import re
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

    async def ui(request: Request) -> Response:
        asked = request.query_params.get("page", "1")
        page = int(asked) if re.fullmatch(r"[0-9]{1,6}", asked) else 1
        text = await asyncio.to_thread(render, await watch.view(), page)
        # An engine's texts may hold halves of characters.
        return HTMLResponse(text.encode("utf-8", "replace"), headers=HEADERS)

    return [Route("/ui", ui)]
