"""Recording rules and alerts, by Prometheus' own tool."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "ops" / "prometheus"
CASES = Path(__file__).parent / "prometheus"
ALERTS = re.findall(r"- alert: (\w+)", (RULES / "alerts.yml").read_text())

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (apt-get install prometheus)"
)


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_rules_are_valid() -> None:
    promtool("check", "rules", *map(str, sorted(RULES.glob("*.yml"))))


@needs_promtool
@pytest.mark.parametrize("cases", ["rules_test.yml", "alerts_test.yml"])
def test_rules_say_what_they_should(cases: str) -> None:
    promtool("test", "rules", str(CASES / cases))


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_is_tested_firing_and_not_and_has_a_page(alert: str) -> None:
    text = (CASES / "alerts_test.yml").read_text()
    found = re.findall(rf"alertname: {alert}\b,?(?:.*\n){{0,2}}?.*?exp_alerts:(.*)", text)
    assert any("[]" in case for case in found), "no case in which it must not fire"
    assert any(not case.strip() for case in found), "no case in which it must fire"
    page = (ROOT / "ops" / "runbooks" / f"{alert}.md").read_text()
    assert page.startswith(f"# {alert}\n")
    assert f"runbook: ops/runbooks/{alert}.md" in (RULES / "alerts.yml").read_text()


def test_every_page_is_of_an_alert() -> None:
    pages = {path.stem for path in (ROOT / "ops" / "runbooks").glob("*.md")}
    assert pages == set(ALERTS)
