"""Rows of the table of metrics: what becomes a family, and a line of the documentation page."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Self, TypeVar, overload

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from kvrouter.telemetry.families import CounterFamily, Family, GaugeFamily, HistogramFamily, Labels

F = TypeVar("F", bound=Family)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One row of the documentation page."""

    name: str
    kind: str
    labels: Labels
    meaning: str


class Metric(Generic[F]):
    """A row of the table: it becomes a family of its own in every :class:`Telemetry`."""

    def __init__(self, kind: str, name: str, meaning: str, make: Callable[[], F], labels: Labels) -> None:
        self.spec = MetricSpec(name=name, kind=kind, labels=labels, meaning=meaning)
        self.make = make

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.attribute = attribute

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> F: ...
    def __get__(self, instance: object | None, owner: type) -> Self | F:
        # A family lives in the instance's own dictionary, which Python looks into before it asks here.
        if instance is None:
            return self
        raise AttributeError(self.attribute)


def counter(name: str, meaning: str, *labels: str) -> Metric[CounterFamily]:
    """Return a row for what only grows; its name ends in ``_total`` on the page."""

    def make() -> CounterFamily:
        return CounterFamily(name, meaning, labels)

    return Metric("counter", f"{name}_total", meaning, make, labels)


def gauge(name: str, meaning: str, *labels: str) -> Metric[GaugeFamily]:
    """Return a row for a latest value."""

    def make() -> GaugeFamily:
        return GaugeFamily(name, meaning, labels)

    return Metric("gauge", name, meaning, make, labels)


def histogram(name: str, meaning: str, *labels: str, bounds: tuple[float, ...]) -> Metric[HistogramFamily]:
    """Return a row for how values spread over buckets with these upper bounds."""

    def make() -> HistogramFamily:
        return HistogramFamily(name, meaning, labels, bounds)

    return Metric("histogram", name, meaning, make, labels)


class MetricsPage:
    """What ``/metrics`` shows: the rows that a subclass has as attributes, and the process."""

    def __init__(self) -> None:
        self._collectors: list[Collector] = []
        self._before_scrape: list[Callable[[], None]] = []
        for attribute, metric in vars(type(self)).items():
            if isinstance(metric, Metric):
                family = metric.make()
                vars(self)[attribute] = family
                self._collectors.append(family)
        self._collectors.append(ProcessCollector(registry=None))

    def before_scrape(self, refresh: Callable[[], None]) -> Callable[[], None]:
        """Call ``refresh`` before each rendering, to set gauges that nobody keeps; return what ends that."""
        self._before_scrape.append(refresh)
        return lambda: self._before_scrape.remove(refresh)

    def render(self) -> bytes:
        """Return the page of ``/metrics`` in Prometheus' text format."""
        return b"".join(self.render_steps())

    def render_steps(self) -> Iterator[bytes]:
        """Yield the page of ``/metrics`` in parts, a family each, so that others may run in between; first
        an empty part, once the gauges are set.
        """
        for refresh in tuple(self._before_scrape):
            refresh()
        yield b""
        yield from map(generate_latest, self._collectors)


def specs_of(page: type[MetricsPage]) -> tuple[MetricSpec, ...]:
    """Return the rows of a page's documentation."""
    return tuple(metric.spec for metric in vars(page).values() if isinstance(metric, Metric))
