"""The gauges that nobody keeps: read off the fleet, the ledger and the index before each scrape."""

from kvrouter.feed.words import FeedState
from kvrouter.fleet import CircuitState
from kvrouter.frontend.reading import RankReading, WorkerReading, read_index, read_workers
from kvrouter.service.router import RouterService
from kvrouter.telemetry import Telemetry
from kvrouter.topology import topology_domains

Values = dict[tuple[str, ...], float]


class Gauges:
    """Sets each gauge to what holds now; a worker that is gone is gone from the page."""

    def __init__(self, telemetry: Telemetry, service: RouterService) -> None:
        self._telemetry = telemetry
        self._service = service

    def refresh(self) -> None:
        """Read everything once."""
        telemetry = self._telemetry
        page = _Page()
        index_blocks: Values = {}
        index_bytes: Values = {}
        leases: Values = {}
        queued: Values = {}
        parted: Values = {}
        for model in self._service.models():
            name = model.fleet.model
            for worker in read_workers(model):
                page.add(worker)
            index = read_index(model)
            if index is not None:
                index_bytes[name,] = index.bytes
                index_blocks.update({(name, medium): blocks for medium, blocks in index.blocks.items()})
            leases[name,] = len(model.ledger)
            queued[name,] = model.waiting_for_load
            parted[name,] = sum(1 for _ in model.circuits.pairs())
        telemetry.retry_body_bytes.set(self._service.retry_body_bytes)
        telemetry.index_blocks.replace(index_blocks)
        telemetry.index_bytes.replace(index_bytes)
        telemetry.ledger_leases.replace(leases)
        telemetry.queue_depth.replace(queued)
        telemetry.pairs_parted.replace(parted)
        telemetry.event_lag.replace(page.lag)
        telemetry.kv_events_missing.replace(page.missing)
        telemetry.worker_up.replace(page.up)
        telemetry.worker_draining.replace(page.draining)
        telemetry.worker_engine_silent.replace(page.engine_silent)
        telemetry.worker_circuit.replace(page.circuit)
        telemetry.worker_blocks.replace(page.blocks)
        telemetry.worker_running_requests.replace(page.running_requests)
        telemetry.worker_waiting_requests.replace(page.waiting_requests)
        telemetry.ledger_active_blocks.replace(page.active_blocks)
        telemetry.ledger_prefill_tokens.replace(page.prefill_tokens)
        telemetry.feed_state.replace(page.feed_state)
        telemetry.feed_staleness.replace(page.staleness)
        telemetry.kv_transfer_slow.replace(page.slow)


class _Page:
    """The values of one scrape, by labels."""

    def __init__(self) -> None:
        self.up: Values = {}
        self.draining: Values = {}
        self.engine_silent: Values = {}
        self.circuit: Values = {}
        self.blocks: Values = {}
        self.running_requests: Values = {}
        self.waiting_requests: Values = {}
        self.active_blocks: Values = {}
        self.prefill_tokens: Values = {}
        self.feed_state: Values = {}
        self.staleness: Values = {}
        self.lag: Values = {}
        self.missing: Values = {}
        self.slow: Values = {}

    def add(self, worker: WorkerReading) -> None:
        """Note one worker and its ranks."""
        card = worker.card
        worker_id = str(card.worker_id)
        self.up[worker_id, card.model, card.role.value, _place(worker)] = float(worker.alive)
        self.draining[worker_id,] = float(card.draining)
        self.engine_silent[worker_id,] = float(card.engine_silent)
        for state in CircuitState:
            self.circuit[worker_id, state.value] = float(worker.circuit is state)
        for rank in worker.ranks:
            self._add_rank((worker_id, str(rank.rank.dp_rank)), rank)

    def _add_rank(self, labels: tuple[str, str], rank: RankReading) -> None:
        self.active_blocks[labels] = rank.active_blocks
        self.prefill_tokens[labels] = rank.prefill_tokens
        if rank.total_blocks is not None:
            self.blocks[*labels, "total"] = rank.total_blocks
        if rank.report_active_blocks is not None:
            self.blocks[*labels, "active"] = rank.report_active_blocks
        if rank.report_running_requests is not None:
            self.running_requests[labels] = rank.report_running_requests
        if rank.report_waiting_requests is not None:
            self.waiting_requests[labels] = rank.report_waiting_requests
        self.feed_state[*labels, "none"] = float(rank.feed is None)
        for state in FeedState:
            self.feed_state[*labels, state.name.lower()] = float(rank.feed is state)
        if rank.stale_s is not None:
            self.staleness[labels] = rank.stale_s
        if rank.lag_s is not None:
            self.lag[labels] = rank.lag_s
        if rank.kv_events_missing is not None:
            self.missing[labels] = float(rank.kv_events_missing)
        if rank.account.transfers is not None:
            self.slow[labels] = float(rank.account.transfers.is_slow)


def _place(worker: WorkerReading) -> str:
    """The worker's value of its transfer domain, else of its broadest level; ``none`` without either."""
    config = worker.card.runtime_config
    domains = topology_domains(config)
    for domain in (config.kv_transfer_domain, *config.topology_levels, *sorted(domains)):
        if domain is not None and domain in domains:
            return domains[domain]
    return "none"
