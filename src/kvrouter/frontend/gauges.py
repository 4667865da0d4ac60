"""The gauges of ``/metrics`` that are read from the fleet when the page is."""

from collections.abc import Sequence

from kvrouter.core.workers import ModelRuntimeConfig
from kvrouter.frontend.fleet_state import (
    RankReading,
    WorkerReading,
    pair_capacity_of,
    read_index,
    read_workers,
)
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.fleet.circuit import CircuitState
from kvrouter.kernel.placement.engine_sums import SumsReading
from kvrouter.kernel.placement.link_speeds import LinkReading
from kvrouter.router.router_service import RouterService
from kvrouter.telemetry import Telemetry
from kvrouter.telemetry.families import GaugeFamily

LINK_SERIES_MAX = 64
"""The most links per model that have metric series; ``GET /v1/fleet`` lists all."""


class Gauges:
    """Sets the gauges of the fleet to their current values, and removes the series of workers that left."""

    def __init__(self, telemetry: Telemetry, service: RouterService) -> None:
        self._telemetry = telemetry
        self._service = service
        self._values: dict[GaugeFamily, dict[tuple[str, ...], float]] = {}

    def refresh(self) -> None:
        """Read the state once and replace the series of every gauge."""
        telemetry = self._telemetry
        self._values = {gauge: {} for gauge in self._values}
        for model in self._service.models():
            name = model.fleet.model
            for worker in read_workers(model):
                self._add(worker)
            index = read_index(model)
            if index is not None:
                self._set(telemetry.index_bytes, index.bytes, name)
                for medium, blocks in index.blocks.items():
                    self._set(telemetry.index_blocks, blocks, name, medium)
            transfers = model.placer.transfers
            self._add_links(name, transfers.learned.readings(), transfers.engine_sums.reading())
            self._set(telemetry.ledger_leases, len(model.ledger), name)
            self._set(telemetry.queue_depth, len(model.placer.waiting.admission), name)
            pairs = model.placer.circuits.pairs(now_s=model.clock())
            self._set(telemetry.pairs_parted, sum(1 for _ in pairs), name)
            self._set(telemetry.pair_capacity, pair_capacity_of(model.fleet), name)
        telemetry.retry_body_bytes.set(self._service.requests.retry_body_bytes)
        for gauge, values in self._values.items():
            gauge.replace(values)

    def _set(self, gauge: GaugeFamily, value: float, *labels: str) -> None:
        """Set one series for this refresh; a series that the next refresh does not set is removed."""
        self._values.setdefault(gauge, {})[labels] = value

    def _add(self, worker: WorkerReading) -> None:
        """Set the series of one worker and its ranks."""
        card, telemetry = worker.card, self._telemetry
        worker_id = str(card.worker_id)
        self._set(
            telemetry.worker_up, float(worker.alive), worker_id, card.model, card.role.value, _place(worker)
        )
        engine, _, version = card.engine.partition(" ")
        zone = card.runtime_config.domains.get("zone", "")
        self._set(telemetry.worker_info, 1.0, worker_id, card.pod, card.address, engine, version, zone)
        transfer = _transfer_labels(card.runtime_config)
        if any(transfer):
            self._set(telemetry.worker_kv_transfer, 1.0, worker_id, *transfer)
        self._set(telemetry.worker_draining, float(card.draining), worker_id)
        self._set(telemetry.worker_cordoned, float(bool(worker.cordons)), worker_id)
        self._set(telemetry.worker_engine_silent, float(card.engine_silent), worker_id)
        self._set(telemetry.worker_several_engines, float(card.several_engines), worker_id)
        for state in CircuitState:
            self._set(telemetry.worker_circuit, float(worker.circuit is state), worker_id, state.value)
        for rank in worker.ranks:
            self._add_rank((worker_id, str(rank.rank.dp_rank)), rank)

    def _add_links(self, model: str, links: Sequence[LinkReading], sums: SumsReading | None) -> None:
        """Set the series of a model's learned links, kinds of links first, and of their ratio to the
        bandwidth that engines report.
        """
        telemetry = self._telemetry
        if sums is not None:
            self._set(telemetry.link_seen_over_reported, sums.ratio, model)
        for link in links[:LINK_SERIES_MAX]:
            self._set(telemetry.link_bandwidth, link.bandwidth_bytes_per_s, model, link.name)
            self._set(telemetry.link_latency, link.latency_s, model, link.name)
            self._set(telemetry.link_slow, float(link.is_slow), model, link.name)

    def _add_rank(self, labels: tuple[str, str], rank: RankReading) -> None:
        telemetry, report, engine_reports = self._telemetry, rank.report, rank.engine_reports
        self._set(telemetry.ledger_active_blocks, rank.active_blocks, *labels)
        self._set(telemetry.ledger_prefill_tokens, rank.prefill_tokens, *labels)
        if rank.total_blocks is not None:
            self._set(telemetry.worker_blocks, rank.total_blocks, *labels, "total")
        if report is not None:
            self._set(telemetry.worker_blocks, report.active_blocks, *labels, "active")
            self._set(telemetry.worker_running_requests, report.running_requests, *labels)
            self._set(telemetry.worker_waiting_requests, report.waiting_requests, *labels)
        feed = rank.feed
        self._set(telemetry.feed_state, float(feed is None), *labels, "none")
        for state in FeedState:
            is_current = feed is not None and feed.state is state
            self._set(telemetry.feed_state, float(is_current), *labels, state.name.lower())
        if feed is not None:
            self._set(telemetry.feed_staleness, feed.stale_s, *labels)
            self._set(telemetry.event_lag, feed.lag_s, *labels)
            self._set(telemetry.kv_events_missing, float(feed.is_missing), *labels)
        if engine_reports.transfers is not None:
            self._set(telemetry.kv_transfer_slow, float(engine_reports.transfers.is_slow), *labels)
        if rank.speed is not None:
            self._set(telemetry.rank_slowness, rank.speed.relative, *labels)
            self._set(telemetry.rank_slow, float(rank.speed.is_slow), *labels)


def _place(worker: WorkerReading) -> str:
    """Return the worker's value of its transfer domain, else of its broadest level, else ``none``."""
    config = worker.card.runtime_config
    domains = config.domains
    for domain in (config.kv_transfer_domain, *config.topology_levels, *sorted(domains)):
        if domain is not None and domain in domains:
            return domains[domain]
    return "none"


def _transfer_labels(config: ModelRuntimeConfig) -> tuple[str, str, str, str]:
    """Return a worker's domains, and the domain, enforcement and weight of its transfers; empty if unset."""
    weight = config.kv_transfer_preferred_weight
    return (
        ",".join(f"{domain}={value}" for domain, value in sorted(config.domains.items())),
        config.kv_transfer_domain or "",
        config.kv_transfer_enforcement or "",
        "" if weight is None else str(weight),
    )
