"""What makes a run's figures worth less than they seem, in sentences."""

from collections.abc import Iterator, Mapping
from typing import Any

_LATE_SECONDS = 0.1
_LATE_OF_TTFT = 0.1
"""Later than that, or than this part of the median time to the first token, is told."""


def cautions(report: Mapping[str, Any]) -> Iterator[str]:
    """Those of a report, which needs all its figures but these."""
    late, ttft = report["late_p99_seconds"] or 0.0, report["ttft_p50_seconds"]
    if late > _LATE_SECONDS or (ttft is not None and late > _LATE_OF_TTFT * ttft):
        yield (
            f"Requests were sent late, one in a hundred by more than {late * 1e3:.0f} ms: the "
            "machine that sent them was too slow, and its times may be its own."
        )
    if gone := report.get("workers_lost"):
        yield (
            f"{gone} of {report['workers']} workers lost: their share of the arrivals was not sent "
            "from then on, and what they had not reported is in no figure."
        )
    if report.get("stopped_after_seconds") is not None:
        yield (
            "The run was stopped: requests that were under way then are in no figure, and the "
            "rates of its last phase are too low by them."
        )
    lost = report.get("simulation_lost_seconds")
    if report["simulated"] and lost is None:
        yield (
            "Whether the simulated replicas kept up with their curve is not known: none showed its "
            "metrics."
        )
    if lost:
        yield (
            f"A simulated replica fell behind its curve by {lost:.1f} s during the run: its "
            "machine was too slow, and times are not the curve's."
        )
    for name, count in report["slo"]["unmeasured"].items():
        yield f"{name} could not be measured of {count} answers: they count as missed."
    exact = report["exact_prompts"]
    if exact["wrong"]:
        yield (
            f"The server counted other tokens than the plan drew in {exact['wrong']} of "
            f"{exact['told']} prompts: is the tokenizer the served one?"
        )
