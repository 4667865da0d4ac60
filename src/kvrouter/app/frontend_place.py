"""The frontend's topology domains: read from topology files like a worker's, and followed while it serves."""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from kvrouter.core.cordon_rules import CLUSTER_LEVEL
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import ModelRuntimeConfig
from kvrouter.router.router_service import RouterService
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Event, log_event
from kvrouter.transports.background import running
from kvrouter.worker.topology import FolderReading, topology_config, wait_for_topology, watch_topology
from kvrouter.worker.topology_env import (
    ENABLED,
    ROUTER_LEVEL,
    TRANSFER_DOMAIN,
    TopologyEnv,
    parse_topology_env,
)

logger = logging.getLogger("kvrouter.frontend")


class FrontendPlace(NamedTuple):
    """A frontend's domains and their topology environment; ``env`` is None where no files are read."""

    domains: Mapping[str, str]
    env: TopologyEnv | None


async def read_place(
    config: KvRouterConfig, environ: Mapping[str, str], *, cluster: str | None = None
) -> FrontendPlace:
    """Return the frontend's domains once the level of ``router_prefill_level`` has a value; at once without
    that setting, or where the level is the cluster and ``cluster`` names the own one.

    Raises ConfigError where topology is off, TopologyUnavailable where the value never came.
    """
    level = config.router_prefill_level
    if level is None:
        return FrontendPlace({}, None)
    if cluster is not None and level.strip() == CLUSTER_LEVEL:
        return FrontendPlace({CLUSTER_LEVEL: cluster}, None)
    # A frontend has no transfer policy: it waits for its own level.
    own = {name: value for name, value in environ.items() if name != TRANSFER_DOMAIN}
    env = parse_topology_env({**own, ROUTER_LEVEL: level})
    if not env.enabled:
        raise ConfigError(
            f"router_prefill_level: the frontend's own {level.strip()} is not known: set {ENABLED} to true "
            "and mount its topology, as for workers",
            param="router_prefill_level",
        )
    reading = await wait_for_topology(env)
    return FrontendPlace(reading.domains, env)


@asynccontextmanager
async def following_place(place: FrontendPlace, service: RouterService) -> AsyncIterator[None]:
    """Pass each change of the frontend's domains to the router."""
    if place.env is None:
        yield
        return

    async def moved(config: ModelRuntimeConfig, warnings: tuple[str, ...]) -> None:
        service.moved(config.topology_domains)
        domains = ",".join(f"{domain}={value}" for domain, value in config.topology_domains.items())
        log_event(logger, Event.FRONTEND_MOVED, domains=domains, reason="; ".join(warnings))

    begun = topology_config(ModelRuntimeConfig(), place.env, FolderReading(place.domains, {}))
    async with running(watch_topology(place.env, begun, moved), name="frontend: follow its place"):
        yield
