"""Reads the state of workers and models, for ``GET /v1/fleet`` and the gauges."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from kvrouter.api import fleet_schema as api
from kvrouter.core.constraints import RouterMode
from kvrouter.core.cordon_rules import Cordon
from kvrouter.core.errors import Reason
from kvrouter.core.events import Medium
from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.core.taints import worker_taints
from kvrouter.core.workers import SEVERAL_ENGINES, Role, WorkerCard
from kvrouter.frontend.cordon_routes import cordoned
from kvrouter.frontend.decision_state import policy_state
from kvrouter.frontend.engine_tokens import PromptTokenizer
from kvrouter.frontend.request_stats import RequestStatistics
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.fleet.circuit import CircuitState
from kvrouter.kernel.fleet.columns import UNKNOWN, BoolColumn, Columns
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.cache_view import NoCacheView, PredictedCacheView
from kvrouter.kernel.placement.engine_sums import SumsReading
from kvrouter.kernel.placement.speeds import SpeedReading
from kvrouter.kernel.routing.formats import format_groups, pair_capacity, partner_ranks
from kvrouter.kernel.routing.interface import cost_rule
from kvrouter.kernel.routing.masks import ready
from kvrouter.kernel.topology.policy import RouterTopologyDefault, policy_of
from kvrouter.router.engine_reports import ReportReading
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.event_ingest import FeedReading
from kvrouter.router.index_check import AnswerCounts
from kvrouter.router.kv_flows import RECENT_S
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.router.router_service import RefusedCard, RouterService
from kvrouter.router.traffic import TrafficRecorder
from kvrouter.router.transfer_speed import TransferReading
from kvrouter.settings.setting import installed_version


@dataclass(frozen=True, slots=True)
class RankReading:
    """The state of one worker rank. Unknown values are None: no report yet, no index, no feed."""

    rank: WorkerRank
    active_blocks: int
    prefill_tokens: int
    total_blocks: int | None
    report: api.LoadSeen | None
    held_blocks: int | None
    feed: FeedReading | None
    engine_reports: ReportReading
    speed: SpeedReading | None


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """The state of one worker and its ranks."""

    card: WorkerCard
    alive: bool
    cordons: tuple[Cordon, ...]
    circuit: CircuitState
    kv_partners: int | None
    ranks: tuple[RankReading, ...]


@dataclass(frozen=True, slots=True)
class IndexReading:
    """The size of a model's index. ``blocks`` is by medium; ``bytes`` also has the blocks that are predicted
    for ranks without KV events, and for prompts with images.
    """

    blocks: dict[str, int]
    bytes: int


def read_workers(model: ModelRouter) -> Iterator[WorkerReading]:
    """Yield every worker of a model, in the order of worker ids."""
    fleet = model.fleet
    model.ledger.ensure_slots(fleet.n_slots)
    loads = model.ledger.columns()
    feeds: dict[Slot, FeedReading] = {}
    held_of = None
    if isinstance(model.cache, EventCacheView):
        feeds = dict(model.cache.ingest.feed_readings())
        held_of = model.cache.index.held
    columns, groups = fleet.columns, format_groups(fleet)
    able = _able(fleet)
    for card in sorted(fleet, key=lambda card: card.worker_id):
        ranks = []
        for rank, slot in zip(card.ranks(), fleet.slots_of(card.worker_id), strict=True):
            total_blocks = float(columns.total_blocks[slot])
            feed = feeds.get(slot)
            ranks.append(
                RankReading(
                    rank=rank,
                    active_blocks=int(loads.active_blocks[slot]),
                    prefill_tokens=int(loads.prefill_tokens[slot]),
                    total_blocks=int(total_blocks) if np.isfinite(total_blocks) else None,
                    report=_report(columns, slot),
                    held_blocks=None if held_of is None else held_of(slot),
                    feed=None if feed is None else feed._replace(state=_state(card, feed)),
                    engine_reports=model.engine_reports.reading(slot),
                    speed=model.placer.speeds.reading(slot),
                )
            )
        is_alive = fleet.is_alive(card.worker_id)
        circuit = model.placer.circuits.state_of(card.worker_id, now_s=model.clock())
        cordons = fleet.cordons_on(card.worker_id)
        first = fleet.slots_of(card.worker_id)[0]
        partners = partner_ranks(groups, first, *able) if groups else None
        yield WorkerReading(card, is_alive, cordons, circuit, partners, tuple(ranks))


def _able(fleet: Fleet) -> tuple[BoolColumn, BoolColumn]:
    """Return the prefill and the decode ranks that may get new requests."""
    prefill, decode = (ready(fleet, leg, last_resort=True) for leg in (Leg.PREFILL, Leg.DECODE))
    return prefill.allowed, decode.allowed


def pair_capacity_of(fleet: Fleet) -> float:
    """Return the share of the capacity of pairs that KV formats leave."""
    return pair_capacity(format_groups(fleet), *_able(fleet))


def _report(columns: Columns, slot: Slot) -> api.LoadSeen | None:
    if not columns.has_report[slot]:
        return None
    prefill_tokens = int(columns.report_prefill_tokens[slot])
    return api.LoadSeen(
        active_blocks=int(columns.report_active_blocks[slot]),
        active_prefill_tokens=None if prefill_tokens == UNKNOWN else prefill_tokens,
        running_requests=int(columns.report_running_requests[slot]),
        waiting_requests=int(columns.report_waiting_requests[slot]),
    )


def _state(card: WorkerCard, feed: FeedReading) -> FeedState:
    """Return the feed's state; PARTIAL if it is live but the worker knows only part of its engine's cache."""
    if card.cache_is_partial and feed.state is FeedState.LIVE:
        return FeedState.PARTIAL
    return feed.state


def read_index(model: ModelRouter) -> IndexReading | None:
    """Return the size of a model's index; None without an index."""
    cache = model.cache
    if isinstance(cache, EventCacheView):
        stats = cache.index.stats()
        blocks = {medium.name.lower(): stats.blocks[medium] for medium in Medium}
        return IndexReading(blocks, stats.bytes + cache.predicted.stats().bytes)
    if isinstance(cache, PredictedCacheView):
        predicted = cache.index.stats()
        return IndexReading({Medium.GPU.name.lower(): predicted.blocks}, predicted.bytes)
    return None


