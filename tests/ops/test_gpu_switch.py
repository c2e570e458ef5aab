"""A server's node count, set from outside."""

from pathlib import Path

from ops.gpu.switch import Switch, SwitchedBudget

WIDTHS = (1, 8, 16)
CHEAP_WIDE = [(1, 1000, 5.0), (8, 1000, 5.0), (16, 1000, 5.0)]


def test_orders_are_followed_from_the_next_step_on(tmp_path: Path) -> None:
    switch = Switch(tmp_path / "a" / "order.json")
    budget = SwitchedBudget(switch.path, WIDTHS, 7, 61)
    assert budget.choose(1000, 1) == 16
    for nodes in (8, 1, 16):
        switch.fix(nodes)
        assert [budget.choose(1000, 1) for _ in range(3)] == [nodes] * 3


def test_what_fixed_steps_accept_teaches_the_adaptive_budget_nothing(tmp_path: Path) -> None:
    switch = Switch(tmp_path / "order.json")
    budget, other = (SwitchedBudget(switch.path, WIDTHS, 7, 61) for _ in range(2))

    def adapt(taught: SwitchedBudget) -> list[int]:
        chosen = []
        for _ in range(60):
            width = taught.choose(1000, 1)
            taught.observe(width, [min(width - 1, 7)], [list(range(min(width - 1, 7) + 1))])
            chosen.append(width)
        return chosen

    switch.adapt(CHEAP_WIDE)
    first = adapt(budget)
    assert first == adapt(other)
    assert set(first[-20:]) <= {8, 16}
    switch.fix(8)
    for _ in range(40):
        assert budget.choose(1000, 1) == 8
        budget.observe(8, [0], [[0]])
    switch.adapt(CHEAP_WIDE)
    assert adapt(budget) == adapt(other)
    # Other costs begin anew: a step that speculates now costs twenty times one that does not.
    switch.adapt([(1, 1000, 1.0), (8, 1000, 20.0), (16, 1000, 20.0)])
    assert adapt(budget)[-1] == 1
