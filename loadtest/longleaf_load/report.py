"""The report of a run, and of two beside each other: one HTML page each, plots and tables."""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longleaf.metrics import CONTEXT_BUCKETS
from longleaf_load.plots import Point, plot, stacked
from longleaf_load.simulation import LABEL

_STYLE = (
    "body{font:15px sans-serif;max-width:1320px;margin:2em auto;padding:0 1em;color:#222}"
    "figure{display:inline-block;width:620px;margin:0 1em 1em 0;vertical-align:top}"
    "h3{margin:.2em 0}figure p{margin:.2em 0;font-size:13px}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;text-align:right;"
    "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
    ".note{background:#fff3cd;padding:.6em 1em}"
)
_FEW = 3
_ABOUT = ("date", "commit", "machine", "url", "model", "plan", "seed", "workers", "command")


def page(report: Mapping[str, Any]) -> str:
    """The page of one run."""
    points = report["points"]
    parts = [
        f"<h1>Load test: {_text(report.get('plan', ''))}</h1>",
        _simulated(report),
        *_cautions(report),
        f"<p>{_text(headline(report))}</p>",
        _table([("run", "")] + [(name, str(report[name])) for name in _ABOUT if report.get(name)]),
        *_contexts(lambda column: _clouds(points, column)),
        plot(
            f"Goodput ({report['slo']['words']})",
            "requests offered a second",
            "a second",
            {"goodput": _goodput(report)},
            lines=True,
            diagonal=_one_request_each(report),
        ),
        stacked(
            "Refusals by phase",
            "requests",
            [(one["name"], one["refusals"]) for one in report["phases"]],
        ),
        "<h2>By context</h2>",
        _table(_rows(report["contexts"])),
        "<h2>By text</h2>",
        _table(_rows(report["texts"])),
        "<h2>By phase</h2>",
        _table(_phase_rows(report["phases"])),
        "<h2>Refusals</h2>",
        _table(_refusal_rows(report)),
    ]
    return _page(f"Load test {report.get('plan', '')}", parts)


def headline(report: Mapping[str, Any]) -> str:
    """The run in a sentence or two."""
    slo, outcomes = report["slo"], report["outcomes"]
    counts = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    verdict = "met" if slo["passed"] else "MISSED"
    stopped = report.get("stopped_after_seconds")
    early = "" if stopped is None else f"STOPPED before its end, after {stopped:.0f} s. "
    labels = _labels(report)
    label = f"SIMULATED ({', '.join(labels)}). " if labels else ""
    return (
        f"{label}{early}{report['requests']} requests: {counts}. "
        f"{slo['met']:.1%} met the objective ({slo['words']}); {slo['share']:.0%} were to: "
        f"{verdict}."
    )


def reasons_line(report: Mapping[str, Any]) -> str:
    """The commonest reasons of what was not served, as the report has them in order; empty where
    all was.
    """
    parts = []
    for outcome, name in (("refused", "refusals"), ("failed", "failures")):
        told = list(report[name].items())
        few = ", ".join(f"{count} {reason}" for reason, count in told[:_FEW])
        more = sum(count for _, count in told[_FEW:])
        if few:
            parts.append(f"{outcome}: {few}" + (f", {more} others" if more else ""))
    return "; ".join(parts)


def simulated_note(report: Mapping[str, Any]) -> str:
    """A text for those who see the run's files without its report; empty for a real engine."""
    labels = _labels(report)
    if not labels:
        return ""
    return (
        f"The engine was simulated ({', '.join(labels)}): no time in this folder, locust_*.csv "
        "included, was measured of a real one.\n"
    )


