"""``/v1/loads``: SGLang's sections of a load snapshot."""

from typing import Any

from longleaf.embedded.loads import LoadSnapshot
from longleaf.embedded.options import EngineOptions
from longleaf.embedded.server.errors import ApiError

_SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})
_PROMETHEUS_PREFIX = {"speculative": "spec", "disaggregation": "disagg"}


def load_body(
    snapshot: LoadSnapshot, options: EngineOptions, include: str | None
) -> dict[str, Any]:
    """The one entry of ``loads``; ``include`` names sections, comma separated, None for all."""
    wanted = {name.strip() for name in include.split(",")} if include else {"all"}
    if not wanted <= _SECTIONS:
        raise ApiError(
            f"Invalid include sections: {sorted(wanted - _SECTIONS)}. "
            f"Valid options: {sorted(_SECTIONS)}"
        )
    body = _core(snapshot)
    sections: dict[str, tuple[str, dict[str, Any]]] = {
        "memory": ("memory", {"token_capacity": snapshot.max_total_num_tokens}),
        "queues": (
            "queues",
            {
                "waiting": snapshot.num_waiting_reqs,
                "grammar": 0,
                "paused": 0,
                "retracted": snapshot.num_retracted_reqs,
                "prealloc_ready": 0,
            },
        ),
    }
    if options.speculative.enabled and snapshot.spec_verify_calls:
        sections["spec"] = (
            "speculative",
            {
                "accept_length": round(snapshot.accept_length, 4),
                "accept_rate": round(snapshot.accept_rate, 4),
            },
        )
    for name in ("memory", "spec", "queues"):
        if name in sections and ({"all", name} & wanted):
            key, section = sections[name]
            body[key] = section
    return body


def _core(snapshot: LoadSnapshot) -> dict[str, Any]:
    return {
        "timestamp": snapshot.timestamp,
        "dp_rank": 0,
        "num_running_reqs": snapshot.num_running_reqs,
        "num_waiting_reqs": snapshot.num_waiting_reqs,
        "num_waiting_uncached_tokens": snapshot.num_waiting_uncached_tokens,
        "num_used_tokens": snapshot.num_used_tokens,
        "num_total_tokens": snapshot.num_total_tokens,
        "num_active_tokens": snapshot.num_total_tokens,
        "max_total_num_tokens": snapshot.max_total_num_tokens,
        "max_running_requests": snapshot.max_running_requests,
        "token_usage": round(snapshot.token_usage, 4),
        "gen_throughput": round(snapshot.gen_throughput, 2),
        "cache_hit_rate": round(snapshot.cache_hit_rate, 4),
        "utilization": 0.0,
        "total_prefill_uncached_tokens": snapshot.total_prefill_uncached_tokens,
        "total_prefill_busy_us": snapshot.total_prefill_busy_us,
        "decode_moments": None
        if snapshot.decode_moments is None
        else list(snapshot.decode_moments),
    }


def prometheus_text(load: dict[str, Any]) -> str:
    """The same figures as Prometheus gauges, as SGLang names them with ``format=prometheus``."""
    lines: list[str] = []
    for key, value in load.items():
        prefix = _PROMETHEUS_PREFIX.get(key, key)
        samples = (
            {f"{prefix}_{name}": number for name, number in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
        for name, number in samples.items():
            if isinstance(number, (int, float)) and name != "dp_rank":
                lines.append(f"# TYPE sglang_{name} gauge")
                lines.append(f'sglang_{name}{{dp_rank="0"}} {number}')
    return "\n".join(lines) + "\n"
