"""What is said while a run goes on."""

import io
from pathlib import Path

import pytest

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf_load.plan import parse_plan
from longleaf_load.progress import Progress
from longleaf_load.prompts import PromptSource
from longleaf_load.run import Run
from longleaf_load.slo import Slo
from tests.loadtest.serving import blank

PLAN = {
    "phase": [
        {"name": "calm", "seconds": 30, "rate": 1.0},
        {"name": "flood", "seconds": 10, "rate": 9.0},
    ],
    "prompts": {"length": 100},
}


class At(Run):
    """A run whose clock stands still."""

    now = 0.0

    def clock(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> At:
    return At(
        plan=parse_plan(PLAN, tmp_path),
        source=PromptSource(DEFAULT_MODELS / "tiny-target", 500, seed=1),
        slo=Slo(), url="http://127.0.0.1:1", model="tiny", key=None, workers=1, out=tmp_path,
        plan_name="p",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (0.0, "[                    ] 40 s left, phase calm: none answered"),
        (10.0, "[#####               ] 30 s left, phase calm: none answered"),
        (32.0, "[################    ] 8 s left, phase flood: none answered"),
        (45.0, "[####################] 0 s left, phase last answers: none answered"),
    ],
)
def test_the_time_left(run: At, now: float, said: str) -> None:
    run.now = now
    out = io.StringIO()
    Progress(run.plan, out).tell(run)
    assert out.getvalue() == said + "\n"


def test_outcomes_are_counted(run: At) -> None:
    for outcome in ("ok", "refused", "ok"):
        run.add(blank(outcome=outcome))
    assert Progress(run.plan, io.StringIO()).line(run).endswith("phase calm: 2 ok, 1 refused")
