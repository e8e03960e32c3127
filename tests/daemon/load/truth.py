"""What a server's metrics say of one run, by difference, to hold a load test's own figures against."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.served import Served


@dataclass(frozen=True)
class Scrape:
    """The counters, sums and buckets of one /metrics."""

    values: dict[tuple[str, str], float]

    @classmethod
    def of(cls, served: Served) -> "Scrape":
        text = served.get("/metrics")[1].decode()
        values: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name, sample.labels.get("le") or sample.labels.get("reason", "")
                values[key] = values.get(key, 0.0) + sample.value
        return cls(values)

    def __sub__(self, before: "Scrape") -> "Scrape":
        return Scrape({key: value - before.values.get(key, 0.0) for key, value in self.values.items()})

    def total(self, name: str) -> float:
        """Over all label sets."""
        return sum(value for (found, _), value in self.values.items() if found == name)

    def mean(self, histogram: str) -> float:
        return self.total(f"{histogram}_sum") / self.total(f"{histogram}_count")

    def bucket(self, histogram: str, value: float) -> int:
        """The number of the bucket that `value` falls in."""
        return sum(edge < value for edge in self._edges(histogram))

    def percentile_bucket(self, histogram: str, percent: float) -> int:
        """The number of the bucket that holds the percentile."""
        rank = percent / 100 * self.total(f"{histogram}_count")
        return sum(
            self.values[f"{histogram}_bucket", _le(self, histogram, edge)] < rank for edge in self._edges(histogram)
        )

    def _edges(self, histogram: str) -> list[float]:
        return sorted(float(le) for name, le in self.values if name == f"{histogram}_bucket")


def _le(scrape: Scrape, histogram: str, edge: float) -> str:
    return next(le for name, le in scrape.values if name == f"{histogram}_bucket" and float(le) == edge)
