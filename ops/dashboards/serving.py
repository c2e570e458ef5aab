"""Serving: what clients get, what is refused, and what the replicas hold."""

from ops.dashboards.panels import Board, Kind, Panel, Query, Row, quantiles, rate, series

_BY_CONTEXT = ("context_bucket",)

BOARD = Board(
    "longleaf-serving",
    "Longleaf / Serving",
    "Requests, time to first token, time per token, admission and queue, by prompt length.",
    (
        Row(
            "Requests",
            (
                Panel(
                    "Answers a second",
                    "By status and reason. 429 means that all replicas are full, 503 that there is "
                    "none, 499 that the client left.",
                    "reqps",
                    (rate("longleaf_gateway_requests_total", "code", "reason"),),
                    Kind.STACK,
                ),
                Panel(
                    "In flight",
                    "Requests that have arrived and are not yet answered in full, by route.",
                    "short",
                    (
                        Query(
                            "sum by (route) "
                            '(longleaf_gateway_in_flight_requests{namespace=~"$namespace"})',
                            "{{route}}",
                        ),
                    ),
                ),
                Panel(
                    "Failed exchanges with replicas, retries, aborts",
                    "A replica's error before its first event is retried elsewhere; an abort is a "
                    "generation that a replica was told to stop, as its client had left.",
                    "reqps",
                    (
                        rate("longleaf_gateway_upstream_errors_total", "kind"),
                        rate("longleaf_gateway_retries_total", legend="retries"),
                        rate("longleaf_gateway_aborts_total", "when", legend="aborts {{when}}"),
                    ),
                ),
            ),
        ),
        Row(
            "Speed, by prompt length",
            (
                Panel(
                    "Time to first token",
                    "From a streamed request's arrival to its first event: queue, prefill, relay.",
                    "s",
                    quantiles("longleaf_gateway_ttft_seconds", _BY_CONTEXT, 0.5, 0.95),
                ),
                Panel(
                    "Time per token",
                    "After the first event. Step time over commit_len, plus the relay.",
                    "s",
                    quantiles("longleaf_gateway_time_per_token_seconds", _BY_CONTEXT, 0.5, 0.95),
                ),
                Panel(
                    "Whole answer",
                    "From a request's arrival to the end of its answer.",
                    "s",
                    quantiles("longleaf_gateway_e2e_seconds", _BY_CONTEXT, 0.5, 0.95),
                ),
                Panel(
                    "Prompts a second",
                    "Streamed requests that got a first event.",
                    "reqps",
                    (rate("longleaf_gateway_ttft_seconds_count", "context_bucket"),),
                    Kind.STACK,
                ),
                Panel(
                    "First byte, by route",
                    "Of every route, streamed or not.",
                    "s",
                    quantiles("longleaf_gateway_first_byte_seconds", ("route",), 0.95),
                ),
                Panel(
                    "Counting prompts",
                    "How prompts' lengths were established: failed ones go to replicas unmeasured.",
                    "reqps",
                    (rate("longleaf_gateway_token_counts_total", "outcome"),),
                    Kind.STACK,
                ),
            ),
        ),
        Row(
            "Admission and queue",
            (
                Panel(
                    "Decisions",
                    "Admitted at once or after a wait, or refused, by reason.",
                    "reqps",
                    (rate("longleaf_gateway_admission_decisions_total", "decision", "reason"),),
                    Kind.STACK,
                ),
                Panel(
                    "Refused for want of room",
                    "Share of all decisions over 5 minutes; 429s and 503s, not prompts that can "
                    "never fit. Alert at 5 %.",
                    "percentunit",
                    (series("longleaf:admission_refused:ratio5m", "{{instance}}"),),
                    top=1,
                ),
                Panel(
                    "Queue",
                    "Requests that wait for room.",
                    "short",
                    (series("longleaf_gateway_queue_depth", "{{instance}}"),),
                ),
                Panel(
                    "Wait for room",
                    "However the wait ended.",
                    "s",
                    quantiles("longleaf_gateway_queue_wait_seconds", (), 0.5, 0.95),
                ),
                Panel(
                    "KV tokens reserved",
                    "By replica: reserved for running answers, in use beyond that by the replica's "
                    "own report (someone goes around the gateway), and the pool's size.",
                    "short",
                    (
                        series("longleaf_gateway_reserved_tokens", "reserved {{replica}}"),
                        series("longleaf_gateway_external_tokens", "external {{replica}}"),
                        series("longleaf_gateway_kv_capacity_tokens", "capacity {{replica}}"),
                    ),
                ),
                Panel(
                    "Prefill in flight",
                    "Prompt tokens sent to a replica whose first token has not come, and how fast "
                    "it prefills.",
                    "short",
                    (
                        series("longleaf_gateway_prefill_tokens_in_flight", "tokens {{replica}}"),
                        series(
                            "longleaf_gateway_prefill_tokens_per_second", "tokens/s {{replica}}"
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Replicas",
            (
                Panel(
                    "State",
                    "1 for the state that a replica is in.",
                    "short",
                    (series("longleaf_gateway_replica_state", "{{replica}} {{state}}"),),
                    top=1,
                ),
                Panel(
                    "KV pool, by state",
                    "Slots used by running requests, cached for reuse, free. SGLang reports free.",
                    "short",
                    (series("longleaf_kv_pool_tokens", "{{instance}} {{state}}"),),
                    Kind.STACK,
                ),
                Panel(
                    "KV pool, used share",
                    "By running requests; what is cached for reuse does not count. Alert at 95 %.",
                    "percentunit",
                    (series("longleaf:kv_pool_used:ratio", "{{instance}}"),),
                    top=1,
                ),
                Panel(
                    "Requests in the engines",
                    "Running, and waiting inside the engine (the gateway should let none wait).",
                    "short",
                    (
                        Query(
                            'sum by (instance) ({__name__=~"sglang[:_]num_running_reqs", '
                            'namespace=~"$namespace"})',
                            "running {{instance}}",
                        ),
                        Query(
                            'sum by (instance) ({__name__=~"sglang[:_]num_queue_reqs", '
                            'namespace=~"$namespace"})',
                            "waiting {{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Prefix cache",
                    "Share of prompt tokens that a replica had cached.",
                    "percentunit",
                    (
                        Query(
                            'max by (instance) ({__name__=~"sglang[:_]cache_hit_rate", '
                            'namespace=~"$namespace"})',
                            "{{instance}}",
                        ),
                    ),
                    top=1,
                ),
                Panel(
                    "Generated tokens",
                    "Tokens a second, by the engine's own report.",
                    "short",
                    (
                        Query(
                            'sum by (instance) ({__name__=~"sglang[:_]gen_throughput", '
                            'namespace=~"$namespace"})',
                            "{{instance}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
