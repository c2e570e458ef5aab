"""Usage objects and SGLang's extension object of an answer."""

from typing import Any

from longleaf.embedded.request import SpecStats, Usage
from longleaf.embedded.server.protocol import GenerationBody


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts, in SGLang's order."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def last_usage_body(usage: Usage, body: GenerationBody) -> dict[str, Any]:
    """The last usage object; with acceptance figures when the request asks for them.

    ``spec_tokens_details`` has SGLang's names and ours: ``steps`` decode steps that committed
    ``commit_len`` tokens each on average. The first token comes from prefill: completion_tokens ==
    1 + steps * commit_len.
    """
    answer = usage_body(usage)
    if body.return_spec_tokens_details:
        answer["spec_tokens_details"] = {
            **_spec_body(usage.spec),
            "commit_len": round(usage.spec.mean_commit_len, 4),
            "steps": usage.spec.steps,
        }
    return answer


def extension_body(usage: Usage, body: GenerationBody) -> dict[str, Any] | None:
    """SGLang's ``sglext`` object, None when the request asks for nothing in it."""
    answer: dict[str, Any] = {}
    if body.return_cached_tokens_details:
        answer["cached_tokens_details"] = {"device": usage.cached_tokens, "host": 0}
    if body.return_spec_tokens_details:
        answer["spec_tokens_details"] = _spec_body(usage.spec)
    return answer or None


def _spec_body(spec: SpecStats) -> dict[str, Any]:
    proposed = spec.proposed_drafts
    return {
        "spec_accept_rate": round(spec.correct_drafts / proposed, 4) if proposed else 0.0,
        "spec_accept_length": round(spec.mean_commit_len, 4),
        "spec_num_correct_drafts": spec.correct_drafts,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": spec.steps,
        "spec_correct_drafts_histogram": spec.histogram,
    }