ExpectedEngines = Callable[[], Sequence[api.ExpectedEngine]]
"""Returns the engines that this process is to attach, those that have workers too."""


def no_expected_engines() -> Sequence[api.ExpectedEngine]:
    """Return no engines: workers come from discovery, so none is expected."""
    return ()


def read_expected(service: RouterService, expected: ExpectedEngines) -> list[api.ExpectedEngine]:
    """Return the expected engines, and those of workers from discovery whose URL is an address before several
    engines.
    """
    engines = list(expected())
    known = {engine.worker_id for engine in engines}
    cards = (card for model in service.models() for card in model.fleet)
    return engines + [
        api.ExpectedEngine(
            engine_url=card.engine_url or None,
            worker_id=card.worker_id,
            kind=card.engine.partition(" ")[0] or None,
            role=card.role,
            model=card.model,
            pod=card.pod or None,
            state=api.ExpectedState.JOINED,
            reason=f"{card.engine_url} {SEVERAL_ENGINES}",
        )
        for card in cards
        if card.several_engines and card.worker_id not in known
    ]


def fleet_state(
    service: RouterService,
    tokenizer: PromptTokenizer | None = None,
    expected: ExpectedEngines = no_expected_engines,
    stats: RequestStatistics | None = None,
) -> api.Fleet:
    """Return every worker with its ranks, every model with its queue and index, the running requests, the
    expected engines, and the statistics of requests that ended.
    """
    served = None if stats is None else stats.reading()
    models: list[api.Model] = []
    workers: list[api.Worker] = []
    for model in service.models():
        of_model = list(read_workers(model))
        requests = None if served is None else served.by_model.get(model.fleet.model)
        models.append(_model_state(model, requests, workers=len(of_model), tokenizer=tokenizer))
        default = model.placer.settings.topology_default
        workers.extend(
            _worker_state(worker, default, lapsed=service.liveness.has_lapsed(worker.card.worker_id))
            for worker in of_model
        )
    return api.Fleet(
        version=installed_version(),
        time_s=round(time.time(), 3),
        discovery=api.Discovery(reachable=service.store_lost is None, why=service.store_lost),
        draining=service.requests.is_draining,
        running_requests=service.requests.running,
        request_stats=None if served is None else served.all_models,
        recording=_recording_state(service.requests.traffic),
        replicas=_replicas_state(service.sync),
        models=models,
        workers=workers,
        refused_workers=[_refused_state(refused) for refused in service.refused()],
        expected_engines=read_expected(service, expected),
    )


def _recording_state(traffic: TrafficRecorder | None) -> str | None:
    """Return ``active`` or ``ended``; None when recording is off."""
    if traffic is None:
        return None
    return "active" if traffic.is_recording else "ended"


def _replicas_state(sync: ReplicaSync | None) -> api.Replicas | None:
    """Return the counts of other replicas; None without replica sync."""
    if sync is None:
        return None
    others = sync.counts().others
    return api.Replicas(others=others.replicas, behind=others.behind)


def _refused_state(refused: RefusedCard) -> api.RefusedWorker:
    card = refused.card
    return api.RefusedWorker(
        worker_id=card.worker_id,
        model=card.model,
        role=card.role,
        address=card.address,
        engine=card.engine or None,
        pod=card.pod or None,
        block_size=card.block_size,
        field=refused.param,
        why=refused.why,
    )


