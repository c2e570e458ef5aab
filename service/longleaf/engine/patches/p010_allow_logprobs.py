"""Let requests of DDTREE ask for log-probabilities."""

import sys
from functools import wraps
from typing import Any

from longleaf.engine.patches import Patch


def _apply() -> None:
    from sglang.srt.speculative import dflash_utils

    refuse = dflash_utils.validate_dflash_request
    if getattr(refuse, "longleaf_original", None) is not None:
        return

    @wraps(refuse)
    def validate(req: Any, enable_overlap: bool) -> str | None:
        from sglang.srt.runtime_context import get_spec

        answer: str | None
        if get_spec().speculative_algorithm != "DDTREE":
            answer = refuse(req, enable_overlap)
        elif req.return_hidden_states:
            answer = "DDTREE speculative decoding does not support return_hidden_states."
        else:
            answer = None
        return answer

    validate.longleaf_original = refuse  # type: ignore[attr-defined]
    dflash_utils.validate_dflash_request = validate
    scheduler = sys.modules.get("sglang.srt.managers.scheduler")
    if scheduler is not None and hasattr(scheduler, "validate_dflash_request"):
        vars(scheduler)["validate_dflash_request"] = validate


PATCH = Patch(
    number=10,
    name="allow_logprobs",
    why=(
        "SGLang refuses log-probabilities for every algorithm of the DFLASH family, which DDTREE "
        "belongs to and whose worker computes them; the refusal is a function that the "
        "scheduler imports by name."
    ),
    module="sglang.srt.speculative.dflash_utils",
    sha256="c432efd27a08689cb32008506bc68956cf7689450cb947337f0770dae432e6a5",
    apply=_apply,
)
