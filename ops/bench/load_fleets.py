"""The simulated fleets of the load benchmark: sizes, capacity, and what they got done."""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from longleaf.capacity.model import Model
from longleaf.capacity.traffic import normalized, parse_kind
from longleaf.simulate.commits import load_commits
from longleaf.simulate.curve import load_curve
from longleaf_load.records import Record
from longleaf_load.slo import Slo

FLEETS = {1: (4.0, 6.0), 8: (2.0, 2.0), 64: (0.5, 4.0)}
"""Replicas; the speed at which they are simulated (a promise in whole seconds says little where a
second is many of the curve's), and how much longer the phases are. Half of each, in which queues
fill and the phase before ends, is not weighed: 64 replicas' queue takes 25 of the curve's seconds
to fill at twice their capacity, and one prompt of 185k is an eighth of what one replica does in
three minutes.
"""
_MIX = ((0.5, "2k"), (0.3, "16k"), (0.14, "64k"), (0.06, "185k"))
_SEQUENCES, _POOL = 8, 218_000


def capacity() -> float:
    """Requests a second of the plan ``capacity`` that one replica serves, by the formulas."""
    words = [f"{share}:{length}:200:{text}" for share, length in _MIX for text in
             ("predictable", "code", "prose")]  # fmt: skip
    kinds = normalized([parse_kind(word) for word in words])
    model = Model(load_curve("h200-ddtree"), load_commits(), kinds, _POOL, _SEQUENCES)
    return model.most_per_replica


def steady_work(records: Iterable[Record], slo: Slo, phases: Sequence[float]) -> list[float]:
    """By phase, of so many seconds: what of a replica's time, in the curve's seconds, the requests
    took that met the objective and ended in its second half. Requests differ a hundredfold: how
    many of a phase's requests are served sooner or later says little.
    """
    curve, done = load_curve("h200-ddtree"), [0.0] * len(phases)
    ends = list(itertools.accumulate(phases))
    for record in records:
        ended = record.sent + (record.seconds or 0.0)
        phase = bisect_right(ends, ended)
        steady = phase < len(phases) and ended >= ends[phase] - phases[phase] / 2
        if steady and slo.met_by(record):
            context = record.prompt_tokens + record.max_tokens // 2
            step = curve.step_seconds([context] * _SEQUENCES) / _SEQUENCES
            done[phase] += curve.prompt_seconds(record.prompt_tokens)
            done[phase] += (record.steps or 0) * step
    return done
