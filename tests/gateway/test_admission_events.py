"""Admission over random sequences of events: nothing leaks, nothing goes below zero, nobody is
forgotten.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from longleaf.gateway.admission.admission import (
    Admission,
    Ask,
    Grant,
    NoReplicaError,
    SaturatedError,
)
from longleaf.gateway.admission.demand import Demand, NeverFitsError
from longleaf.gateway.config import GatewayConfig
from longleaf.gateway.replicas.budget import ReplicaBudget, Rules
from longleaf.gateway.replicas.client import ReplicaClient
from longleaf.gateway.replicas.facts import ReplicaFacts, ReplicaLimits
from longleaf.gateway.replicas.loads import LoadReport
from longleaf.gateway.replicas.registry import ReplicaRegistry
from longleaf.gateway.replicas.replica import Replica
from longleaf.gateway.routing.policy import Room, Routing
from longleaf.metrics import GatewayMetrics

CONFIG = GatewayConfig(
    replicas=("http://a:1", "http://b:1"),
    queue_size=6,
    queue_timeout=1_000,
    max_prefill_tokens=600,
    short_prompt_tokens=100,
    max_overtakes=2,
)
RULES = Rules(CONFIG.max_prefill_tokens, CONFIG.short_prompt_tokens)


@dataclass
class World:
    """A registry that is not started, two replicas without sockets, and the requests."""

    replicas: list[Replica]
    admission: Admission
    tasks: list["asyncio.Task[Grant]"] = field(default_factory=list)

    @property
    def held(self) -> list[Grant]:
        """Places that were given and not given back."""
        given_ = [
            task.result()
            for task in self.tasks
            if task.done() and not task.cancelled() and task.exception() is None
        ]
        return [grant for grant in given_ if not grant.reservation.released]

    def check(self) -> None:
        """The books say what the requests hold, and every refusal is one that clients know."""
        for replica in self.replicas:
            budget = replica.budget
            ours = [grant.reservation for grant in self.held if grant.replica is replica]
            assert budget.held == len(ours)
            assert budget.kv_tokens == sum(one.need.kv_tokens for one in ours)
            assert budget.prefill_tokens == sum(
                one.need.prefill_tokens for one in ours if one.prefilling
            )
        waiting = sum(not task.done() for task in self.tasks)
        assert self.admission.waiting == waiting <= CONFIG.queue_size
        for task in self.tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, NeverFitsError | NoReplicaError | SaturatedError)


SETTLED = 6
"""Turns of the event loop after which everything that was set off has happened."""


async def settle(turns: int = SETTLED) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def make_world() -> World:
    metrics = GatewayMetrics(CollectorRegistry())
    registry = ReplicaRegistry(CONFIG, metrics)
    admission = Admission(CONFIG, registry, Routing("round_robin", 0), metrics)
    replicas = []
    for url in CONFIG.replicas:
        budget = ReplicaBudget(RULES, admission.changed)
        replica = Replica(url, ReplicaClient(url, 1.0, None), metrics, 1, 1, budget)
        resize(replica, 1_000)
        replica.note_success()
        replicas.append(replica)
    registry._replicas = replicas
    return World(replicas, admission)


def resize(replica: Replica, capacity: int) -> None:
    limits = ReplicaLimits(2_000, None, capacity, max_running_requests=4)
    replica.facts = ReplicaFacts(({"id": "m"},), limits)
    replica.budget.set_limits(limits)


def apply(world: World, operation: tuple[object, ...]) -> None:
    held = world.held
    match operation:
        case ("admit", int(prompt), int(completion), int(key), int(priority)):
            ask = Ask(Demand("m", prompt, completion), key=str(key), priority=priority)
            world.tasks.append(asyncio.create_task(world.admission.admit(ask)))
        case ("cancel", int(index)) if world.tasks:
            world.tasks[index % len(world.tasks)].cancel()
        case ("release", int(index)) if held:
            held[index % len(held)].reservation.release()
        case ("first_token", int(index)) if held:
            held[index % len(held)].reservation.prefilled()
        case ("comes_or_goes", int(index)):
            replica = world.replicas[index % 2]
            if replica.ready:
                replica.note_failure("gone")
            else:
                replica.note_success()
        case ("resize", int(index), int(capacity)):
            resize(world.replicas[index % 2], capacity)
        case ("report", int(index), int(used), int(running)):
            budget = world.replicas[index % 2].budget
            report = LoadReport(running, 0, used, None, None, None, 0, 0.0, None)
            budget.report(report, budget.snapshot())


INDEX = st.integers(0, 30)
ADMIT = st.tuples(
    *(st.just("admit"), st.integers(1, 900), st.integers(1, 600)),
    *(st.integers(0, 2), st.integers(-1, 1)),
)
OPERATION = st.one_of(
    ADMIT,
    ADMIT,
    st.tuples(st.sampled_from(["cancel", "release", "first_token", "comes_or_goes"]), INDEX),
    st.tuples(st.just("resize"), INDEX, st.integers(16, 1_500)),
    st.tuples(st.just("report"), INDEX, st.integers(0, 1_200), st.integers(0, 5)),
    st.tuples(st.just("turns"), st.integers(1, SETTLED)),
    st.tuples(st.just("turns"), st.integers(1, SETTLED)),
)


async def run(operations: Sequence[tuple[object, ...]]) -> None:
    world = make_world()
    for operation in operations:
        apply(world, operation)
        if operation[0] == "turns":
            turns = int(str(operation[1]))
            await settle(turns)
            if turns >= SETTLED:
                world.check()
    await settle()
    world.check()
    # Everyone who waits is served once the replicas are there and empty.
    for replica in world.replicas:
        resize(replica, 1_500)
        if not replica.ready:
            replica.note_success()
    for _ in range(len(world.tasks) + 1):
        for grant in world.held:
            grant.reservation.release()
        world.admission.changed()
        await settle()
    assert all(task.done() for task in world.tasks)
    world.check()
    for replica in world.replicas:
        budget = replica.budget
        assert (budget.held, budget.kv_tokens, budget.prefill_tokens) == (0, 0, 0)
        assert (budget.sequences, budget.context_tokens) == (0, 0)
        await replica.close()


@settings(max_examples=400, deadline=None)
@given(st.lists(OPERATION, max_size=50))
def test_no_sequence_of_events_leaks_a_place_or_forgets_a_request(
    operations: list[tuple[object, ...]],
) -> None:
    asyncio.run(run(operations))


async def cancel_after(turns: int) -> None:
    """One waits behind another that ends; it leaves so many turns of the event loop later."""
    world = make_world()
    world.replicas[1].note_failure("gone")
    for number in range(2):
        apply(world, ("admit", 100, 700, number, 0))
    await settle()
    assert world.admission.waiting == 1
    apply(world, ("release", 0))
    await settle(turns)
    world.tasks[1].cancel()
    await settle()
    for grant in world.held:
        grant.reservation.release()
    world.check()
    assert [replica.budget.held for replica in world.replicas] == [0, 0]
    for replica in world.replicas:
        await replica.close()


@pytest.mark.parametrize("turns", range(SETTLED))
def test_leaving_in_the_very_moment_of_being_placed_leaks_nothing(turns: int) -> None:
    asyncio.run(cancel_after(turns))


async def fault_in_the_queue() -> None:
    """Two wait behind a third; the policy fails over the first of them."""
    world = make_world()
    world.replicas[1].note_failure("gone")
    for number in range(3):
        apply(world, ("admit", 100, 700 + number, number, 0))
    await settle()
    assert world.admission.waiting == 2
    routing = world.admission._routing
    choose = routing.choose

    def failing(replicas: Sequence[Replica], demand: Demand, room: Room) -> Replica | None:
        if demand.max_tokens == 701:
            raise ZeroDivisionError
        return choose(replicas, demand, room)

    routing.choose = failing  # type: ignore[method-assign]
    apply(world, ("release", 0))
    await settle()
    assert isinstance(world.tasks[1].exception(), ZeroDivisionError)
    assert world.tasks[2].result().replica is world.replicas[0]
    assert world.admission.waiting == 0
    for grant in world.held:
        grant.reservation.release()
    assert [replica.budget.held for replica in world.replicas] == [0, 0]
    for replica in world.replicas:
        await replica.close()


def test_a_fault_over_one_request_is_that_requests_alone() -> None:
    asyncio.run(fault_in_the_queue())
