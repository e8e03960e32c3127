"""The handful of shapes that the dashboard is made of, on top of grafana-foundation-sdk.

Owns how a panel looks: widths, units, legends, colours of states, and that every query is limited to the chosen
instances. It must not know what is worth showing (rows/). Developers' tool: nothing that serves imports this package,
and the SDK is in the extra `test`, not in the base install. Enter at `graph`, `stat` or `metric`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.builders import prometheus, timeseries
from grafana_foundation_sdk.builders import stat as stat_builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard

PROMETHEUS = dashboard.DataSourceRef(type_val="prometheus", uid="${prometheus}")
TEMPO = dashboard.DataSourceRef(type_val="tempo", uid="${tempo}")
GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"
STACK = common.StackingMode.NORMAL
RATE = "[$__rate_interval]"

Panels = list[Builder[dashboard.Panel]]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the legend of its series; `exemplar` asks for the dots that lead to traces."""

    expr: str
    legend: str
    exemplar: bool = False


def metric(name: str, **labels: str) -> str:
    """A selector of `name` for the chosen instances; `labels` are regular expressions."""
    matchers = ['instance=~"$instance"', *(f'{label}=~"{value}"' for label, value in labels.items())]
    return f"{name}{{{','.join(matchers)}}}"


def rate(name: str, by: str = "", **labels: str) -> str:
    """The summed rate of a counter, split by the labels in `by`."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric(name, **labels)}{RATE}))"


def mean(histogram: str) -> str:
    """The mean of a histogram's observations over the rate interval."""
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def quantile(point: float, histogram: str, by: str = "", **labels: str) -> str:
    """A percentile of a histogram over the rate interval, `point` in 0–1."""
    return f"histogram_quantile({point}, {rate(histogram + '_bucket', ', '.join(filter(None, ('le', by))), **labels)})"


def percentiles(histogram: str) -> list[Query]:
    """p50, p95 and p99 with exemplars: the usual three lines of a latency."""
    return [Query(quantile(point / 100, histogram), f"p{point}", exemplar=True) for point in (50, 95, 99)]


def graph(
    title: str,
    why: str,
    queries: Sequence[Query],
    *,
    unit: str = "short",
    width: int = 8,
    stack: common.StackingMode = common.StackingMode.NONE,
    top: float | None = None,
    lines: Sequence[str] = (),
) -> timeseries.Panel:
    """A time series. `why` is what to conclude from it; series with a legend in `lines` are drawn over the stack."""
    stacked = stack is not common.StackingMode.NONE
    panel = (
        timeseries.Panel()
        .title(title)
        .description(why)
        .datasource(PROMETHEUS)
        .unit(unit)
        .min(0)
        .span(width)
        .height(8)
        .fill_opacity(60 if stacked else 8)
        .line_width(1)
        .show_points(common.VisibilityMode.NEVER)
        .stacking(common_builders.StackingConfig().mode(stack))
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.NONE if stacked else common.SortOrder.DESCENDING)
        )
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if top is not None:
        panel = panel.max(top)
    for ref, query in zip("ABCDEFGH", queries, strict=False):
        panel = panel.with_target(_target(query).ref_id(ref))
    for legend in lines:
        panel = panel.override_by_name(legend, _dashed_line())
    return panel


def stat(
    title: str,
    why: str,
    expr: str,
    *,
    unit: str = "short",
    width: int = 3,
    warn: float | None = None,
    bad: float | None = None,
) -> stat_builders.Panel:
    """One figure, green until it reaches `warn` and red from `bad` on."""
    steps = [dashboard.Threshold(value=None, color=GREEN)]
    steps += [dashboard.Threshold(value=value, color=color) for value, color in ((warn, YELLOW), (bad, RED)) if value]
    return (
        stat_builders.Panel()
        .title(title)
        .description(why)
        .datasource(PROMETHEUS)
        .unit(unit)
        .span(width)
        .height(4)
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.BACKGROUND if warn or bad else common.BigValueColorMode.NONE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(dashboard_builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(_target(Query(expr, title)).ref_id("A"))
    )


def states(title: str, why: str, expr: str, width: int = 3) -> stat_builders.Panel:
    """How many of each `state`: names as text, coloured by how worrying the state is."""
    panel = stat(title, why, expr, width=width).text_mode(common.BigValueTextMode.VALUE_AND_NAME)
    panel = panel.graph_mode(common.BigValueGraphMode.NONE).color_mode(common.BigValueColorMode.BACKGROUND)
    # Instant: over a range, the last value of a state that was left would still be shown.
    panel = panel.targets([_target(Query(expr, "{{state}}")).instant().ref_id("A")])
    colours = {"starting": BLUE, "ready": GREEN, "degraded": RED, "draining": YELLOW, "stopped": "text"}
    for state, colour in colours.items():
        fixed = {"mode": "fixed", "fixedColor": colour}
        panel = panel.override_by_name(state, [dashboard.DynamicConfigValue(id_val="color", value=fixed)])
    return panel


def _target(query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).datasource(PROMETHEUS).range()
    return target.exemplar(True) if query.exemplar else target


def _dashed_line() -> list[dashboard.DynamicConfigValue]:
    """A limit over a stack: not part of the sum, not filled."""
    return [
        dashboard.DynamicConfigValue(id_val="custom.stacking", value={"mode": "none"}),
        dashboard.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
        dashboard.DynamicConfigValue(id_val="custom.lineWidth", value=2),
        dashboard.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [10, 6]}),
        dashboard.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": RED}),
    ]
