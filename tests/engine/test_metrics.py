"""Steps and results find each other; the families say what the results said."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from longleaf.engine.metrics import (  # noqa: E402
    EngineObserver,
    PhaseClock,
    StepLedger,
    StepRecord,
)


def test_results_settle_the_oldest_step_of_their_size() -> None:
    ledger = StepLedger()
    ledger.launched(StepRecord(8, (1, 2)))
    ledger.launched(StepRecord(16, (3,)))
    ledger.launched(StepRecord(64, (4,)))
    first = ledger.settle(1)
    assert first is not None
    assert first.nodes == 16
    second = ledger.settle(1)
    assert second is not None
    assert second.nodes == 64
    assert ledger.settle(1) is None


class Event:
    """A CUDA event on a clock that advances a millisecond a record."""

    now = 0.0
    done = True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        Event.now += 1.0
        self.at = Event.now

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def test_one_step_in_so_many_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, Event=Event)
    monkeypatch.setattr(torch, "cuda", cuda)
    clock = PhaseClock(2)
    records = [StepRecord(8, (5,)) for _ in range(3)]
    for record in records:
        clock.start(record)
        for phase in ("draft", "build", "verify"):
            with clock.phase(phase):
                pass
    assert records[1].seconds() is None
    expected = {"draft": 0.001, "build": 0.001, "verify": 0.001, "total": 0.003}
    assert records[0].seconds() == pytest.approx(expected)
    Event.done = False
    assert records[2].seconds() is None
    Event.done = True


def samples(observer: EngineObserver) -> dict[str, float]:
    families: Any = observer._families
    found = {}
    for name in ("commit_len", "accepted_depth", "tree_nodes", "kv_read_bytes", "kv_pool_tokens"):
        for metric in getattr(families, name).collect():
            for sample in metric.samples:
                label = sample.labels.get("context_bucket") or sample.labels.get("state") or ""
                if sample.name.endswith(("_sum", "_total", "_tokens")):
                    found[f"{sample.name} {label}".strip()] = sample.value
    return found


def test_families_say_what_was_accepted() -> None:
    observer = EngineObserver(row_bytes=1152, layers=61, window=2048)
    record = StepRecord(9, (1000, 60_000))
    observer.observe(record, [3, 0], free_tokens=77)
    found = samples(observer)
    assert found["longleaf_commit_len_sum 1k"] == 4
    assert found["longleaf_commit_len_sum 64k"] == 1
    assert found["longleaf_accepted_depth_sum 1k"] == 3
    assert found["longleaf_tree_nodes_sum 64k"] == 9
    assert found["longleaf_kv_read_bytes_total"] == 61_000 * 61 * 1152
    assert found["longleaf_kv_pool_tokens free"] == 77


def test_the_depth_is_the_paths_own() -> None:
    """Beside a commit_len that counts wrong, it says so."""
    observer = EngineObserver(row_bytes=1152, layers=61, window=2048)
    record = StepRecord(9, (1000, 60_000), path=torch.tensor([[0, 2, 5, -1], [0, -1, -1, -1]]))
    observer.observe(record, [0, 0])
    found = samples(observer)
    assert found["longleaf_accepted_depth_sum 1k"] == 2
    assert found["longleaf_accepted_depth_sum 64k"] == 0
    assert found["longleaf_commit_len_sum 1k"] == 1


def test_what_rules_divide_counts_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and context of untimed steps would make the timed ones look faster, or longer."""
    observer = EngineObserver(row_bytes=1152, layers=61, window=2048)
    times: dict[str, float] | None = None
    monkeypatch.setattr(StepRecord, "seconds", lambda self: times)
    observer.observe(StepRecord(9, (500, 1000)), [3, 0])
    families: Any = observer._families
    assert families.timed_verify_bytes._value.get() == 0
    times = {"draft": 0.001, "verify": 0.004, "total": 0.006}
    observer.observe(StepRecord(9, (500, 1000)), [3, 0])
    assert families.timed_verify_bytes._value.get() == 1500 * 61 * 1152
    assert families.timed_verify_seconds._value.get() == 0.004
    assert families.timed_context_tokens.labels("1k")._value.get() == 1000
    assert families.plain_step_seconds.labels("1k")._sum.get() == 0
    observer.observe(StepRecord(1, (500, 1000)), [0, 0])
    assert families.plain_step_seconds.labels("1k")._sum.get() == 0.006
    assert families.drafter_window_tokens._value.get() == 2048


def test_a_step_after_a_requests_last_is_nobodys() -> None:
    class Request:
        def __init__(self, *, ended: bool = False, is_retracted: bool = False) -> None:
            self.finished = lambda: ended
            self.is_retracted = is_retracted

    observer = EngineObserver(row_bytes=1152, layers=61, window=None)
    requests = (Request(ended=True), Request(), Request(is_retracted=True))
    record = StepRecord(9, (1000, 1001, 60_000), requests)
    assert record.committing() == [1]
    observer.observe(record, [3, 2, 5])
    found = samples(observer)
    assert found["longleaf_commit_len_sum 1k"] == 3
    assert found["longleaf_tree_nodes_sum 1k"] == 9
    assert "longleaf_commit_len_sum 64k" not in found
    assert found["longleaf_kv_read_bytes_total"] == 62_001 * 61 * 1152


def test_an_accepted_path_is_read_without_its_padding() -> None:
    record = StepRecord(8, (1, 2), path=torch.tensor([[0, 3, -1], [0, -1, -1]]))
    assert record.paths() == [[0, 3], [0]]
    assert StepRecord(8, (1,)).paths() is None
