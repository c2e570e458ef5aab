"""The step's figures cannot disagree with one another."""

import numpy as np
import pytest

from longleaf.ddtree import Accepted, AccountingError, StepOutcome, step_outcome


@pytest.mark.parametrize("drafts", [0, 1, 7])
def test_figures_of_a_step(drafts: int) -> None:
    path = np.array([0, *range(3, 3 + drafts)], np.int32)
    assert step_outcome(Accepted(path, 5, drafts)) == StepOutcome(drafts, drafts, drafts + 1)


def test_depth_three_beside_commit_len_one_cannot_be_reported() -> None:
    with pytest.raises(AccountingError, match="accepted_depth 3 must equal accepted_drafts 0"):
        step_outcome(Accepted(np.array([0], np.int32), 5, 3))
    with pytest.raises(AccountingError, match="accepted_depth 3 must equal accepted_drafts 0"):
        StepOutcome(accepted_drafts=0, accepted_depth=3, commit_len=1)


def test_commit_len_is_drafts_plus_the_bonus_token() -> None:
    with pytest.raises(AccountingError, match="commit_len 2 must be accepted_drafts 2 \\+ 1"):
        StepOutcome(accepted_drafts=2, accepted_depth=2, commit_len=2)


def test_a_path_without_its_root_is_refused() -> None:
    with pytest.raises(AccountingError, match="accepted_drafts must be at least 0, got -1"):
        step_outcome(Accepted(np.array([], np.int32), 5, 0))
