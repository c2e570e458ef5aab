"""The one definition of what a step achieved; every metric and usage figure comes from it."""

from dataclasses import dataclass

from longleaf.ddtree.accept import Accepted


class AccountingError(ValueError):
    """An accepted path disagrees with the depth that the tree records for its end."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step of one request.

    accepted_drafts: drafted tokens on the accepted path.
    accepted_depth: depth of the last accepted node (root = 0), from the tree's own record.
    commit_len: tokens committed = accepted_drafts + 1, the bonus token.

    No other combination can be constructed: AccountingError.
    """

    accepted_drafts: int
    accepted_depth: int
    commit_len: int

    def __post_init__(self) -> None:
        if self.accepted_drafts < 0:
            raise AccountingError(f"accepted_drafts must be at least 0, got {self.accepted_drafts}")
        if self.accepted_depth != self.accepted_drafts:
            raise AccountingError(
                f"accepted_depth {self.accepted_depth} must equal "
                f"accepted_drafts {self.accepted_drafts}"
            )
        if self.commit_len != self.accepted_drafts + 1:
            raise AccountingError(
                f"commit_len {self.commit_len} must be accepted_drafts {self.accepted_drafts} + 1"
            )


def step_outcome(accepted: Accepted) -> StepOutcome:
    """Return the step's figures: drafts counted on the path, depth read from the tree."""
    drafts = len(accepted.path) - 1
    return StepOutcome(accepted_drafts=drafts, accepted_depth=accepted.depth, commit_len=drafts + 1)
