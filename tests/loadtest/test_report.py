import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from longleaf_load.__main__ import main
from longleaf_load.arrivals import Phase
from longleaf_load.lengths import PlanError
from longleaf_load.promises import promises
from longleaf_load.records import Record, read_records, write_records
from longleaf_load.report import compare_page, compare_rows, headline, page
from longleaf_load.slo import Slo, parse_slo
from longleaf_load.summary import summarize

PHASES = [Phase("1x", 10.0, 1.0, 1.0), Phase("2x", 10.0, 2.0, 2.0)]


def record(number: int = 0, **values: Any) -> Record:
    tokens = values.get("prompt_tokens", 1000)
    fields: dict[str, Any] = {
        "arrival": number,
        "phase": 0,
        "turn": 1,
        "attempt": 1,
        "text": "code",
        "prompt_tokens": tokens,
        "max_tokens": 10,
        "document": None,
        "sent": float(number),
        "late": 0.0,
        "outcome": "ok",
        "status": 200,
        "ttft": 0.5,
        "tpot": 0.02,
        "gap_p99": 0.05,
        "seconds": 1.0,
        "commit_len": 3.0,
        "counted_tokens": tokens,
        "completion_tokens": 10,
        "prefill_seconds": 0.4,
    }
    return Record(**{**fields, **values})


def refused(number: int, told: float | None, **values: Any) -> Record:
    fields = {"ttft": None, "tpot": None, "seconds": 0.0, "counted_tokens": None, **values}
    return record(number, outcome="refused", status=429, reason="rate_limit_exceeded",
                  retry_after=told, commit_len=None, **fields)  # fmt: skip


def test_a_promise_is_held_against_the_next_one_that_was_let_in() -> None:
    records = [
        refused(10, told=4.0),
        record(11, ttft=5.4),  # starts at 16: six seconds after the refusal
        refused(20, told=3.0, prompt_tokens=50_000),
        record(21, ttft=0.4),  # a short one: says nothing about long ones
        record(22, ttft=2.4, prompt_tokens=60_000),
        refused(30, told=9.0),  # nobody after it
    ]
    kept = promises(records)
    assert [one.told for one in kept] == [4.0, 3.0]
    assert [one.true for one in kept] == pytest.approx([6.0, 4.0])
    assert kept[0].error == pytest.approx(1 / 3)
    report = summarize(records, PHASES, Slo(), {})
    assert report["retry_after"]["checked"] == 2
    assert report["retry_after"]["median_error"] == pytest.approx((1 / 3 + 1 / 4) / 2)
    assert report["retry_after"]["without"] == 0


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), True),
        (Slo(ttft_ms=499), False),
        (Slo(ttft_ms=300, ttft_ms_per_1k=200), True),
        (Slo(tpot_ms=19), False),
        (Slo(gap_p99_ms=49), False),
        (Slo(ttft_ms=500, tpot_ms=20, gap_p99_ms=50), True),
    ],
)
def test_objectives(slo: Slo, met: bool) -> None:
    assert slo.met_by(record()) is met
    assert not slo.met_by(refused(1, 1.0))


def test_objectives_are_read() -> None:
    assert parse_slo(["ttft_ms=2000", "tpot_ms=50", "share=0.9"]) == Slo(
        ttft_ms=2000, tpot_ms=50, share=0.9
    )
    for wrong, message in (
        ("ttft=3", "is not one of ttft_ms"),
        ("ttft_ms=x", "ttft_ms must be a number"),
        ("share=2", "share must be above 0 and at most 1"),
        ("ttft_ms_per_1k=5", "is added to ttft_ms, which is missing"),
    ):
        with pytest.raises(PlanError, match=message):
            parse_slo([wrong])


def some() -> dict[str, Any]:
    records = [record(n, prompt_tokens=1000 + 2000 * (n % 2)) for n in range(8)]
    records += [record(8, phase=1, ttft=9.0), refused(9, 2.0, phase=1), refused(9, None, phase=1)]
    failed = record(11, phase=1, outcome="failed", reason="timeout", counted_tokens=999)
    records += [record(10, phase=1, outcome="cancelled"), failed]
    return summarize(records, PHASES, Slo(ttft_ms=1000, share=0.7), {"plan": "p", "date": "d"})


def test_a_summary_counts() -> None:
    report = some()
    assert report["outcomes"] == {"ok": 9, "refused": 2, "cancelled": 1, "failed": 1}
    assert report["slo"]["met"] == pytest.approx(8 / 12)
    assert not report["slo"]["passed"]
    assert report["refusals"] == {"rate_limit_exceeded": 2}
    assert report["failures"] == {"timeout": 1}
    assert report["retry_after"]["without"] == 1
    assert report["exact_prompts"] == {"told": 11, "wrong": 1}
    assert list(report["contexts"]) == ["1k", "4k"]
    assert report["contexts"]["4k"]["requests"] == 4
    assert report["contexts"]["1k"]["ttft_ms"]["p50"] == 500
    first, second = report["phases"]
    assert (first["offered_per_second"], first["goodput_per_second"]) == (0.8, 0.8)
    assert (second["offered_per_second"], second["goodput_per_second"]) == (0.5, 0.0)
    assert second["refusals"] == {"rate_limit_exceeded": 2}


