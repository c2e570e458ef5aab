"""Reads a replica's load again and again into its budget."""

import asyncio
import logging
import math
from functools import partial

from longleaf.gateway.replicas.client import ReplicaError
from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.replicas.step_model import StepModel
from longleaf.metrics import GatewayMetrics

logger = logging.getLogger(__name__)


async def watch_loads(replica: Replica, interval: float, limit: float) -> None:
    """Read the load of ``replica`` every ``interval`` seconds, in ``limit`` each, for ever."""
    silent = False
    while True:
        try:
            if replica.ready:
                await replica.learn_load(limit)
                silent = False
        except ReplicaError as failure:
            if not silent:
                fields = {"replica": replica.url, "why": str(failure)}
                logger.warning("replica does not report its load", extra={"fields": fields})
            silent = True
        except Exception:
            logger.exception("load report of %s", replica.url)
        await asyncio.sleep(interval)


def expose(replica: Replica, metrics: GatewayMetrics) -> None:
    """Publish the budget and the step model of ``replica``, as they are at each scrape."""
    budget, url = replica.budget, replica.url
    steps = budget.steps
    for gauge, value in (
        (metrics.reservations, lambda: budget.held),
        (metrics.reserved_tokens, lambda: budget.kv_tokens),
        (metrics.reserved_bytes, lambda: budget.kv_tokens * _known(budget.bytes_per_token)),
        (metrics.external_tokens, lambda: budget.external_tokens),
        (metrics.prefill_tokens, lambda: budget.prefill_tokens),
        (metrics.kv_capacity, lambda: _known(budget.capacity)),
        (metrics.step_residual, lambda: _known(steps.residual)),
        (metrics.prefill_rate, lambda: _known(steps.prefill_rate)),
    ):
        gauge.labels(url).set_function(value)
    for index, term in enumerate(("a", "b", "c")):
        gauge = metrics.step_coefficient.labels(url, term)
        gauge.set_function(partial(_coefficient, steps, index))


def _coefficient(steps: StepModel, index: int) -> float:
    return steps.coefficients[index] if steps.observations else math.nan


def _known(value: float | None) -> float:
    return math.nan if value is None else value