def _model_state(
    model: ModelRouter,
    requests: api.RequestStats | None,
    *,
    workers: int,
    tokenizer: PromptTokenizer | None,
) -> api.Model:
    why_by_load = None if tokenizer is None else tokenizer.why_by_load(model)
    settings, index = model.placer.settings, read_index(model)
    near = settings.near
    default = settings.topology_default
    return api.Model(
        model=model.fleet.model,
        block_size=model.fleet.block_size,
        router_mode=settings.mode,
        cache_view=_cache_view_of(model),
        routing=_routing_of(model, why_by_load),
        routing_reason=why_by_load,
        tokenized_by=None if tokenizer is None else tokenizer.tokenized_by(model),
        prefill_near=None
        if near is None
        else api.PrefillNear(domain=near.domain, value=near.value, required=near.is_required),
        router_cost=settings.cost,
        router_cost_reason=settings.cost_reason,
        router_pd_selection=settings.pd_selection,
        links=_links_state(model),
        workers=workers,
        worker_ranks=sum(card.dp_size for card in model.fleet),
        waiting_requests=len(model.placer.waiting),
        parted_pairs=[
            api.BrokenPair(
                prefill_worker_id=pair.prefill,
                decode_worker_id=pair.decode,
                circuit=state,
                reason=Reason.CANNOT_TRANSFER if pair in model.fleet.refusing_pairs else Reason.KV_LOST,
            )
            for pair, state in model.placer.circuits.pairs(now_s=model.clock())
        ],
        index=None if index is None else api.Index(blocks=index.blocks, bytes=index.bytes),
        prompt_shapes=[
            api.PromptShape(shape=each.shape, answers=each.answers, missed=each.missed, blind=each.is_blind)
            for each in model.engine_reports.shapes.readings()
        ],
        unrendered_chats=[
            api.UnrenderedChats(reason=each.reason, chats=each.chats, detail=each.detail)
            for each in (() if tokenizer is None else tokenizer.unrendered(model))
        ],
        pair_capacity=round(pair_capacity_of(model.fleet), 3),
        kv_transfer_default=None if default is None else policy_state(default.policy),
        active_decode_blocks_threshold=settings.active_decode_blocks_threshold,
        active_prefill_tokens_threshold=settings.active_prefill_tokens_threshold,
        request_stats=requests,
    )


def _routing_of(model: ModelRouter, why_by_load: str | None) -> str:
    """Return the basis of decisions: ``cache`` (and load), ``load`` alone, or the name of another mode."""
    if why_by_load is not None:
        return "load"
    if model.placer.settings.mode is not RouterMode.KV:
        return model.placer.settings.mode.value
    return "load" if isinstance(model.cache, NoCacheView) else "cache"


def _cache_view_of(model: ModelRouter) -> str:
    """Return the source of the cache view: ``events``, ``predicted`` or ``none``."""
    if isinstance(model.cache, EventCacheView):
        return "events"
    return "predicted" if isinstance(model.cache, PredictedCacheView) else "none"


def flows_state(service: RouterService) -> api.Flows:
    """Return the KV handed over between domains, for each model and pair of values."""
    return api.Flows(
        recent_s=RECENT_S,
        flows=[
            api.Flow(
                model=model.fleet.model,
                domain=flow.pair.domain,
                prefill_value=flow.pair.prefill,
                decode_value=flow.pair.decode,
                handoffs=flow.handoffs,
                unsized_handoffs=flow.unsized,
                bytes=flow.bytes,
                cost=None if flow.cost is None else round(flow.cost, 9),
                recent_handoffs=flow.recent_handoffs,
                bytes_per_s=round(flow.recent_bytes / RECENT_S),
            )
            for model in service.models()
            for flow in model.flows.readings(now_s=model.clock())
        ],
    )


def _links_state(model: ModelRouter) -> api.Links | None:
    """Return the links learned from handoffs; None when the cost rule does not learn them."""
    if not cost_rule(model.placer.settings.cost).needs.learned:
        return None
    learned = model.placer.transfers.learned
    return api.Links(
        alike=learned.are_alike,
        engines=_engine_sums(model.placer.transfers.engine_sums.reading()),
        learned=[
            api.LearnedLink(
                link=link.name,
                latency_s=round(link.latency_s, 6),
                bandwidth_bytes_per_s=round(link.bandwidth_bytes_per_s),
                slowness=round(link.slowness, 3),
                slowness_interval=_interval(link.low, link.high),
                transfers=link.transfers,
                slow=link.is_slow,
            )
            for link in learned.readings()
        ],
    )


