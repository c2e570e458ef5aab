from collections.abc import Callable, Sequence

import numpy as np
import pytest

from longleaf.ddtree.budget import BudgetController, StepCosts

WIDTHS = (1, 8, 16, 32, 64)
Draw = Callable[[], list[int]]


def run(
    controller: BudgetController, draw: Draw, steps: int, context: int = 1024, batch: int = 1
) -> list[int]:
    """Let the controller choose and learn; draw gives a path in the widest tree."""
    widths = []
    for _ in range(steps):
        width = controller.choose(context, batch)
        paths = [[node for node in draw() if node < width] for _ in range(batch)]
        controller.observe(width, [len(path) for path in paths], paths)
        widths.append(width)
    return widths


def most_common(widths: Sequence[int]) -> int:
    return max(set(widths), key=list(widths).count)


def test_costs_are_the_slower_of_memory_and_tensor_pipe() -> None:
    costs = StepCosts()
    # 61 layers x 65,536 x 1,152 B / 2.1 TB/s = 2.193 ms; 8 nodes' FLOP take 1.796 ms, 64 14.37 ms.
    assert costs.milliseconds(8, 65536) == pytest.approx(4.5 + 0.16 + 2.1930, abs=1e-3)
    assert costs.milliseconds(64, 65536) == pytest.approx(4.5 + 1.28 + 14.3674, abs=1e-3)
    # One node is not drafted for.
    assert costs.milliseconds(1, 0) == pytest.approx(3.92)
    assert costs.milliseconds(8, 65536, 2) == pytest.approx(4.5 + 0.32 + 2 * 2.1930, abs=1e-3)


