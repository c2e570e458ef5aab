"""Admission: who may start now, who waits, who is refused, and why."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longleaf.gateway.admission.demand import Demand, NeverFitsError, never_fits
from longleaf.gateway.admission.queue import FairQueue, Waiting
from longleaf.gateway.admission.turnover import Turnover
from longleaf.gateway.admission.turns import Turns
from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.replicas.budget import Need, Obstacle, Reservation
from longleaf.gateway.replicas.drain_rate import UNKNOWN_SECONDS
from longleaf.gateway.replicas.facts import ReplicaFacts
from longleaf.gateway.replicas.registry import ReplicaRegistry
from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.routing.policy import Routing
from longleaf.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_TICK = 0.1
_LEAST_BOUND = 1_024
_BOUND_SHARE = 16


class NoReplicaError(Exception):
    """No ready replica serves the model and could hold the request."""


class SaturatedError(Exception):
    """It would fit later: the queue is full, or the deadline passed. ``retry_after`` in seconds."""

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after


@dataclass(slots=True)
class Ask:
    """A request for a place: what is asked, for whom."""

    demand: Demand
    param: str = "messages"
    """The field that a refusal for length names."""
    key: str = ""
    """The API key's id: fair shares go by it."""
    priority: int = 0
    arrived: float = field(default_factory=time.monotonic)
    """Monotonic seconds; a retry keeps its first arrival."""
    body_bytes: int = 0
    """Memory that it takes while it waits."""
    exclude: tuple[Replica, ...] = ()
    """Replicas that have failed this request."""


@dataclass(slots=True)
class Grant:
    """A place on a replica. Context manager: leaving it gives the place back."""

    replica: Replica
    reservation: Reservation

    def __enter__(self) -> "Grant":
        return self

    def __exit__(self, *_: object) -> None:
        self.reservation.release()


@dataclass(frozen=True, slots=True)
class Forecast:
    """What would happen to a request now; seconds, ``None`` where nothing is known yet."""

    replica: Replica
    need: Need
    obstacle: Obstacle | None
    ahead: int
    """Waiting requests that would be served before it."""
    queue_seconds: float | None
    ttft_seconds: float | None
    token_seconds: float | None


@dataclass(slots=True)
class _Entry:
    """``able``: replicas that could hold it, as of change ``seen`` of what they are. ``waits``: it
    found no place when it came.
    """

    ask: Ask
    granted: "asyncio.Future[Grant]"
    able: list[Replica] = field(default_factory=list)
    seen: int = -1
    waits: bool = False