def _engine_sums(sums: SumsReading | None) -> api.EngineSums | None:
    if sums is None:
        return None
    return api.EngineSums(
        bandwidth_bytes_per_s=round(sums.bandwidth_bytes_per_s),
        seen_bytes_per_s=round(sums.seen_bytes_per_s),
        ratio=round(sums.ratio, 3),
        agree=sums.agree,
    )


def _interval(low: float | None, high: float | None) -> tuple[float, float] | None:
    """Return the rounded interval; None unless both ends are bounded."""
    if low is None or high is None or high == inf:
        return None
    return round(low, 3), round(high, 3)


def _worker_state(
    worker: WorkerReading, default: RouterTopologyDefault | None, *, lapsed: bool
) -> api.Worker:
    card, config = worker.card, worker.card.runtime_config
    return api.Worker(
        worker_id=card.worker_id,
        model=card.model,
        role=card.role,
        alive=worker.alive,
        draining=card.draining,
        cordons=[cordoned(cordon) for cordon in worker.cordons],
        engine=card.engine or None,
        pod=card.pod or None,
        node=card.node or None,
        version=card.version or None,
        engine_url=card.engine_url or None,
        takes_calls=card.takes_calls,
        block_size=card.block_size,
        context_length=card.context_length,
        engine_silent=card.engine_silent,
        several_engines=card.several_engines,
        circuit=worker.circuit,
        address=card.address,
        endpoint=f"{card.namespace}.{card.component}.{card.endpoint}",
        domains=config.topology_domains,
        levels=config.topology_levels,
        taints=sorted(worker_taints(config)),
        prompt_tokens=api.PromptTokens(min=config.prompt_tokens_min, max=config.prompt_tokens_max),
        event_lane=card.event_source.transport if card.publishes_kv_events else None,
        kv_transfer=_kv_transfer_state(card, default),
        kv_format=config.kv_format.known,
        kv_partners=worker.kv_partners,
        ranks=[_rank_state(rank) for rank in worker.ranks],
        lapsed=lapsed,
    )


def _kv_transfer_state(card: WorkerCard, default: RouterTopologyDefault | None) -> api.Policy | None:
    """Return the policy for KV that a prefill worker sends; None for other roles, or without a policy."""
    if card.role is not Role.PREFILL:
        return None
    policy = policy_of(card.runtime_config, default)
    return None if policy is None else policy_state(policy)


def _rank_state(rank: RankReading) -> api.Rank:
    engine_reports, speed = rank.engine_reports, rank.speed
    return api.Rank(
        dp_rank=rank.rank.dp_rank,
        active_blocks=rank.active_blocks,
        prefill_tokens=rank.prefill_tokens,
        total_blocks=rank.total_blocks,
        report=rank.report,
        index_blocks=rank.held_blocks,
        feed=None if rank.feed is None else _feed_state(rank.feed),
        kv_events_skipped=engine_reports.events_skipped,
        predictions=None if engine_reports.answers is None else _predictions_state(engine_reports.answers),
        speed=None if speed is None else _speed_state(speed),
        kv_transfers=None if engine_reports.transfers is None else _transfers_state(engine_reports.transfers),
    )


def _feed_state(feed: FeedReading) -> api.Feed:
    return api.Feed(
        state=feed.state.name.lower(),
        stale_s=round(feed.stale_s, 3),
        silent_s=round(feed.silent_s, 3),
        kv_events_missing=feed.is_missing,
        clock_ahead_s=None if feed.clock_ahead_s is None else round(feed.clock_ahead_s, 3),
    )


def _predictions_state(answers: AnswerCounts) -> api.Predictions:
    return api.Predictions(
        answers=answers.n_answers,
        wrong=answers.n_wrong,
        wrong_share=round(answers.n_wrong / answers.n_answers, 3),
        mean_error_blocks=round(answers.mean_error_blocks, 3),
        span_s=round(answers.span_s, 3),
    )


def _speed_state(speed: SpeedReading) -> api.Speed:
    return api.Speed(
        slowness=round(speed.slowness, 3),
        decode_slowness=round(speed.decode_slowness, 3),
        relative=round(speed.relative, 3),
        requests=speed.requests,
        predicted_ttft_s=round(speed.predicted_s, 4),
        seen_ttft_s=round(speed.seen_s, 4),
        slow=speed.is_slow,
    )


def _transfers_state(transfers: TransferReading) -> api.Transfers:
    totals = transfers.reported
    return api.Transfers(
        transfers=totals.transfers,
        failed=totals.failed,
        bytes=totals.bytes,
        seconds=round(totals.seconds, 3),
        gb_per_s=_gb_per_s(transfers.recent_bytes_per_s),
        shown_gb_per_s=_gb_per_s(transfers.shown_bytes_per_s),
        slow=transfers.is_slow,
    )


def _gb_per_s(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else round(bytes_per_s / 1e9, 3)
