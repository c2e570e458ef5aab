"""Accepted rows of every layer move to the front."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tests.engine.emulated")  # SGLang's stubs come before SGLang

from longleaf.engine.compaction import TargetCompactor, target_pools  # noqa: E402
from longleaf_kernels import Accepted  # noqa: E402
from tests.engine.emulated import emulated_library, kernels  # noqa: E402, F401

SLOTS = torch.tensor([[5, 9, 2, 7], [1, 3, 8, 6]])
ACCEPTED = Accepted(
    path=torch.tensor([[0, 2, 3], [0, 1, -1]], dtype=torch.int32),
    path_len=torch.tensor([3, 2], dtype=torch.int32),
    bonus=torch.tensor([0, 0]),
)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["mla", "mha", "mha of two widths"])
def test_rows_move_in_every_layer(kind: str) -> None:
    def layers(*shape: int) -> list[Any]:
        return [torch.rand(12, *shape, dtype=torch.float32) for _ in range(5)]

    if kind == "mla":
        pool = SimpleNamespace(kv_buffer=layers(1, 8))
        every = pool.kv_buffer
    else:
        values = layers(2, 8) if kind == "mha" else layers(2, 4)
        pool = SimpleNamespace(k_buffer=layers(2, 8), v_buffer=values)
        every = [*pool.k_buffer, *pool.v_buffer]
    before = [layer.clone() for layer in every]
    compactor = TargetCompactor()
    compactor(pool, SLOTS, ACCEPTED)
    for layer, old in zip(every, before, strict=True):
        expected = old.clone()
        expected[9], expected[2] = old[2], old[7]
        assert torch.equal(layer, expected)


@pytest.mark.usefixtures("kernels")
def test_a_pool_that_was_made_anew_is_the_one_that_is_moved() -> None:
    compactor = TargetCompactor()
    pool = SimpleNamespace(kv_buffer=[torch.rand(12, 1, 8)])
    compactor(pool, SLOTS, ACCEPTED)
    pool.kv_buffer = [torch.rand(12, 1, 8)]
    before = pool.kv_buffer[0].clone()
    compactor(pool, SLOTS, ACCEPTED)
    assert torch.equal(pool.kv_buffer[0][9], before[2])


def test_pools_of_one_shape_go_in_one_launch() -> None:
    mla = SimpleNamespace(kv_buffer=[torch.zeros(4, 1, 8)] * 61)
    assert [len(part) for part in target_pools(mla)] == [61]
    with pytest.raises(TypeError, match="cannot move rows"):
        target_pools(SimpleNamespace())


def test_a_step_of_roots_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from longleaf.engine import compaction

    def refuse(*given: object) -> None:
        raise AssertionError

    monkeypatch.setattr(compaction, "CompactPlan", refuse)
    TargetCompactor()(SimpleNamespace(kv_buffer=[torch.zeros(12, 1, 8)]), SLOTS[:, :1], ACCEPTED)


@pytest.mark.usefixtures("kernels")
def test_pools_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from longleaf.engine import compaction

    plans: list[Any] = []
    make = vars(compaction)["CompactPlan"]

    def counted(pools: Any) -> Any:
        plans.append(pools)
        return make(pools)

    monkeypatch.setattr(compaction, "CompactPlan", counted)
    pool = SimpleNamespace(kv_buffer=[torch.rand(12, 1, 8) for _ in range(3)])
    compactor = TargetCompactor()
    for _ in range(3):
        compactor(pool, SLOTS, ACCEPTED)
    assert len(plans) == 1