class Admission:
    """Places requests on replicas. One instance a gateway, used from its event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: ReplicaRegistry,
        routing: Routing,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._registry = registry
        self._routing = routing
        self._metrics = metrics
        self._clock = clock
        self._queue: FairQueue[_Entry] = FairQueue(
            config.queue_size, config.queue_bytes, config.aging_interval
        )
        self._turnover = Turnover(clock)
        self._fleet: list[tuple[Replica, ReplicaFacts | None, int | None]] = []
        self._changes = 0
        self._turns: Turns[_Entry] = Turns(config.max_overtakes)
        """The last round's."""
        self._tick: asyncio.TimerHandle | None = None
        self._pump_soon = False

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def at_once(self, ask: Ask) -> Grant | None:
        """A place without waiting, or ``None``. Raises ``NoReplicaError``.

        A demand that is only bounded gets one where its bound does not matter: it is a small part
        of what is free.
        """
        able = self._able(ask)
        if not able:
            self._check_served(ask)
        if self._queue:
            return None
        return self._place(ask, able, bounded=ask.demand.prompt_tokens is None)

    async def admit(self, ask: Ask) -> Grant:
        """A place, once there is one. Raises as ``wait``."""
        return self.at_once(ask) or await self.wait(ask)

    async def wait(self, ask: Ask) -> Grant:
        """A place for one that found none at once.

        Raises ``NoReplicaError``, ``SaturatedError``, or ``NeverFitsError`` where the replicas
        shrank meanwhile. Cancelling it leaves nothing behind.
        """
        entry = _Entry(ask, asyncio.get_running_loop().create_future())
        cost = self._need(self._roomiest(ask), ask.demand).kv_tokens
        waiting = Waiting(entry, ask.key, ask.priority, ask.arrived, cost, ask.body_bytes)
        began = self._clock()
        self._queue.add(waiting)
        try:
            if self._queue.crowded and not self._overtakes(waiting):
                self._make_room(waiting)
        except Exception:
            self._queue.remove(waiting)
            raise
        if not entry.granted.done():
            self._pump()
        entry.waits = True
        try:
            left = ask.arrived + self._config.queue_timeout - self._clock()
            async with asyncio.timeout(max(left, 0.0)):
                grant = await entry.granted
        except TimeoutError:
            self._leave(waiting)
            self._check_served(ask)
            raise SaturatedError("queue_timeout", self.retry_after(ask)) from None
        except asyncio.CancelledError:
            self._leave(waiting)
            raise
        finally:
            self._metrics.queue_depth.set(len(self._queue))
            self._metrics.queue_wait_seconds.observe(self._clock() - began)
        return grant

    def _overtakes(self, newcomer: Waiting[_Entry]) -> bool:
        """Whether it got a place that the last round left to those behind: a round of its own for
        each refusal would be most of the gateway's work.
        """
        return self._placed(newcomer, self._able(newcomer.item.ask), self._turns)

    def _make_room(self, newcomer: Waiting[_Entry]) -> None:
        """Refuse who is too many. Raises where that is ``newcomer``."""
        victim = self._queue.surplus(newcomer)
        if victim is None:
            return
        refusal: Exception
        try:
            refusal = SaturatedError("queue_full", self.retry_after(victim.item.ask))
        except (NoReplicaError, NeverFitsError) as error:
            refusal = error  # a victim's replicas may be gone
        if victim is newcomer:
            raise refusal
        _refuse(victim, refusal)

    def _leave(self, waiting: Waiting[_Entry]) -> None:
        """The request gives up; a place that it was given this very moment goes back."""
        granted = waiting.item.granted
        served = not self._queue.remove(waiting) and granted.done() and not granted.cancelled()
        if served and granted.exception() is None:
            granted.result().reservation.release()
        self._note_queue()
        self.changed()

    def retry_after(self, ask: Ask) -> float:
        """Seconds until ``ask`` would get its turn: those before it at the rate at which its like
        did lately, none of them longer than it may wait.

        Where nothing has waited yet: until the replicas will have freed as much as all need.
        """
        short = self._is_short(ask)
        ahead = sum(
            each.cost for each in self._before(ask) if self._is_short(each.item.ask) is short
        )
        own = self._need(self._roomiest(ask), ask.demand).kv_tokens
        rate = self._turnover.tokens_per_second(short, ahead + own)
        if rate is None:
            return self._seconds_to_drain(ask)
        return min(ahead / rate, self._config.queue_timeout) + own / rate

    def _before(self, ask: Ask) -> list[Waiting[_Entry]]:
        return self._queue.before(ask.key, ask.priority, self._clock())

    def _is_short(self, ask: Ask) -> bool:
        return ask.demand.size <= self._config.short_prompt_tokens

    def _note_queue(self) -> None:
        self._turnover.note({self._is_short(each.item.ask) for each in self._queue})

    def _seconds_to_drain(self, ask: Ask) -> float:
        replicas = self._able(ask)
        tokens = sum(waiting.cost for waiting in self._queue)
        sequences = sum(waiting.item.ask.demand.sequences for waiting in self._queue)
        times = []
        for replica in replicas:
            need = self._need(replica, ask.demand)
            seconds = replica.budget.seconds_until_free(
                tokens // len(replicas) + need.kv_tokens,
                sequences // len(replicas) + need.sequences,
            )
            if seconds is not None:
                times.append(seconds)
        return min(times, default=UNKNOWN_SECONDS)

    def forecast(self, ask: Ask) -> Forecast:
        """What would happen to ``ask`` now. Raises ``NoReplicaError``; changes nothing."""
        self._check_served(ask)
        chosen = None if self._queue else self._choose(ask, self._able(ask))
        if chosen is None:
            replica = self._roomiest(ask)
            need = self._need(replica, ask.demand)
        else:
            replica, need = chosen
        budget = replica.budget
        obstacle = budget.obstacle(need)
        ahead = len(self._before(ask))
        start = 0.0 if obstacle is None and not ahead else self.retry_after(ask)
        steps = budget.steps
        prefill = steps.prefill_seconds(budget.prefill_tokens + need.prefill_tokens)
        context, batch = budget.context + need.context_tokens, budget.batch + need.sequences
        return Forecast(
            replica,
            need,
            obstacle,
            ahead,
            start,
            None if prefill is None else start + prefill,
            steps.token_seconds(context, batch),
        )

    def _able(self, ask: Ask) -> list[Replica]:
        """Ready replicas that could hold it and have not failed it."""
        return [
            replica
            for replica in self._registry.ready()
            if replica not in ask.exclude and ask.demand.fits(replica)
        ]

    def _check_served(self, ask: Ask) -> None:
        """``NoReplicaError`` or ``NeverFitsError`` where waiting is no use."""
        if self._able(ask):
            return
        known = [replica for replica in self._registry.replicas if ask.demand.serves(replica)]
        if known and not any(ask.demand.fits(replica) for replica in known):
            raise never_fits(ask.demand, known, ask.param)
        raise NoReplicaError

    def _need(self, replica: Replica, demand: Demand) -> Need:
        cached = self._routing.cached_tokens(replica, demand)
        return demand.need(replica, self._config.assumed_completion_tokens, cached)

    def _roomiest(self, ask: Ask) -> Replica:
        """The replica where it will most likely run: the one with the most room. Raises as
        ``_check_served`` where none could hold it.
        """
        able = self._able(ask)
        if not able:
            self._check_served(ask)
        return max(
            able,
            key=lambda replica: (replica.budget.free_tokens or 0, -replica.in_flight),
        )

    def _choose(
        self, ask: Ask, able: Sequence[Replica], bounded: bool = False
    ) -> tuple[Replica, Need] | None:
        """One of ``able`` that has room now, and what it would take of it. ``bounded``: by a bound
        that is small there.
        """
        needs: dict[Replica, Need] = {}
        open_to_more = [one for one in able if one.has_connection and not one.budget.full]

        def room(replica: Replica) -> bool:
            if bounded and not self._bound_is_small(replica, ask.demand):
                return False
            needs[replica] = self._need(replica, ask.demand)
            return replica.budget.obstacle(needs[replica]) is None

        replica = self._routing.choose(open_to_more, ask.demand, room)
        return None if replica is None else (replica, needs[replica])

    def _place(self, ask: Ask, able: Sequence[Replica], bounded: bool = False) -> Grant | None:
        chosen = self._choose(ask, able, bounded)
        if chosen is None:
            return None
        replica, need = chosen
        self._routing.placed(replica, ask.demand)
        return Grant(replica, replica.budget.reserve(need))

    def _bound_is_small(self, replica: Replica, demand: Demand) -> bool:
        if demand.bound is None:
            return False
        free = replica.budget.free_tokens
        return free is None or demand.bound <= max(_LEAST_BOUND, free // _BOUND_SHARE)

    def changed(self) -> None:
        """Something may have room now: look, but not in the middle of what changed it."""
        if self._queue and not self._pump_soon:
            self._pump_soon = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Give places to those whose turn it is.

        One that does not fit keeps the replicas it could use from all behind it, but a short prompt
        may overtake it, up to a bound. A request that cannot be placed for a fault of ours is
        refused; the others have their turns.
        """
        self._pump_soon = False
        turns = self._turns = Turns(self._config.max_overtakes)
        ready = self._look_at_fleet()
        try:
            for waiting in self._queue.ordered(self._clock()):
                if waiting.item.granted.done():
                    continue  # cancelled: about to leave
                try:
                    self._take_turn(waiting, turns)
                except Exception as error:
                    logger.exception("request could not be placed")
                    self._queue.remove(waiting)
                    _refuse(waiting, error)
                if turns.over(ready):
                    break
        finally:
            self._note_queue()
            self._metrics.queue_depth.set(len(self._queue))
            self._keep_ticking()

    def _look_at_fleet(self) -> list[Replica]:
        """The ready replicas. Where they, or what they can hold, changed, those who wait are to be
        matched with them again; to do it in every round would be most of its work.
        """
        ready = self._registry.ready()
        fleet = [(one, one.facts, one.budget.max_sequences) for one in ready]
        if fleet != self._fleet:
            self._fleet = fleet
            self._changes += 1
        return ready

    def _take_turn(self, waiting: Waiting[_Entry], turns: Turns[_Entry]) -> None:
        entry = waiting.item
        ask = entry.ask
        if entry.seen != self._changes:
            entry.able, entry.seen = self._able(ask), self._changes
        able = entry.able
        if not able:
            self._give_up(waiting)
            return
        if not self._placed(waiting, able, turns):
            turns.passed(waiting, able)

    def _placed(self, waiting: Waiting[_Entry], able: list[Replica], turns: Turns[_Entry]) -> bool:
        """Give ``waiting`` a place on one of ``able`` that it may use, if there is one."""
        entry, short = waiting.item, self._is_short(waiting.item.ask)
        usable = [replica for replica in able if turns.may_use(replica, short)]
        grant = self._place(entry.ask, usable)
        if grant is None:
            return False
        self._queue.serve(waiting)
        if entry.waits:
            self._turnover.served(short, waiting.cost)
        entry.granted.set_result(grant)
        turns.served(grant.replica)
        return True

    def _give_up(self, waiting: Waiting[_Entry]) -> None:
        """Refuse one that can no longer be served; one whose replica may come back waits on."""
        try:
            self._check_served(waiting.item.ask)
        except NeverFitsError as error:
            self._queue.remove(waiting)
            _refuse(waiting, error)
        except NoReplicaError:
            pass

    def _keep_ticking(self) -> None:
        """While someone waits, look again: replicas come and go, predictions change."""
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        if self._queue:
            self._tick = asyncio.get_running_loop().call_later(_TICK, self._pump)


def _refuse(waiting: Waiting[_Entry], error: Exception) -> None:
    if not waiting.item.granted.done():
        waiting.item.granted.set_exception(error)
