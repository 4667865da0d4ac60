"""An engine's own metrics page: only the lines that somebody asked for are read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kvrouter.core.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one metric."""

    labels: Mapping[str, str]
    value: float


Samples = Mapping[str, Sequence[Sample]]
"""The samples of each metric that was found, by its name."""


def read_metrics(page: bytes, names: Iterable[str]) -> Samples:
    """Return the samples of ``names`` in a page of Prometheus's text format; raise ProtocolError.

    A page has thousands of lines, and most are histograms that nobody here reads: those are not parsed.
    """
    wanted = tuple(names)
    try:
        lines = [line for line in page.decode().splitlines() if line.startswith(wanted)]
        found: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if sample.name in wanted:
                    found.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"the engine's metrics page cannot be read: {error}", param="metrics") from error
    return found