def test_measured_times_replace_the_model() -> None:
    costs = StepCosts(measured={(8, 1000): 5.0, (8, 3000): 9.0})
    model = StepCosts()
    assert costs.milliseconds(8, 2000) == pytest.approx(7.0)
    slope = model.milliseconds(8, 5000) - model.milliseconds(8, 3000)
    assert costs.milliseconds(8, 5000) == pytest.approx(9.0 + slope)
    assert costs.milliseconds(8, 500) < 5.0
    assert costs.milliseconds(16, 2000) == model.milliseconds(16, 2000)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fixed_ms": 0.0}, "fixed_ms"),
        ({"bytes_per_ms": -1.0}, "bytes_per_ms"),
        ({"node_ms": -0.1}, "node_ms"),
        ({"measured": {(8, 10): 0.0}}, r"measured\[8, 10\]"),
    ],
)
def test_costs_that_are_none_are_refused(change: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        StepCosts(**change)  # type: ignore[arg-type]


def test_the_first_steps_take_every_width_widest_first() -> None:
    controller = BudgetController(WIDTHS, StepCosts())
    assert run(controller, lambda: [1, 2], 5) == [64, 32, 16, 8, 1]


def test_full_chains_need_no_wider_tree() -> None:
    controller = BudgetController(WIDTHS, StepCosts())
    widths = run(controller, lambda: list(range(1, 8)), 400)
    assert widths[5:].count(8) >= 393
    assert controller.expected_commit(8) == pytest.approx(8.0, abs=0.1)
    # Known without a wider step: such a path cannot get longer.
    assert controller.expected_commit(64) == pytest.approx(8.0, abs=0.3)


def test_nothing_accepted_means_no_speculation_and_it_comes_back() -> None:
    controller = BudgetController(WIDTHS, StepCosts())
    widths = run(controller, list, 600, context=65536)
    assert most_common(widths) == 1
    costs = StepCosts()
    spent = sum(costs.milliseconds(width, 65536) for width in widths[50:])
    assert spent <= 1.06 * 550 * costs.milliseconds(1, 65536)
    back = run(controller, lambda: list(range(1, 8)), 400, context=65536)
    assert 8 in back[:300]
    assert most_common(back[-50:]) == 8


def test_a_wide_tree_is_taken_where_its_nodes_are_accepted_and_cheap() -> None:
    rng = np.random.default_rng(1)

    def path() -> list[int]:
        return [10, 20, 25, 30] if rng.random() < 0.8 else [1]

    cheap = run(BudgetController(WIDTHS, StepCosts()), path, 300)
    assert most_common(cheap[20:]) == 32
    dear = StepCosts(node_ms=2.0)
    assert most_common(run(BudgetController(WIDTHS, dear), path, 300)[20:]) in (1, 8)


def test_one_wide_step_tells_what_every_narrower_one_would_have_committed() -> None:
    controller = BudgetController(WIDTHS, StepCosts())
    for _ in range(3000):
        controller.observe(64, [4], [[1, 3, 12, 40]])
    expected = [controller.expected_commit(width) for width in WIDTHS]
    assert expected == pytest.approx([1.0, 3.0, 4.0, 4.0, 5.0], abs=0.01)


def test_a_narrow_step_says_nothing_about_wider_ones() -> None:
    controller = BudgetController(WIDTHS, StepCosts())
    before = controller.expected_commit(16) - controller.expected_commit(8)
    for _ in range(200):
        controller.observe(8, [2], [[1, 2]])
    assert controller.expected_commit(8) == pytest.approx(3.0, abs=0.05)
    after = controller.expected_commit(16) - controller.expected_commit(8)
    assert after == pytest.approx(before)


def test_full_paths_do_not_hide_what_the_others_gain() -> None:
    """Half of the narrow steps are full; the other half would gain two tokens at 16 nodes."""
    controller = BudgetController((8, 16), StepCosts(), depth=7)
    full, short = list(range(1, 8)), [1, 10, 12]
    for _ in range(20):
        controller.observe(16, [7], [full])
        controller.observe(16, [3], [short])
    for _ in range(300):
        controller.observe(8, [7], [full])
        controller.observe(8, [1], [[1]])
    gain = controller.expected_commit(16) - controller.expected_commit(8)
    assert gain == pytest.approx(1.0, abs=0.1)


def test_accepted_counts_alone_serve_too() -> None:
    controller = BudgetController(WIDTHS, StepCosts())
    for _ in range(300):
        width = controller.choose(1024, 1)
        controller.observe(width, [min(width - 1, 7)])
    assert controller.choose(1024, 1) == 8


def test_controllers_that_are_told_the_same_choose_the_same() -> None:
    rng = np.random.default_rng(3)
    first, second = (BudgetController(WIDTHS, StepCosts()) for _ in range(2))
    for _ in range(500):
        context = int(rng.integers(1, 100_000))
        width = first.choose(context, 2)
        assert second.choose(context, 2) == width
        drafts = [int(rng.integers(0, min(width, 8))) for _ in range(2)]
        paths = [list(range(1, 1 + count)) for count in drafts]
        first.observe(width, drafts, paths)
        second.observe(width, drafts, paths)


@pytest.mark.parametrize("widths", [(), (8, 1), (1, 1), (0, 8)])
def test_widths_that_are_none_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="widths must be ascending"):
        BudgetController(widths, StepCosts())


def test_paths_that_disagree_with_the_counts_are_refused() -> None:
    controller = BudgetController(WIDTHS, StepCosts())
    with pytest.raises(ValueError, match="1 requests have 2 paths"):
        controller.observe(8, [1], [[1], [2]])
    with pytest.raises(ValueError, match="path of 1 drafts is said to have 2"):
        controller.observe(8, [2], [[0, 1]])


def test_an_answer_that_ended_inside_its_path_tells_nothing() -> None:
    controller = BudgetController(WIDTHS, StepCosts())
    before = [controller.expected_commit(width) for width in WIDTHS]
    controller.observe(64, [1], [[0, 1, 2]])
    assert [controller.expected_commit(width) for width in WIDTHS] == before
