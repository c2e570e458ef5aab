"""Locust's part: sends the plan's arrivals, gathers records, writes the report at the end.

Run by ``python -m longleaf_load``, which sets Locust's own options, or by ``locust`` itself.
"""

import hashlib
import os
import random
import sys
import time
import traceback
from typing import Any

import gevent
from gevent.pool import Pool
from locust import User, events, task
from locust.env import Environment
from locust.runners import STATE_MISSING, MasterRunner, WorkerRunner

from longleaf_load.arrivals import Arrival
from longleaf_load.interrupts import keyboard_interrupt
from longleaf_load.lengths import PlanError
from longleaf_load.options import add_options, open_run
from longleaf_load.progress import Progress
from longleaf_load.records import Record, from_row
from longleaf_load.run import Run
from longleaf_load.sessions import Sessions, Turn
from longleaf_load.stream import Client

_PROGRESS_SECONDS = 5.0
_LONGEST_WAIT = 120.0
"""A client that is told to come back later than that does not."""


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    add_options(parser)
    parser.add_argument("--load-workers", type=int, default=1, help="Workers of the run.")


@events.init.add_listener
def _init(environment: Environment, **_: Any) -> None:
    """Every process has a run; the master's (or the only one's) makes the report."""
    try:
        run = open_run(environment.parsed_options, environment.host)
    except PlanError as error:
        print(f"longleaf_load: error: {error}", file=sys.stderr)
        sys.exit(2)
    environment.longleaf, told = run, _told(run)
    runner = environment.runner
    if isinstance(runner, MasterRunner):
        environment.events.worker_report.add_listener(
            lambda client_id, data: _reported(environment, run, told, client_id, data)
        )
    elif isinstance(runner, WorkerRunner):
        run.reports = False
        environment.events.report_to_master.add_listener(
            lambda client_id, data: data.update(
                {
                    "longleaf": [record.row() for record in run.take()],
                    "longleaf_done": run.done,
                    "longleaf_told": told,
                }
            )
        )


def _told(run: Run) -> str:
    """What a master and its workers must have been told alike."""
    return hashlib.sha256(repr((run.plan, run.model, run.workers)).encode()).hexdigest()


def _reported(
    environment: Environment, run: Run, told: str, client_id: str, data: dict[str, Any]
) -> None:
    if client_id not in environment.runner.clients and client_id not in run.senders:
        return  # a worker of an earlier run, which is not over for it yet
    if data.pop("longleaf_told", None) != told:
        print(
            f"longleaf_load: error: worker {client_id} was told another plan, model, --rate, "
            "--longer, --plan-seed or --workers than its master",
            file=sys.stderr,
        )
        run.closed, environment.process_exit_code = True, 2
        environment.runner.quit()
        return
    for row in data.pop("longleaf", ()):
        run.add(from_row(row))
    run.senders.hear(client_id, data.pop("longleaf_done", False))
    _end_if_over(environment, run)


def _end_if_over(environment: Environment, run: Run) -> None:
    if run.senders.over(run.workers):
        run.done = bool(run.senders.finished)
        environment.runner.quit()


@events.test_start.add_listener
def _start(environment: Environment, **_: Any) -> None:
    """The clock starts, and so do the arrivals: they are nobody's that Locust may stop and start
    again, as it does with users where a busy machine made a worker miss its heartbeats.
    """
    run: Run = environment.longleaf
    if run.begun:
        return
    run.begin(_interrupt)
    if isinstance(environment.runner, MasterRunner):
        clients = environment.runner.clients.all
        run.senders.begin(one.id for one in clients if one.state != STATE_MISSING)
    if not isinstance(environment.runner, WorkerRunner):
        gevent.spawn(_tell, environment, run, Progress(run.plan, sys.stderr))
    if not isinstance(environment.runner, MasterRunner):
        gevent.spawn(Arrivals(environment, run).make)


def _interrupt() -> None:
    """Raise ``KeyboardInterrupt`` in the main greenlet, without a traceback: it is no error, and
    raised in any other greenlet it would end that one, or be lost there.
    """
    hub = gevent.get_hub()
    hub.NOT_ERROR = (*hub.NOT_ERROR, KeyboardInterrupt)
    hub.loop.run_callback(keyboard_interrupt)


def _tell(environment: Environment, run: Run, progress: Progress) -> None:
    """Progress, and which workers were lost: those that Locust gives up, and not those that it
    only misses for a while, as it does where a busy machine makes heartbeats late.
    """
    runner = environment.runner
    while not run.closed:
        progress.tell(run)
        gevent.sleep(_PROGRESS_SECONDS)
        if isinstance(runner, MasterRunner) and not run.closed:
            for name in sorted(run.senders.look(runner.clients)):
                print(f"\nlongleaf_load: error: worker {name} is lost", file=sys.stderr)
                _end_if_over(environment, run)


