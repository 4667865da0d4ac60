"""Router build: makes a router service from its settings and transports."""

import logging
import random
from collections.abc import Mapping

from msgspec import structs

from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import ModelName
from kvrouter.fleetfile.routing_settings import routing_settings
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.index import NativeApproximateIndex, NativeBlockIndex
from kvrouter.kernel.ledger.port import NativeLedger
from kvrouter.kernel.placement.cache_view import CacheView, NoCacheView, PredictedCacheView
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.event_ingest import EventIngest
from kvrouter.router.instrumentation import ModelInstrumentation, ServiceInstrumentation
from kvrouter.router.model_router import DecisionLog, ModelRouter
from kvrouter.router.replica_sync import ReplicaSync, new_router_id
from kvrouter.router.router_service import RouterService, ServiceParts
from kvrouter.router.traffic import TrafficRecorder
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Event, Telemetry, log_event
from kvrouter.transports.events.port import EventSubscriber
from kvrouter.transports.records.memory import MemoryCordons
from kvrouter.transports.records.port import CordonStore, Discovery
from kvrouter.transports.requests.port import RequestTransport

logger = logging.getLogger("kvrouter.router")


def build_service(
    config: KvRouterConfig,
    *,
    request_transport: RequestTransport,
    discovery: Discovery,
    subscriber: EventSubscriber,
    cordons: CordonStore | None = None,
    telemetry: Telemetry | None = None,
    links: LinkTable | None = None,
    sync: ReplicaSync | None = None,
    prefill_alone: bool = False,
    traffic: TrafficRecorder | None = None,
    place: Mapping[str, str] | None = None,
) -> RouterService:
    """Build a router service; it follows the fleet once it is started.

    ``cordons`` is the cordon store; None keeps cordons in this process only. ``sync`` shares bookings with
    other routers; its maker starts and stops it. ``prefill_alone``: it places prefill legs only. ``traffic``
    records requests. ``place`` are the topology domains of the frontend that it serves, which may change.
    Raises ConfigError where prefill must be near a frontend and there is none.
    """
    _check_prefill_level(config, place)
    instrumentation = ServiceInstrumentation(telemetry or Telemetry(), traffic)
    decisions = DecisionLog(requests_max=config.decisions_kept)
    router_id = new_router_id() if sync is None else sync.router_id
    settings = routing_settings(config, links, place)
    log_event(
        logger,
        Event.ROUTER_COST,
        mode=config.router_mode.value,
        router_cost=settings.cost,
        reason=settings.cost_reason,
    )
    if prefill_alone:  # a prefill worker holds no block of a running answer
        settings = structs.replace(settings, prefill_alone=True, track_active_blocks=False)

    def make_model(model: ModelName, block_size: int) -> ModelRouter:
        of_model = instrumentation.of_model(model)
        return ModelRouter(
            fleet=Fleet(model, block_size),
            cache=_cache_view(config, subscriber, of_model),
            ledger=NativeLedger(),
            router_id=router_id,
            config=config,
            settings=settings,
            decisions=decisions,
            instrumentation=of_model,
            seed=random.getrandbits(64),
            sync=sync,
        )

    return RouterService(
        ServiceParts(
            config=config,
            request_transport=request_transport,
            discovery=discovery,
            cordons=MemoryCordons() if cordons is None else cordons,
            subscriber=subscriber,
            make_model=make_model,
            decisions=decisions,
            instrumentation=instrumentation,
            sync=sync,
        )
    )


def _check_prefill_level(config: KvRouterConfig, place: Mapping[str, str] | None) -> None:
    if place is None and config.router_prefill_level is not None:
        raise ConfigError(
            "router_prefill_level: only a frontend has a place for prefill to be near; leave it out here",
            param="router_prefill_level",
        )


def _cache_view(
    config: KvRouterConfig, subscriber: EventSubscriber, instrumentation: ModelInstrumentation
) -> CacheView:
    """The cache view: none where overlap has no weight or the mode is not KV, else events or predictions."""
    if config.overlap_score_weight == 0.0 or config.router_mode is not RouterMode.KV:
        return NoCacheView()
    predicted = NativeApproximateIndex(
        ttl_s=config.router_ttl_s,
        max_blocks=config.router_max_tree_size,
        prune_target_ratio=config.router_prune_target_ratio,
    )
    if config.kv_events:
        index = NativeBlockIndex()
        ingest = EventIngest(
            index, subscriber, instrumentation, rank_blocks_max=config.router_rank_blocks_max
        )
        return EventCacheView(index, ingest, predicted)
    return PredictedCacheView(predicted)
