"""Runs the checks in order, and says what they found."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from longleaf.probes.preflight import machine, model
from longleaf.probes.preflight.expected import Expected
from longleaf.probes.preflight.facts import Facts
from longleaf.probes.preflight.trials import Trials
from longleaf.probes.preflight.verdict import CheckError, NotAskedError, Verdict

Check = Callable[[Facts, Expected], str]


def all_checks(trials: Trials) -> Mapping[str, Check]:
    """Every check by name, in order: what is cheap, and what others rest on, first."""
    return {
        "gpu-count": machine.check_count,
        "gpu-product": machine.check_product,
        "compute-capability": machine.check_capability,
        "driver": machine.check_driver,
        "shared-memory": machine.check_shared_memory,
        "target": model.check_target,
        "drafter": model.check_drafter,
        "gpu-memory": model.check_memory,
        "kernel": trials.check_kernel,
        "nccl": trials.check_nccl,
    }


def run_checks(
    facts: Facts, expected: Expected, trials: Trials, skip: Collection[str] = ()
) -> Iterator[Verdict]:
    """One verdict a check, as soon as it is known."""
    for name, check in all_checks(trials).items():
        if name in skip:
            yield Verdict(name, None, "left out by --skip")
            continue
        try:
            yield Verdict(name, True, check(facts, expected))
        except NotAskedError as reason:
            yield Verdict(name, None, str(reason))
        except CheckError as failure:
            yield Verdict(name, False, failure.sentence, failure.fix)
        except Exception as error:
            said = f"this check could not be made: {type(error).__name__}: {error}"
            yield Verdict(name, False, said, f"mend what it reads, or leave it out: --skip={name}")


def line(verdict: Verdict) -> str:
    """One line for people."""
    if verdict.passed is False:
        return f"FAIL {verdict.name}: {verdict.said}; fix: {verdict.fix}"
    return f"{'ok  ' if verdict.passed else 'skip'} {verdict.name}: {verdict.said}"


def document(facts: Facts, verdicts: Sequence[Verdict]) -> str:
    """One JSON object for machines."""
    found: dict[str, Any] = {
        "passed": all(verdict.passed is not False for verdict in verdicts),
        "checks": [
            {
                "name": verdict.name,
                "result": {True: "passed", False: "failed", None: "skipped"}[verdict.passed],
                "said": verdict.said,
                "fix": verdict.fix,
            }
            for verdict in verdicts
        ],
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "capability": None if gpu.capability is None else list(gpu.capability),
                "memory_total": gpu.memory_total,
                "memory_free": gpu.memory_free,
                "driver": gpu.driver,
            }
            for gpu in facts.gpus
        ],
        "shared_memory": facts.shared_memory,
    }
    return json.dumps(found)
