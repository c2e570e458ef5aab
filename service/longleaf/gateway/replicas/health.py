"""Active health check of one replica."""

import asyncio
import contextlib
import logging

from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.replicas.client import ReplicaError
from longleaf.gateway.replicas.replica import Replica

logger = logging.getLogger(__name__)


async def watch(replica: Replica, config: GatewayConfig) -> None:
    """Check ``replica`` for ever: ``/health``, and what it serves.

    A replica that is not ready is asked more often, so that it comes back soon. Facts are read each
    time: it may have returned with another model or a smaller KV pool, and engines do not check the
    model's name.
    """
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        try:
            await _check_health(replica, config.health_timeout)
            await replica.learn_facts(config.health_timeout)
            if not replica.ready:
                with contextlib.suppress(ReplicaError):  # not every engine reports a load
                    await replica.learn_load(config.health_timeout)
        except ReplicaError as failure:
            replica.count_error("health")
            busy = failure.kind == "first_byte_timeout" and replica.alive_at > began
            if not busy:  # requests that got tokens meanwhile prove more than a late answer
                replica.note_failure(str(failure))
        except Exception:
            logger.exception("health check of %s", replica.url)
            replica.note_failure("the health check itself failed")
        else:
            replica.note_success()
        replica.end_waiting(config.hang_timeout)
        await asyncio.sleep(config.health_interval if replica.ready else config.recovery_interval)


async def _check_health(replica: Replica, limit: float) -> None:
    status, _ = await replica.client.fetch("GET", "/health", limit)
    if status != 200:
        raise ReplicaError("bad_answer", f"{replica.url}/health answered {status}")
