"""``/v1/loads``: SGLang's sections of a load snapshot."""

from typing import Any

from longleaf.embedded.loads import LoadSnapshot
from longleaf.embedded.server.errors import ApiError
from longleaf.embedded.server.service import Service

_SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})
_GB = 1 << 30
_DISAGGREGATION = {
    "mode": "null",
    "prefill_bootstrap_queue_reqs": 0,
    "prefill_inflight_queue_reqs": 0,
    "decode_prealloc_queue_reqs": 0,
    "decode_transfer_queue_reqs": 0,
    "decode_retracted_queue_reqs": 0,
    "kv_transfer_speed_gb_s": 0.0,
    "kv_transfer_latency_ms": 0.0,
}
_PROMETHEUS_PREFIX = {"speculative": "spec", "disaggregation": "disagg"}


def load_body(service: Service, include: str | None) -> dict[str, Any]:
    """The one entry of ``loads``; ``include`` names sections, comma separated, None for all."""
    wanted = {name.strip() for name in include.split(",")} if include else {"all"}
    if not wanted <= _SECTIONS:
        raise ApiError(
            f"Invalid include sections: {sorted(wanted - _SECTIONS)}. "
            f"Valid options: {sorted(_SECTIONS)}"
        )
    snapshot = service.engine.snapshot
    body = _core(snapshot)
    for include_name, name, section in (
        ("memory", "memory", _memory(service, snapshot)),
        ("spec", "speculative", _speculative(snapshot)),
        ("disagg", "disaggregation", _DISAGGREGATION),
        ("queues", "queues", _queues(snapshot)),
    ):
        if section is not None and wanted & {"all", include_name}:
            body[name] = section
    return body


def _memory(service: Service, snapshot: LoadSnapshot) -> dict[str, Any]:
    return {
        "weight_gb": round(service.loaded.info.weight_bytes / _GB, 3),
        "kv_cache_gb": round(service.loaded.kv_cache_bytes / _GB, 3),
        "graph_gb": 0.0,
        "token_capacity": snapshot.max_total_num_tokens,
    }


def _speculative(snapshot: LoadSnapshot) -> dict[str, Any] | None:
    if not snapshot.spec_verify_calls:
        return None
    return {
        "accept_length": round(snapshot.accept_length, 4),
        "accept_rate": round(snapshot.accept_rate, 4),
    }


def _queues(snapshot: LoadSnapshot) -> dict[str, Any]:
    return {
        "waiting": snapshot.num_waiting_reqs,
        "grammar": 0,
        "paused": 0,
        "retracted": snapshot.num_retracted_reqs,
        "prealloc_ready": 0,
    }


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