def compare_lines(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What is to be known of two runs before their figures are read."""
    return [
        line
        for name, run in (("A", first), ("B", second))
        for line in (
            f"{name}: {headline(run)}",
            *(f"   CAUTION: {caution}" for caution in run.get("cautions", ())),
        )
    ]


def compare_rows(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Medians of two runs by context, and the second's relative to the first's; "-" for what one of
    them has not.
    """
    table: list[tuple[str, ...]] = [("context", "figure", "A", "B", "B / A")]
    runs = (first["contexts"], second["contexts"])
    for bucket in sorted({*runs[0], *runs[1]}, key=CONTEXT_BUCKETS.index):
        groups = [run.get(bucket) for run in runs]
        table.append(_compared(bucket, "requests", *(_of(one, "requests") for one in groups)))
        table += [
            _compared(bucket, f"{name} p50", *(_of(_of(one, name), "p50") for one in groups))
            for name in ("ttft_ms", "tpot_ms", "gap_p99_ms", "queue_ms")
        ]
        table.append(_compared(bucket, "commit_len", *(_of(one, "commit_len") for one in groups)))
    table = [row for row in table if row[2:4] != ("-", "-")]
    table.append(_compared("all", "requests", first["requests"], second["requests"]))
    met = _compared("all", "objective met", first["slo"]["met"], second["slo"]["met"])
    if first["slo"]["words"] != second["slo"]["words"]:
        met = (*met[:4], "-")  # shares of different things
    table.append(met)
    return table


def compare_page(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Two runs beside each other."""
    runs = {"A": first, "B": second}

    def clouds(column: int) -> dict[str, list[Point]]:
        return {
            name: [(p[0], p[column]) for p in run["points"] if p[column] is not None]
            for name, run in runs.items()
        }

    parts = [
        "<h1>Two load tests</h1>",
        *(
            part
            for name, run in runs.items()
            for part in (
                f"<p><b>{name}</b>: {_text(headline(run))}</p>",
                _simulated(run),
                *_cautions(run),
            )
        ),
        _table(compare_rows(first, second)),
        *_contexts(clouds),
        plot(
            "Goodput",
            "requests offered a second",
            "a second",
            {name: _goodput(run) for name, run in runs.items()},
            lines=True,
            diagonal=all(map(_one_request_each, runs.values())),
        ),
    ]
    return _page("Two load tests", parts)


def _of(values: Mapping[str, Any] | None, name: str) -> Any:
    return None if values is None else values[name]


def _compared(bucket: str, name: str, one: float | None, other: float | None) -> tuple[str, ...]:
    ratio = f"{other / one:.3f}" if one and other is not None else "-"
    return bucket, name, _number(one), _number(other), ratio


def _goodput(report: Mapping[str, Any]) -> list[Point]:
    """Of the phases that the run came to."""
    phases = [one for one in report["phases"] if one["seconds"]]
    return sorted((one["offered_per_second"], one["goodput_per_second"]) for one in phases)


def _one_request_each(report: Mapping[str, Any]) -> bool:
    """Whether an arrival is one request, and goodput at most what is offered."""
    return not any(one.get("later_turns_per_second") for one in report["phases"])


def _contexts(clouds: Callable[[int], Mapping[str, Sequence[Point]]]) -> list[str]:
    """What a point has, against the context."""
    across = "tokens of the prompt"
    return [
        plot("Time to the first token", across, "ms", clouds(1), log_x=True, log_y=True),
        plot("Time per token", across, "ms", clouds(2), log_x=True),
        plot("commit_len", across, "tokens a step", clouds(3), log_x=True),
    ]


def _cautions(report: Mapping[str, Any]) -> list[str]:
    return [f"<p class=note>{_text(caution)}</p>" for caution in report.get("cautions", ())]


def _labels(report: Mapping[str, Any]) -> list[str]:
    return [one for one in report["simulated"] if one.startswith(LABEL)]


def _simulated(report: Mapping[str, Any]) -> str:
    labels = _labels(report)
    if not labels:
        return ""
    return (
        f"<p class=note>The engine was <b>simulated</b> ({_text(', '.join(labels))}): its times "
        "come from a recorded curve, and a speed of x4 means that four seconds of it pass in one. "
        "Times here are those of the clock.</p>"
    )


def _clouds(points: Sequence[Sequence[Any]], column: int) -> dict[str, list[Point]]:
    clouds: dict[str, list[Point]] = {}
    for point in points:
        if point[column] is not None:
            clouds.setdefault(point[4], []).append((point[0], point[column]))
    return dict(sorted(clouds.items()))


def _rows(groups: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    names = ("ttft_ms", "tpot_ms", "gap_p99_ms", "queue_ms")
    head = ["", "requests", "served", "refused", "failed"]
    head += [f"{name.removesuffix('_ms')} {point} ms" for name in names for point in ("p50", "p99")]
    table: list[tuple[str, ...]] = [(*head, "commit_len")]
    for label, group in groups.items():
        cells = [label, *(str(group[name]) for name in ("requests", "served", "refused", "failed"))]
        for name in names:
            spread = group[name] or {}
            cells += [_number(spread.get(point)) for point in ("p50", "p99")]
        table.append((*cells, _number(group["commit_len"])))
    return table


def _phase_rows(phases: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    numbers = ("seconds", "offered_per_second", "later_turns_per_second", "goodput_per_second")
    head = ("", "s", "offered/s", "later turns/s", "goodput/s", "served", "refused", "failed")
    rows = [
        (
            one["name"],
            *(_number(one[name]) for name in numbers),
            *(str(one[name]) for name in ("served", "refused", "failed")),
            *(_number((one[name] or {}).get("p50")) for name in ("ttft_ms", "tpot_ms")),
        )
        for one in phases
    ]
    return [(*head, "ttft p50 ms", "tpot p50 ms"), *rows]


def _refusal_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    told = report["retry_after"]
    rows: list[tuple[str, ...]] = [("reason", "requests")]
    rows += [(name, str(count)) for name, count in report["refusals"].items()]
    rows += [(f"failed: {name}", str(count)) for name, count in report["failures"].items()]
    rows += [
        ("saturated, without Retry-After", str(told["without"])),
        ("Retry-After checked", str(told["checked"])),
        (
            "its median error",
            "-" if told["median_error"] is None else f"{told['median_error']:.1%}",
        ),
    ]
    return rows


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if value % 1 else f"{value:.0f}"


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in body
    )
    return f"<table><tr>{''.join(f'<th>{_text(cell)}</th>' for cell in head)}</tr>{lines}</table>"


def _page(title: str, parts: Sequence[str]) -> str:
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(title)}</title>"
        f"<style>{_STYLE}</style>{''.join(parts)}</html>\n"
    )
