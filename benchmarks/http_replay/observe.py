"""What the server says about the replay: handoffs in ``/metrics``, and its workers in ``/v1/fleet``."""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.http_replay.client import Answer
from kvrouter.core.workers import Role
from kvrouter.telemetry import Telemetry

HANDOFFS = Telemetry.handoffs.spec

Handoffs = Mapping[tuple[str, str], int]
"""How many KV transfers went from a prefill worker's domain to a decode worker's."""


def handoffs(metrics_text: str) -> Counter[tuple[str, str]]:
    """The handoffs counted in one scrape, by the transfer domain's values at both ends."""
    counts: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(metrics_text):
        for sample in family.samples:
            if sample.name == HANDOFFS.name:
                prefill, decode = (sample.labels[label] for label in HANDOFFS.labels)
                counts[prefill, decode] += int(sample.value)
    return counts


class FleetWorker(msgspec.Struct, frozen=True):
    """One worker of ``GET /v1/fleet``, as far as the replay reads it."""

    worker_id: int
    role: Role
    domains: Mapping[str, str] = {}


class FleetView(msgspec.Struct, frozen=True):
    """The answer to ``GET /v1/fleet``, as far as the replay reads it."""

    workers: tuple[FleetWorker, ...]


def fleet_workers(fleet_json: bytes) -> tuple[FleetWorker, ...]:
    """The workers of ``GET /v1/fleet``. Raises ``msgspec.ValidationError`` for an answer of another form."""
    return msgspec.json.decode(fleet_json, type=FleetView).workers


def shares(legs: Iterable[str], workers: Iterable[int]) -> dict[str, float]:
    """The part of the legs that each worker had, by worker id; the workers listed are there even with none.

    ``legs`` are worker ranks as the headers write them: ``<worker id>/<dp rank>``.
    """
    counts = Counter(dict.fromkeys(map(str, sorted(workers)), 0))
    counts.update(leg.partition("/")[0] for leg in legs)
    total = max(1, counts.total())
    return {worker: count / total for worker, count in counts.items()}


def crossings(answers: Iterable[Answer], workers: Iterable[FleetWorker], domain: str) -> int:
    """How many answers came from two workers whose values of the domain differ, or are not known."""
    value_of = {str(worker.worker_id): worker.domains.get(domain) for worker in workers}
    crossed = 0
    for answer in answers:
        if answer.prefill_worker is None or answer.decode_worker is None:
            continue
        prefill = value_of.get(answer.prefill_worker.partition("/")[0])
        decode = value_of.get(answer.decode_worker.partition("/")[0])
        crossed += prefill is None or prefill != decode
    return crossed
