"""Speculation and context: what a step costs and yields, by the length of its context."""

from ops.dashboards.panels import Board, Kind, Panel, Query, Row, rate, series

_NAMESPACE = 'namespace=~"$namespace"'
_HERE = f'{_NAMESPACE}, context_bucket=~"$context"'
_BUCKET = "{{context_bucket}}"


def _heat(family: str, where: str = "") -> Query:
    matchers = f"{_HERE}, {where}" if where else _HERE
    return Query(
        f"sum by (le) (increase({family}_bucket{{{matchers}}}[$__rate_interval]))", "{{le}}"
    )


def _total(family: str) -> str:
    return f"sum (rate({family}{{{_NAMESPACE}}}[$__rate_interval]))"


BOARD = Board(
    "longleaf-speculation",
    "Longleaf / Speculation and context",
    "commit_len and step time by context, the phases of a step, the tree, effective KV bandwidth, "
    "and the line that step time follows.",
    (
        Row(
            "By context",
            (
                Panel(
                    "Tokens a step (commit_len), mean",
                    "Accepted drafts plus the bonus token: 1 is what plain decoding gives. Text "
                    "decides it; if one context falls below the others on the same traffic, ask "
                    "`longleaf probe commit`.",
                    "short",
                    (series("longleaf:tokens_per_step:mean5m", f"{_BUCKET} {{{{instance}}}}"),),
                ),
                Panel(
                    "Step time, mean",
                    "A whole step, draft to compact.",
                    "s",
                    (
                        series(
                            "longleaf:step_seconds:mean5m",
                            f"{_BUCKET} {{{{instance}}}}",
                            'phase="total"',
                        ),
                    ),
                ),
                Panel(
                    "Speed-up over plain decoding",
                    "Tokens of a drafted step times the time of a plain one, over the time of a "
                    "drafted one. Below 1, speculation loses. Where no plain step was timed within "
                    "a day, verify stands in for it: an upper bound.",
                    "short",
                    (
                        series(
                            "longleaf:speculation_speedup:ratio15m", f"{_BUCKET} {{{{instance}}}}"
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Heat maps, by context",
            (
                Panel(
                    "commit_len at $context",
                    "Steps by the tokens that they committed.",
                    "short",
                    (_heat("longleaf_commit_len"),),
                    Kind.HEATMAP,
                    width=6,
                    by_context=True,
                ),
                Panel(
                    "Step time at $context",
                    "Steps by their time.",
                    "s",
                    (_heat("longleaf_step_seconds", 'phase="total"'),),
                    Kind.HEATMAP,
                    width=6,
                    by_context=True,
                ),
                Panel(
                    "Phases at $context",
                    "Draft, build, verify, accept and compact, stacked: they add up to the step. "
                    "Only verify may grow with the context.",
                    "s",
                    (
                        Query(
                            "avg by (phase) (longleaf:step_seconds:mean5m"
                            f'{{{_HERE}, phase!="total"}})',
                            "{{phase}}",
                        ),
                    ),
                    Kind.STACK,
                    width=6,
                    by_context=True,
                ),
            ),
        ),
        Row(
            "The tree",
            (
                Panel(
                    "Nodes a step, mean",
                    "Rows that a step verifies: the root and the drafted nodes.",
                    "short",
                    (
                        Query(
                            "sum by (context_bucket) (rate(longleaf_tree_nodes_sum"
                            f"{{{_NAMESPACE}}}[$__rate_interval])) / sum by (context_bucket) "
                            f"(rate(longleaf_tree_nodes_count{{{_NAMESPACE}}}[$__rate_interval]))",
                            _BUCKET,
                        ),
                    ),
                ),
                Panel(
                    "Useful-token share",
                    "Of the verified rows, those that became tokens.",
                    "percentunit",
                    (series("longleaf:useful_token_share:ratio5m", f"{_BUCKET} {{{{instance}}}}"),),
                    top=1,
                ),
                Panel(
                    "Accounting: commit_len less 1 less accepted depth",
                    "Tokens a second that the two metrics disagree by. Always 0: else the metrics "
                    "are wrong, and nothing else here can be trusted.",
                    "short",
                    (
                        Query(
                            f"{_total('longleaf_commit_len_sum')} - "
                            f"{_total('longleaf_commit_len_count')} - "
                            f"{_total('longleaf_accepted_depth_sum')}",
                            "disagreement",
                        ),
                    ),
                    bottom=None,
                ),
                Panel(
                    "Context rows that a draft reads",
                    "By the drafter's windowed layers, mean, beside their window. More than the "
                    "window is a fault.",
                    "short",
                    (
                        series("longleaf:drafter_span_tokens:mean5m", _BUCKET),
                        series("longleaf_drafter_window_tokens", "window {{instance}}"),
                    ),
                ),
                Panel(
                    "Commit probe",
                    "commit_len of texts of known difficulty in the probe's last run, and what is "
                    "expected of them.",
                    "short",
                    (
                        series("longleaf_probe_commit_len", "{{text}} {{context_bucket}}"),
                        series(
                            "longleaf_probe_commit_len_expected",
                            "expected {{text}} {{context_bucket}}",
                        ),
                    ),
                ),
                Panel(
                    "Probes",
                    "1 if the last run passed; the verdict is its answer in a word.",
                    "short",
                    (series("longleaf_probe_passed", "{{probe}}: {{verdict}}"),),
                    Kind.STAT,
                ),
                Panel(
                    "Age of the probe's last run",
                    "What the two panels before this one show is as old. Beyond the limit, the "
                    "alert LongleafProbeStale: it hangs, or nobody runs it any more.",
                    "s",
                    (
                        Query(
                            f"time() - longleaf_probe_timestamp_seconds{{{_NAMESPACE}}}",
                            "{{probe}} {{instance}}",
                        ),
                        series("longleaf_probe_max_age_seconds", "limit {{probe}} {{instance}}"),
                    ),
                ),
            ),
        ),
        Row(
            "Memory, and the line of step time",
            (
                Panel(
                    "Effective KV bandwidth",
                    "Latent KV bytes that verify read, over its time. Its other work counts as "
                    "time too, so the kernel itself is faster.",
                    "Bps",
                    (
                        series("longleaf:kv_read_bandwidth:bytes_per_second5m", "{{instance}}"),
                        Query(
                            "max by (namespace) (longleaf_gpu_memory_peak_bytes_per_second"
                            f"{{{_NAMESPACE}}})",
                            "peak of the card",
                        ),
                    ),
                ),
                Panel(
                    "Effective KV bandwidth, share of the card's peak",
                    "Near 0 at long contexts with kernels resident: the verify path lacks blocks.",
                    "percentunit",
                    (series("longleaf:kv_read_bandwidth:peak_ratio5m", "{{instance}}"),),
                    top=1,
                ),
                Panel(
                    "KV bytes read",
                    "Latent rows read by target attention, a second.",
                    "Bps",
                    (rate("longleaf_kv_read_bytes_total", "instance"),),
                ),
                Panel(
                    "Step time: measured and fitted",
                    "The line is fitted through the means of the buckets over an hour.",
                    "s",
                    (
                        series("longleaf:step_fit:seconds", f"fitted {_BUCKET}"),
                        series(
                            "longleaf:step_seconds:mean5m", f"measured {_BUCKET}", 'phase="total"'
                        ),
                    ),
                ),
                Panel(
                    "Residual of the fit",
                    "Measured over fitted, less 1. Alert at 0.5 either way.",
                    "percentunit",
                    (series("longleaf:step_fit_residual:ratio", f"{_BUCKET} {{{{instance}}}}"),),
                    bottom=None,
                ),
                Panel(
                    "Constant of the line",
                    "Step time of an empty context: everything but attention.",
                    "s",
                    (series("longleaf:step_fit_intercept:seconds1h", "{{instance}}"),),
                    Kind.STAT,
                    width=4,
                ),
                Panel(
                    "Slope of the line",
                    "Seconds that a token of context adds to a step.",
                    "s",
                    (series("longleaf:step_fit_slope:seconds_per_token1h", "{{instance}}"),),
                    Kind.STAT,
                    width=4,
                ),
                Panel(
                    "The gateway's step model",
                    "a (s) + b (s a token of context) + c (s a sequence), fitted by the gateway "
                    "from load reports.",
                    "s",
                    (series("longleaf_gateway_step_model_coefficient", "{{term}} {{replica}}"),),
                ),
                Panel(
                    "Its residual",
                    "Mean relative error of its latest predictions.",
                    "percentunit",
                    (series("longleaf_gateway_step_model_residual", "{{replica}}"),),
                ),
            ),
        ),
    ),
)
