"""Panels and dashboards as data, and the builders that turn them into Grafana's model.

Queries name two variables of the dashboard: ``$namespace`` (every dashboard) and ``$context``
(those that repeat panels by context bucket); the data source is a variable too.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from string import ascii_uppercase

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from longleaf.metrics import CONTEXT_BUCKETS

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH = 24


class Kind(StrEnum):
    """How a panel draws."""

    LINES = "lines"
    STACK = "stack"
    HEATMAP = "heatmap"
    STAT = "stat"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and what its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. ``unit``: Grafana's name. ``description``: what it shows and how to read it."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 8
    height: int = 8
    by_context: bool = False
    """Repeated for each context bucket that is chosen."""
    bottom: float | None = 0
    top: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All of them, in reading order."""
        return tuple(panel for row in self.rows for panel in row.panels)


def to_json(board: Board) -> str:
    """Grafana's JSON of ``board``."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["longleaf"])
        .readonly()
        .refresh("15s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(_namespaces())
        .link(
            dashboard.DashboardLink("Longleaf")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["longleaf"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
    )
    if any(panel.by_context for panel in board.panels):
        built = built.with_variable(_contexts())
    ids = itertools.count(1)
    for row in board.rows:
        built = built.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            built = built.with_panel(_panel(panel).id(next(ids)))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def _namespaces() -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable("namespace")
        .label("Namespace")
        .datasource(_SOURCE)
        .query("label_values(up, namespace)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all"))
    )


def _contexts() -> dashboard.CustomVariable:
    return (
        dashboard.CustomVariable("context")
        .label("Context")
        .values(",".join(CONTEXT_BUCKETS))
        .multi(True)
        .include_all(True)
        .current(models.VariableOption(text="All", value="$__all"))
    )


_Builder = timeseries.Panel | heatmap.Panel | stat.Panel | table.Panel


def _panel(panel: Panel) -> _Builder:
    built = _drawn(panel)
    built = built.title(panel.title).description(panel.description).unit(panel.unit)
    built = built.datasource(_SOURCE).height(panel.height).span(panel.width)
    if panel.by_context:
        built = built.repeat("context").repeat_direction("h").max_per_row(_WIDTH // panel.width)
    for name, query in zip(ascii_uppercase, panel.queries, strict=False):
        built = built.with_target(_target(query, panel.kind).ref_id(name))
    return built


def _drawn(panel: Panel) -> _Builder:
    match panel.kind:
        case Kind.HEATMAP:
            color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Viridis")
            axis = heatmap.YAxisConfig().unit(panel.unit)
            return heatmap.Panel().color(color.steps(64)).y_axis(axis)
        case Kind.STAT:
            return stat.Panel()
        case Kind.TABLE:
            return table.Panel()
        case _:
            return _lines(panel)


def _lines(panel: Panel) -> timeseries.Panel:
    lines = timeseries.Panel().show_points(common_models.VisibilityMode.NEVER)
    if panel.bottom is not None:
        lines = lines.min(panel.bottom)
    if panel.top is not None:
        lines = lines.max(panel.top)
    if panel.kind is Kind.STACK:
        stacked = common.StackingConfig().mode(common_models.StackingMode.NORMAL)
        lines = lines.stacking(stacked).fill_opacity(40)
    return lines.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))


def _target(query: Query, kind: Kind) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend)
    match kind:
        case Kind.HEATMAP:
            return target.format(PromQueryFormat.HEATMAP).range()
        case Kind.STAT:
            return target.instant()
        case Kind.TABLE:
            return target.format(PromQueryFormat.TABLE).instant()
        case _:
            return target.range()


def quantiles(family: str, by: Sequence[str], *shares: float) -> tuple[Query, ...]:
    """Quantiles of a histogram family, a series for each value of the labels ``by``."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    labels = ", ".join(("le", *by))
    return tuple(
        Query(
            f"histogram_quantile({share}, sum by ({labels}) "
            f'(rate({family}_bucket{{namespace=~"$namespace"}}[$__rate_interval])))',
            f"p{share * 100:g} {legend}".strip(),
        )
        for share in shares
    )


def rate(family: str, *by: str, legend: str | None = None, where: str = "") -> Query:
    """Rate of a counter, summed by labels."""
    matchers = 'namespace=~"$namespace"' + (f", {where}" if where else "")
    summed = f"sum by ({', '.join(by)})" if by else "sum"
    text = " ".join(f"{{{{{label}}}}}" for label in by) if legend is None else legend
    return Query(f"{summed} (rate({family}{{{matchers}}}[$__rate_interval]))", text)


def series(name: str, legend: str, where: str = "") -> Query:
    """A recorded series or gauge as it is."""
    matchers = 'namespace=~"$namespace"' + (f", {where}" if where else "")
    return Query(f"{name}{{{matchers}}}", legend)
