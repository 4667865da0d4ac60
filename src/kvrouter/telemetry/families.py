"""Counters, gauges and histograms that cost the hot path a dictionary entry, and nothing for a token.

They are collectors of ``prometheus_client``, which writes the text. One thread writes them and renders
them: the event loop's. Each family holds a bounded number of label sets.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

LABEL_SETS_MAX = 16_384
"""Label sets of one family; what comes later is counted under ``_full`` in every label."""

FULL = "_full"

Labels = tuple[str, ...]


class Family(Collector):
    """What the three kinds share: a name, a meaning, label names, and the limit of label sets."""

    def __init__(self, name: str, meaning: str, labels: Labels) -> None:
        self.name = name
        self.meaning = meaning
        self.label_names = labels

    def _admit(self, labels: Labels, held: Mapping[Labels, object]) -> Labels:
        """Return the key under which new ``labels`` are kept; raise ValueError when their number is wrong."""
        if len(labels) != len(self.label_names):
            raise ValueError(f"{self.name}: needs the labels {self.label_names}, not {labels}")
        return labels if len(held) < LABEL_SETS_MAX else (FULL,) * len(labels)


class CounterFamily(Family):
    """What only grows."""

    def __init__(self, name: str, meaning: str, labels: Labels) -> None:
        super().__init__(name, meaning, labels)
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def inc(self, *labels: str, by: float = 1.0) -> None:
        """Add ``by`` (≥ 0) under the label values, which stand in the order of the label names."""
        values = self._values
        if labels not in values:
            labels = self._admit(labels, values)
        values[labels] = values.get(labels, 0.0) + by

    def forget(self, *labels: str) -> None:
        """Take the label values off the page: what they stand for is gone for good."""
        self._values.pop(labels, None)

    def value(self, *labels: str) -> float:
        """Return what was counted under the label values."""
        return self._values.get(labels, 0.0)

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Yield the family in prometheus_client's form."""
        family = CounterMetricFamily(self.name, self.meaning, labels=self.label_names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class GaugeFamily(Family):
    """A latest value."""

    def __init__(self, name: str, meaning: str, labels: Labels) -> None:
        super().__init__(name, meaning, labels)
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def set(self, value: float, *labels: str) -> None:
        """Replace the value under the label values."""
        if labels not in self._values:
            labels = self._admit(labels, self._values)
        self._values[labels] = value

    def add(self, change: float, *labels: str) -> None:
        """Change the value under the label values, from 0 when there is none."""
        self.set(self._values.get(labels, 0.0) + change, *labels)

    def replace(self, values: Mapping[Labels, float]) -> None:
        """Make ``values`` all that the gauge holds: what is gone from the fleet goes from the page."""
        self._values.clear()
        for labels, value in values.items():
            self.set(value, *labels)

    def value(self, *labels: str) -> float:
        """Return the value under the label values, 0 when there is none."""
        return self._values.get(labels, 0.0)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the family in prometheus_client's form."""
        family = GaugeMetricFamily(self.name, self.meaning, labels=self.label_names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class _Series:
    """The observations under one label set: a count per bucket, the last one for what is above all bounds."""

    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0


class HistogramFamily(Family):
    """How observations spread over buckets with the upper bounds ``bounds``, which rise."""

    def __init__(self, name: str, meaning: str, labels: Labels, bounds: Sequence[float]) -> None:
        super().__init__(name, meaning, labels)
        self.bounds = tuple(bounds)
        self._series: dict[Labels, _Series] = {} if labels else {(): self._new_series()}

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """Note ``value``, ``times`` times."""
        series = self._of(labels)
        series.counts[bisect_left(self.bounds, value)] += times
        series.total += value * times

    def observe_many(self, values: Sequence[float] | np.ndarray, *labels: str) -> None:
        """Note many values in one go: all the token gaps of a request, once it has ended."""
        array = np.asarray(values, dtype=np.float64)
        if not array.size:
            return
        series = self._of(labels)
        found = np.bincount(np.searchsorted(self.bounds, array, side="left"), minlength=len(series.counts))
        series.counts = [old + int(new) for old, new in zip(series.counts, found, strict=True)]
        series.total += float(array.sum())

    def count(self, *labels: str) -> int:
        """Return how many values were noted under the label values."""
        series = self._series.get(labels)
        return sum(series.counts) if series else 0

    def total(self, *labels: str) -> float:
        """Return the sum of the values noted under the label values."""
        series = self._series.get(labels)
        return series.total if series else 0.0

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Yield the family in prometheus_client's form: cumulative counts up to each bound."""
        family = HistogramMetricFamily(self.name, self.meaning, labels=self.label_names)
        names = [*map(str, self.bounds), "+Inf"]
        for labels, series in self._series.items():
            counts = np.cumsum(series.counts).tolist()
            family.add_metric(labels, list(zip(names, counts, strict=True)), series.total)
        yield family

    def _of(self, labels: Labels) -> _Series:
        series = self._series.get(labels)
        if series is None:
            labels = self._admit(labels, self._series)
            series = self._series.setdefault(labels, self._new_series())
        return series

    def _new_series(self) -> _Series:
        return _Series(len(self.bounds) + 1)