@events.quitting.add_listener
def _quit(environment: Environment, **_: Any) -> None:
    run: Run = environment.longleaf
    if not isinstance(environment.runner, WorkerRunner) and not run.closed:
        environment.process_exit_code = run.close()


class ArrivalUser(User):
    """Locust starts and counts users; arrivals are made beside them."""

    @task
    def stay(self) -> None:
        """Until the run is over."""
        while True:
            gevent.sleep(1.0)


class Arrivals:
    """Makes the sessions of this process's share of the arrivals, and waits for none."""

    def __init__(self, environment: Environment, run: Run) -> None:
        self.environment = environment
        self._run = run

    def make(self) -> None:
        """All of them; then the run is over."""
        run, runner = self._run, self.environment.runner
        try:
            self._make(runner.worker_index if isinstance(runner, WorkerRunner) else 0)
            run.done = True
        except Exception:
            traceback.print_exc()
        if not isinstance(runner, WorkerRunner):
            runner.quit()
        elif not run.done:
            os._exit(1)  # the master sees that it is gone; others end their part

    def _make(self, index: int) -> None:
        run = self._run
        if index >= run.workers:
            raise PlanError(f"the run has its {run.workers} workers (--workers)")
        sessions = Sessions(run.plan, run.source, run.model)
        client = Client(run.url, run.plan.api, run.plan.timeout_seconds, run.key)
        pool = Pool()
        for arrival in sessions.arrivals():
            if arrival.number % run.workers != index:
                continue
            if run.saturated_before(arrival.phase):
                break
            turn = sessions.turns(arrival)
            first = turn.next()
            run.wait_until(arrival.at, gevent.sleep)
            pool.spawn(self._session, run, client, arrival, turn, first)
        pool.join()

    def _session(
        self, run: Run, client: Client, arrival: Arrival, conversation: Any, turn: Turn | None
    ) -> None:
        at = arrival.at
        while turn is not None:
            record = self._request(run, client, arrival, turn, at)
            if record.outcome != "ok":
                return
            turn = conversation.next(record.answer)
            if turn is not None:
                gevent.sleep(run.plan.think_seconds * random.expovariate(1.0))
                at = run.clock()

    def _request(self, run: Run, client: Client, arrival: Arrival, turn: Turn, at: float) -> Record:
        """Ask, and again as often as the plan says, when told to come back."""
        for attempt in range(1, run.plan.retries + 2):
            sent = run.clock()
            record = Record(
                arrival=arrival.number,
                phase=arrival.phase,
                turn=turn.number,
                attempt=attempt,
                text=turn.text,
                prompt_tokens=turn.prompt_tokens,
                max_tokens=turn.max_tokens,
                document=turn.document,
                sent=sent,
                late=sent - at,
            )
            run.in_flight += 1
            try:
                self._ask(client, turn, record)
            finally:
                run.in_flight -= 1
            run.add(record)
            self._count(run, record)
            wait = record.retry_after
            if record.outcome != "refused" or wait is None or wait > _LONGEST_WAIT:
                break
            at = run.clock() + wait
            if attempt <= run.plan.retries:
                gevent.sleep(wait)
        return record

    def _ask(self, client: Client, turn: Turn, record: Record) -> None:
        """Ask; a client that waits for its first token no longer than ``leave_seconds`` goes then,
        wherever the request is.
        """
        with gevent.Timeout(turn.leave_seconds, False):
            client.ask(turn.body, record, turn.leave_after)
            return
        record.outcome, record.reason = "cancelled", "before the first token"

    def _count(self, run: Run, record: Record) -> None:
        """Locust's own statistics, by context: the whole answer, and its first token."""
        bucket = run.bucket(record)
        fire = self.environment.events.request.fire
        error = None if record.outcome in {"ok", "cancelled", "refused"} else record.reason
        name = f"{record.outcome} {bucket}" if record.outcome != "ok" else bucket
        fire(
            request_type="chat" if run.plan.api == "chat" else "completions",
            name=name,
            response_time=(record.seconds or 0.0) * 1e3,
            response_length=record.completion_tokens or 0,
            exception=None if error is None else RuntimeError(error),
            context={},
            start_time=time.time() - (record.seconds or 0.0),
        )
        if record.outcome == "ok" and record.ttft is not None:
            for kind, value in (("TTFT", record.ttft), ("TPOT", record.tpot)):
                if value is not None:
                    fire(
                        request_type=kind,
                        name=bucket,
                        response_time=value * 1e3,
                        response_length=0,
                        exception=None,
                        context={},
                    )
