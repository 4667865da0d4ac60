"""The routing settings that placement uses, from the router's settings."""

from collections.abc import Mapping
from pathlib import Path

from kvrouter.core.constraints import NearEnforcement, PdSelection
from kvrouter.core.cost_rules import TIME
from kvrouter.core.errors import ConfigError
from kvrouter.core.timing import Timing
from kvrouter.fleetfile.link_table import links_of_router
from kvrouter.fleetfile.timing_file import read_timing
from kvrouter.kernel.fleet.circuit import CircuitSettings
from kvrouter.kernel.placement.waiting_line import WaitingLimits
from kvrouter.kernel.routing.interface import RoutingSettings, cost_rule
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.kernel.topology.policy import NearFrontend, RouterTopologyDefault
from kvrouter.settings.router_settings import KvRouterConfig


def routing_settings(
    config: KvRouterConfig, links: LinkTable | None, place: Mapping[str, str] | None = None
) -> RoutingSettings:
    """Return the settings of decisions; ``links`` are those of a fleet file, ``place`` the domains of a
    frontend, None without them. Raises ConfigError for an invalid timing or links, and for pairs chosen
    jointly by another cost than time.
    """
    cost, selection = config.cost, config.router_pd_selection
    if selection is PdSelection.JOINT and cost != TIME:
        raise ConfigError(
            f"router_pd_selection: joint compares times: router_cost has to be time, not {cost}",
            param="router_pd_selection",
        )
    default = None
    if config.kv_transfer_topology_level is not None:
        default = RouterTopologyDefault(config.kv_transfer_topology_level, config.kv_transfer_mismatch_policy)
    return RoutingSettings(
        mode=config.router_mode,
        cost=cost,
        cost_reason=config.cost_reason,
        pd_selection=config.router_pd_selection,
        overlap_score_weight=config.overlap_score_weight,
        temperature=config.router_temperature,
        track_active_blocks=config.track_active_blocks,
        track_prefill_tokens=config.track_prefill_tokens,
        active_decode_blocks_threshold=config.active_decode_blocks_threshold,
        active_prefill_tokens_threshold=config.active_prefill_tokens_threshold,
        kv_transfer_weight=config.kv_transfer_weight,
        links=_links(config, links),
        topology_default=default,
        timing=Timing() if config.router_timing is None else _timing(config.router_timing),
        decode_weight=config.router_decode_weight,
        price_weight=config.router_price_weight,
        near=None if place is None else _near(config, place),
        slo_ttft_s=None if config.slo_ttft_ms is None else config.slo_ttft_ms / 1e3,
    )


def _links(config: KvRouterConfig, links: LinkTable | None) -> LinkTable | None:
    """The links of the setting, else the fleet file's, where they are weighed. A cost that learns links
    begins with those that are assumed.
    """
    links = links_of_router(config, links)
    if cost_rule(config.cost).needs.learned:
        return links or LinkTable(assumes_otherwise=True)
    return links if config.kv_transfer_weight > 0.0 else None


def _near(config: KvRouterConfig, place: Mapping[str, str]) -> NearFrontend | None:
    if config.router_prefill_level is None:
        return None
    level = config.router_prefill_level.strip()
    is_required = config.router_prefill_enforcement is NearEnforcement.REQUIRED
    return NearFrontend(level, place.get(level), is_required, config.router_prefill_weight)


def _timing(path: str) -> Timing:
    try:
        return read_timing(Path(path))
    except ConfigError as error:
        raise ConfigError(f"router_timing: {error.message}", param="router_timing") from error


def circuit_settings(config: KvRouterConfig) -> CircuitSettings:
    """Return when a failing worker is skipped, and for how long."""
    return CircuitSettings(config.circuit_failures, config.circuit_open_s, config.circuit_open_max_s)


def waiting_limits(config: KvRouterConfig) -> WaitingLimits:
    """Return how many requests may wait for a worker, and for how long."""
    return WaitingLimits(
        admission_places_max=config.admission_queue_max,
        admission_wait_s=config.admission_wait_s,
        domain_wait_s=config.router_domain_wait_s,
        policy=config.router_queue_policy,
        request_timeout_s=config.request_timeout_s,
    )