@pytest.mark.parametrize("make", [lambda: page(some()), lambda: compare_page(some(), some())])
def test_the_page_stands_alone(make: Any) -> None:
    text = make()
    assert "http" not in text.replace("http://www.w3.org", "")
    assert "<script" not in text
    assert text.count("<svg") >= 4
    for svg in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")


def test_a_simulated_run_says_so() -> None:
    report = summarize([record(fingerprint="simulated:h200:x4")], PHASES, Slo(), {"plan": "p"})
    assert report["simulated"] == ["simulated:h200:x4"]
    assert "The engine was <b>simulated</b> (simulated:h200:x4)" in page(report)
    assert "simulated" not in page(some())


def test_records_are_kept_without_answers(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write_records(path, [record(3, answer="secret")])
    assert "secret" not in path.read_text()
    assert list(read_records(path)) == [record(3)]


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = some(), some()
    other["contexts"]["1k"]["ttft_ms"]["p50"] = 750.0
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report in zip(paths, (one, other), strict=True):
        path.write_text(json.dumps(report))
    assert main(["--compare", *map(str, paths), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if "ttft_ms" in line)
    assert line.split() == ["1k", "ttft_ms", "p50", "500", "750", "1.500"]
    assert f"A: {headline(one)}\n" in said
    assert (tmp_path / "compare.html").read_text().count("<svg") == 4


def test_compare_shows_what_one_run_alone_has() -> None:
    one, other = some(), some()
    one["contexts"]["64k"] = one["contexts"].pop("4k")
    one["contexts"]["64k"]["tpot_ms"] = None
    rows = {row[:2]: row[2:] for row in compare_rows(one, other)}
    assert rows["4k", "ttft_ms p50"] == ("-", "500", "-")
    assert rows["64k", "ttft_ms p50"] == ("500", "-", "-")
    assert rows["64k", "requests"] == ("4", "-", "-")
    assert ("64k", "tpot_ms p50") not in rows
    contexts = [context for context, _ in rows]
    assert list(dict.fromkeys(contexts)) == ["context", "1k", "4k", "64k", "all"]


def test_shares_of_different_objectives_have_no_ratio() -> None:
    one, other = some(), some()
    assert compare_rows(one, other)[-1] == ("all", "objective met", "0.6667", "0.6667", "1.000")
    other["slo"]["words"] = "served at all"
    assert compare_rows(one, other)[-1] == ("all", "objective met", "0.6667", "0.6667", "-")


def test_phases_of_equal_names_have_a_bar_each() -> None:
    phases = [replace(phase, name="60/s") for phase in PHASES]
    records = [refused(0, 1.0), refused(1, 1.0, phase=1), refused(2, 1.0, phase=1)]
    text = page(summarize(records, phases, Slo(), {"plan": "p"}))
    bars = text.split("Refusals by phase")[1].split("</figure>")[0]
    heights = [float(one.split('"')[1]) for one in bars.split("<rect")[1:]
               for one in [one.split("height=", 1)[1]]]  # fmt: skip
    assert bars.count(">60/s<") == 2
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.01)


def lacking(*path: str) -> str:
    report = some()
    part = report
    for name in path[:-1]:
        part = part[name]
    del part[path[-1]]
    return json.dumps(report)


@pytest.mark.parametrize(
    ("text", "message"),
    [(lacking(name), f"is no report: it has no '{name}'")
     for name in ("outcomes", "simulated", "requests", "contexts", "points", "slo", "phases")]
    + [(lacking("contexts", "1k", "gap_p99_ms"), "is no report: it has no 'gap_p99_ms'"),
       (lacking("slo", "words"), "is no report: it has no 'words'"),
       ("[" * 100_000, "is no report: it is nested too deep"),
       ("[]", "is no report"), ("nothing", "is no report"), ("{}", "is no report: it has no"),
       (json.dumps({**some(), "requests": "many"}), "is no report"),
       (json.dumps({**some(), "contexts": {"5k": {}}}), "is no report"),
       (json.dumps({**some(), "points": [[1]]}), "is no report"),
       (json.dumps({**some(), "outcomes": []}), "is no report")],
)  # fmt: skip
def test_what_is_no_report_is_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("a.json", json.dumps(some())), ("b.json", text)):
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"),
              "--out", str(tmp_path / "out")])  # fmt: skip
    assert ended.value.code == 2
    assert f"b.json {message}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "--url is missing"), (["--url", "http://x", "--workers", "0"], "--workers must be"),
     (["--compare", "a.json", "b.json"], "a.json cannot be read: No such file"),
     (["--url", "http://x", "--workers", "9999"], "--workers must be between 1 and 256"),
     (["--url", "http://127.0.0.1:1"], "does not list its models: "),
     (["--url", "nowhere"], "'nowhere' is no URL like http://host:8080"),
     (["--url", "http://x", "--plan", "no.toml"], "no.toml: No such file"),
     (["--url", "http://x", "--rate", "nan"], "--rate must be a number above 0"),
     (["--url", "http://x", "--slo", "ttft=1"], "'ttft=1' is not one of ttft_ms"),
     (["--url", "http://x", "--served-tokenizer", "/"], "no tokenizer.json in /"),
     (["--url", "http://x", "--record-curve", "a/b"], "must be a name, not a path"),
     (["--url", "http://x", "--record-curve", "a", "--answers", "many"], "--answers: 'many'")],
)  # fmt: skip
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
