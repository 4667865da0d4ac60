"""Metric families: counters, gauges and histograms without a lock on the hot path, and their rows.

They are collectors of ``prometheus_client``, which renders the text. One thread, the event loop's, writes and
renders them. Each family holds a bounded number of label sets.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, Self, TypeVar, overload

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

LABEL_SETS_MAX = 16_384
"""Label sets of one family; further ones are counted under ``_full`` in every label."""

FULL = "_full"

NUMPY_MIN = 64
"""The number of observations from which on numpy counts them faster than a loop."""

Labels = tuple[str, ...]


class MetricFamily(Collector):
    """The common part of families: a name, a meaning, label names, and the limit of label sets."""

    def __init__(self, name: str, meaning: str, labels: Labels) -> None:
        self.name = name
        self.meaning = meaning
        self.label_names = labels

    def _admit(self, labels: Labels, held: Mapping[Labels, object]) -> Labels:
        """Return the key under which new ``labels`` are kept; raise ValueError when their number is wrong."""
        if len(labels) != len(self.label_names):
            raise ValueError(f"{self.name}: needs the labels {self.label_names}, not {labels}")
        return labels if len(held) < LABEL_SETS_MAX else (FULL,) * len(labels)


class CounterFamily(MetricFamily):
    """A counter: a value that only grows."""

    def __init__(self, name: str, meaning: str, labels: Labels) -> None:
        super().__init__(name, meaning, labels)
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def inc(self, *labels: str, by: float = 1.0) -> None:
        """Add ``by`` (≥ 0) under the label values, in the order of the label names."""
        values = self._values
        value = values.get(labels)
        if value is None:
            labels = self._admit(labels, values)
            value = values.get(labels, 0.0)
        values[labels] = value + by

    def forget(self, *labels: str) -> None:
        """Remove the label values from the page, for a worker that is gone for good."""
        self._values.pop(labels, None)

    def value(self, *labels: str) -> float:
        """Return the count under the label values."""
        return self._values.get(labels, 0.0)

    def counts(self) -> Mapping[Labels, float]:
        """Return the counts by label values. The mapping is live: read it at once."""
        return self._values

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Yield the family in prometheus_client's form."""
        family = CounterMetricFamily(self.name, self.meaning, labels=self.label_names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class GaugeFamily(MetricFamily):
    """A gauge: the latest value."""

    def __init__(self, name: str, meaning: str, labels: Labels) -> None:
        super().__init__(name, meaning, labels)
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def set(self, value: float, *labels: str) -> None:
        """Replace the value under the label values."""
        if labels not in self._values:
            labels = self._admit(labels, self._values)
        self._values[labels] = value

    def add(self, change: float, *labels: str) -> None:
        """Add ``change`` to the value under the label values, from 0 without one."""
        value = self._values.get(labels)
        if value is None:
            self.set(change, *labels)
        else:
            self._values[labels] = value + change

    def replace(self, values: Mapping[Labels, float]) -> None:
        """Replace all values, so that series of gone workers leave the page."""
        self._values.clear()
        for labels, value in values.items():
            self.set(value, *labels)

    def value(self, *labels: str) -> float:
        """Return the value under the label values, 0 without one."""
        return self._values.get(labels, 0.0)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the family in prometheus_client's form."""
        family = GaugeMetricFamily(self.name, self.meaning, labels=self.label_names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class _Series:
    """The observations under one label set: a count per bucket, the last one above all bounds, and the latest
    traced observation of each bucket.
    """

    __slots__ = ("counts", "exemplars", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.exemplars: dict[int, Exemplar] = {}
        self.total = 0.0


class HistogramFamily(MetricFamily):
    """A histogram: observations in buckets with the increasing upper bounds ``bounds``."""

    def __init__(self, name: str, meaning: str, labels: Labels, bounds: Sequence[float]) -> None:
        super().__init__(name, meaning, labels)
        self.bounds = tuple(bounds)
        self._series: dict[Labels, _Series] = {} if labels else {(): self._new_series()}

    def observe(self, value: float, *labels: str, times: int = 1, trace_id: str = "") -> None:
        """Observe ``value``, ``times`` times; ``trace_id`` is the trace of the observation, if any."""
        series = self._series.get(labels) or self._of(labels)
        bucket = bisect_left(self.bounds, value)
        series.counts[bucket] += times
        series.total += value * times
        if trace_id:
            series.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def observe_many(self, values: Sequence[float] | np.ndarray, *labels: str) -> None:
        """Observe many values at once: all the token gaps of a request, once it has ended."""
        if not len(values):
            return
        series = self._of(labels)
        if len(values) < NUMPY_MIN:
            for value in values:
                series.counts[bisect_left(self.bounds, value)] += 1
            series.total += float(sum(values))
            return
        array = np.asarray(values, dtype=np.float64)
        found = np.bincount(np.searchsorted(self.bounds, array, side="left"), minlength=len(series.counts))
        series.counts = [old + int(new) for old, new in zip(series.counts, found, strict=True)]
        series.total += float(array.sum())

    def count(self, *labels: str) -> int:
        """Return the number of values observed under the label values."""
        series = self._series.get(labels)
        return sum(series.counts) if series else 0

    def total(self, *labels: str) -> float:
        """Return the sum of the values observed under the label values."""
        series = self._series.get(labels)
        return series.total if series else 0.0

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Yield the family in prometheus_client's form: cumulative counts up to each bound."""
        family = HistogramMetricFamily(self.name, self.meaning, labels=self.label_names)
        names = [*map(str, self.bounds), "+Inf"]
        for labels, series in self._series.items():
            counts = np.cumsum(series.counts).tolist()
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            for at, pair in enumerate(zip(names, counts, strict=True)):
                exemplar = series.exemplars.get(at)
                buckets.append(pair if exemplar is None else (*pair, exemplar))
            family.add_metric(labels, buckets, series.total)
        yield family

    def _of(self, labels: Labels) -> _Series:
        series = self._series.get(labels)
        if series is None:
            labels = self._admit(labels, self._series)
            series = self._series.setdefault(labels, self._new_series())
        return series

    def _new_series(self) -> _Series:
        return _Series(len(self.bounds) + 1)


F = TypeVar("F", bound=MetricFamily)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """A metric in the documentation."""

    name: str
    kind: str
    labels: Labels
    meaning: str


class Metric(Generic[F]):
    """A row of a table of metrics: it becomes a family in every instance of its table."""

    def __init__(self, kind: str, name: str, meaning: str, make: Callable[[], F], labels: Labels) -> None:
        self.spec = MetricSpec(name=name, kind=kind, labels=labels, meaning=meaning)
        self.make = make

    if TYPE_CHECKING:  # a table's instance holds its families: none is looked up through the class

        @overload
        def __get__(self, instance: None, owner: type) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type) -> F: ...
        def __get__(self, instance: object | None, owner: type) -> Self | F: ...


def counter(name: str, meaning: str, *labels: str) -> Metric[CounterFamily]:
    """Return a counter's row; its name ends in ``_total`` on the page."""

    def make() -> CounterFamily:
        return CounterFamily(name, meaning, labels)

    return Metric("counter", f"{name}_total", meaning, make, labels)


def gauge(name: str, meaning: str, *labels: str) -> Metric[GaugeFamily]:
    """Return a gauge's row."""

    def make() -> GaugeFamily:
        return GaugeFamily(name, meaning, labels)

    return Metric("gauge", name, meaning, make, labels)


def histogram(name: str, meaning: str, *labels: str, bounds: tuple[float, ...]) -> Metric[HistogramFamily]:
    """Return the row of a histogram with these upper bounds."""

    def make() -> HistogramFamily:
        return HistogramFamily(name, meaning, labels, bounds)

    return Metric("histogram", name, meaning, make, labels)


class MetricsFormat(StrEnum):
    """The format of ``/metrics``; the values are content types."""

    TEXT = CONTENT_TYPE_LATEST
    """Prometheus' text format."""
    OPENMETRICS = openmetrics.CONTENT_TYPE_LATEST
    """OpenMetrics, which has traces of observations (exemplars)."""

    @classmethod
    def accepted_by(cls, accept: str | None) -> "MetricsFormat":
        """Return the format for an ``Accept`` header: OpenMetrics where it is requested."""
        return cls.OPENMETRICS if "application/openmetrics-text" in (accept or "") else cls.TEXT


_EOF = b"# EOF\n"


class MetricTable:
    """A table of families, made of the rows that a subclass has as attributes."""

    def __init__(self) -> None:
        self.collectors: list[Collector] = []
        for attribute, metric in vars(type(self)).items():
            if isinstance(metric, Metric):
                family = metric.make()
                vars(self)[attribute] = family
                self.collectors.append(family)


class MetricsPage(MetricTable):
    """The page of ``/metrics``: a subclass's families, and the process's metrics."""

    def __init__(self) -> None:
        super().__init__()
        self._before_scrape: list[Callable[[], None]] = []
        self.collectors.append(ProcessCollector(registry=None))

    def before_scrape(self, refresh: Callable[[], None]) -> Callable[[], None]:
        """Call ``refresh`` before each rendering, to set computed gauges; return what ends that."""
        self._before_scrape.append(refresh)
        return lambda: self._before_scrape.remove(refresh)

    def render(self, metrics_format: MetricsFormat = MetricsFormat.TEXT) -> bytes:
        """Return the page of ``/metrics``."""
        return b"".join(self.render_steps(metrics_format))

    def render_steps(self, metrics_format: MetricsFormat = MetricsFormat.TEXT) -> Iterator[bytes]:
        """Yield the page of ``/metrics`` in parts, one for each family, so that other tasks run in between;
        first an empty part, once the gauges are set.
        """
        for refresh in tuple(self._before_scrape):
            refresh()
        yield b""
        if metrics_format is MetricsFormat.TEXT:
            yield from map(generate_latest, self.collectors)
            return
        for collector in self.collectors:
            page: bytes = openmetrics.generate_latest(collector)  # type: ignore[no-untyped-call]
            yield page.removesuffix(_EOF)
        yield _EOF


def specs_of(page: type[MetricTable]) -> tuple[MetricSpec, ...]:
    """Return the documentation's rows of a page."""
    return tuple(metric.spec for metric in vars(page).values() if isinstance(metric, Metric))
