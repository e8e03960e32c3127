"""The exposition: the rows of telemetry/metrics over the fold's state, as Prometheus text or OpenMetrics.

Owns how a row becomes samples, and what happens when a row misbehaves: it is skipped and counted, and the rest is
served. It must not know any particular metric. Enter at `Exposition.render`.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import exposition as text
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from telemetry import plugins
from telemetry.fold import Fold
from telemetry.metric import OPEN_VALUES, Metric, Outside, Reading, View
from telemetry.stats import Histogram

log = logging.getLogger(__name__)

_Cells = list[tuple[float, int, Exemplar | None]]
# A series ready to be written: label values, number or cumulative buckets, and a histogram's sum.
_Series = tuple[list[str], float | _Cells, float]


def rows(legacy: bool = False) -> list[Metric]:
    """Every row of telemetry/metrics; older names only if asked for. Raises ValueError for a name used twice."""
    found = [row for module in plugins.load("telemetry.metrics") for row in module.ROWS]
    names = [row.name for row in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"metric declared twice: {', '.join(sorted(twice))}")
    return [row for row in found if legacy or not row.legacy]


class Exposition(Collector):
    """Renders `metrics` over `fold`. `outside` is asked at each scrape; `build` holds version and python.

    `engine` and the fold's model are the values of the two labels that every series has.
    """

    def __init__(
        self,
        fold: Fold,
        metrics: Sequence[Metric] | None = None,
        outside: Callable[[], Outside] = Outside,
        build: Mapping[str, str] | None = None,
        engine: str = "0",
    ) -> None:
        self._fold = fold
        self._metrics = tuple(rows() if metrics is None else metrics)
        self._outside = outside
        self._build = dict(build or {})
        self._engine = engine
        self.row_errors = 0
        self.last_render_ns = 0

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The body and its content type: OpenMetrics with exemplars if `accept` asks for it, else Prometheus text."""
        begin = time.perf_counter_ns()
        # Our names are legal in every scheme. 'allow-utf-8' leaves them alone, where 'underscores' would turn the colon
        # of a sample's name (but not of its family's) into an underscore.
        if _wants_openmetrics(accept):
            body: bytes = openmetrics.generate_latest(self, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            content_type = openmetrics.CONTENT_TYPE_LATEST
        else:
            body, content_type = text.generate_latest(self), text.CONTENT_TYPE_PLAIN_0_0_4
        self.last_render_ns = time.perf_counter_ns() - begin
        return body, content_type

    def collect(self) -> Iterator[Family]:
        """Every family; also the ones without series yet."""
        outside = self._ask()
        with self._fold.reading() as state:  # only copy while folding waits; write afterwards
            view = View(state, self._fold.clock(), outside, self._build)
            model = state.model
            read = [(row, self._read(row, view)) for row in self._metrics]
        for row, series in read:
            yield self._family(row, series, model)
            time.sleep(0)  # a scrape is ten milliseconds of work: let the loops that serve go first

    def _ask(self) -> Outside:
        try:
            asked = self._outside()
        except Exception:
            if self._note():
                log.exception("what is asked at each scrape could not be; more of these are only counted")
            asked = Outside()
        return Outside(
            dropped=asked.dropped,
            sizes=asked.sizes,
            resident_bytes=asked.resident_bytes,
            cpu_seconds=asked.cpu_seconds,
            row_errors=self.row_errors,
        )

    def _read(self, row: Metric, view: View) -> list[_Series]:
        try:
            return [self._series(row, reading) for reading in self._closed(row, row.read(view))]
        except Exception:
            if self._note():
                log.exception("metric %s could not be shown; more of these are only counted", row.name)
            return []

    def _series(self, row: Metric, reading: Reading) -> _Series:
        values, value = reading
        if not isinstance(value, Histogram):
            return list(values), float(value), 0.0
        cells: _Cells = [
            (edge, count, Exemplar({"trace_id": found.trace_id}, found.value, found.unix_seconds) if found else None)
            for edge, count, found in value.cumulative(row.buckets)
        ]
        return list(values), cells, value.sum

    def _closed(self, row: Metric, readings: Iterable[Reading]) -> Iterator[Reading]:
        """Only readings whose label values are declared, or among the first few of an open label."""
        open_values: dict[str, set[str]] = {label: set() for label in row.labels}
        for values, value in readings:
            legal = len(values) == len(row.labels)
            for (label, allowed), given in zip(row.labels.items(), values, strict=False):
                seen = open_values[label]
                if allowed is None and len(seen) < OPEN_VALUES:
                    seen.add(given)
                legal = legal and given in (seen if allowed is None else allowed)
            if legal:
                yield values, value
            else:
                self._note()

    def _family(self, row: Metric, series: list[_Series], model: str) -> Family:
        labels = ["model_name" if row.name.startswith("vllm:") else "model", "engine", *row.labels]
        if row.kind == "histogram":
            histogram = HistogramMetricFamily(row.name, row.help, labels=labels)
            for values, value, total in series:
                if not isinstance(value, float):
                    histogram.add_metric([model, self._engine, *values], [_cell(*cell) for cell in value], total)
            return histogram
        kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
        family = kind(row.name, row.help, labels=labels)
        for values, value, _ in series:
            if isinstance(value, float):
                family.add_metric([model, self._engine, *values], value)
        return family

    def _note(self) -> bool:
        """Count an error; true for the first one, which is worth a line in the log."""
        self.row_errors += 1
        return self.row_errors == 1


def _wants_openmetrics(accept: str) -> bool:
    ranges = [[part.strip() for part in each.split(";")] for each in accept.split(",")]
    return any(kind == "application/openmetrics-text" and "q=0" not in rest for kind, *rest in ranges)


def _cell(edge: float, count: int, exemplar: Exemplar | None) -> tuple[str, float] | tuple[str, float, Exemplar]:
    """A cumulative bucket as prometheus_client takes it."""
    name = "+Inf" if edge == math.inf else repr(float(edge))
    return (name, count) if exemplar is None else (name, count, exemplar)
