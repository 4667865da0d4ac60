"""The arms of a bench, and what the router says of its engines: asked before anything is sent."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from kvrouter.api.client import RouterClient, decode_answer
from kvrouter.api.fleet_schema import Fleet, Model, Worker
from kvrouter.api.health_schema import ModelList
from kvrouter.cli.bench.flags import BenchOptions
from kvrouter.cli.bench.load import Arm
from kvrouter.cli.bench.workload import Caches
from kvrouter.cli.doctor.diagnosis import reached_at
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.engines.attach import KeyRefused
from kvrouter.engines.openai.server import EngineServer
from kvrouter.fleetfile.fleet_engines import url_mistake
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE

OURS = "kvrouter"
ROUND_ROBIN = "round-robin"

MODELS = "/v1/models"

SLOW, SLOW_SHOWN = 1.25, 3
"""Workers that are so many times as slow as the fastest one are named, and so many of them."""


class BenchedFleet(NamedTuple):
    """What a router says of one model's workers. ``engine_urls`` are empty where round-robin cannot go
    straight to them, ``why_through`` says why not. ``notes`` are lines for the user.
    """

    model: str
    engines: int
    caches: Caches
    engine_urls: tuple[str, ...]
    why_through: str | None
    running_requests: int
    is_by_load: bool
    notes: tuple[str, ...]


def read_fleet(client: RouterClient, options: BenchOptions) -> BenchedFleet:
    """Ask a router for the workers of the model. Raises AskFailed, and ConfigError that names the flag."""
    name = options.model or client.only_model()
    fleet = decode_answer(client.fleet(), Fleet)
    model = next((each for each in fleet.models if each.model == name), None)
    if model is None:
        served = ", ".join(each.model for each in fleet.models) or "no model"
        raise ConfigError(f"--model: {client.url} serves {served}, not {name!r}", param="model")
    workers = [worker for worker in fleet.workers_of(model) if worker.takes_requests]
    if not workers:
        raise ConfigError(f"--url: no worker of {name} at {client.url} takes requests", param="url")
    urls, why = tuple(options.engine_urls), None
    for url in urls:
        _check_url("--engine-url", url)
    if not urls:
        urls, why = _urls_of(workers, client.url)
    return BenchedFleet(
        model=name,
        engines=len(workers),
        caches=_caches(model, workers),
        engine_urls=urls,
        why_through=why,
        running_requests=fleet.running_requests,
        is_by_load=model.routing_reason is not None or model.router_mode not in ("", "kv"),
        notes=tuple(_notes(model)),
    )


def slow_workers(fleet: Fleet, model: str) -> Sequence[str]:
    """Return a line for each worker that a router takes for slower than the fastest one, slowest first."""
    slowness = {
        str(worker): max(rank.speed.slowness for rank in worker.ranks if rank.speed is not None)
        for worker in fleet.workers
        if worker.model == model and any(rank.speed is not None for rank in worker.ranks)
    }
    fastest = min(slowness.values(), default=1.0)
    slow = sorted(slowness, key=lambda worker: -slowness[worker])[:SLOW_SHOWN]
    return [
        f"the router takes {worker} for {slowness[worker] / fastest:.1f} times as slow as the fastest one: "
        "it sends fewer requests there, and the other caches have more to hold"
        for worker in slow
        if slowness[worker] >= SLOW * fastest
    ]


def _urls_of(workers: Sequence[Worker], router_url: str) -> tuple[tuple[str, ...], str | None]:
    if any(not worker.prefills or not worker.decodes for worker in workers):
        return (), "prefill and decode are separate"
    known = [(worker.engine_url, worker.address) for worker in workers]
    urls: list[str] = []
    for engine_url, address in known:
        if engine_url is None:
            return (), "the router says no URL of its engines (mock engines have none)"
        try:
            urls.append(reached_at(engine_url, address, router_url))
        except KvrouterError as error:
            return (
                (),
                f"an engine cannot be reached from here ({error.message}; --engine-url says where it is)",
            )
    return tuple(dict.fromkeys(urls)), None


def _caches(model: Model, workers: Iterable[Worker]) -> Caches:
    prefilling = [worker for worker in workers if worker.prefills]
    sizes = [
        None if rank.total_blocks is None else rank.total_blocks * (worker.block_size or model.block_size)
        for worker in prefilling
        for rank in worker.ranks
    ]
    contexts = [worker.context_length for worker in prefilling if worker.context_length is not None]
    known = [size for size in sizes if size]
    return Caches(
        number=max(1, len(sizes)),
        cache_tokens=min(known) if known and len(known) == len(sizes) else None,
        context_tokens=min(contexts, default=None),
        block_size=model.block_size,
    )


def _notes(model: Model) -> Iterable[str]:
    if model.routing_reason is not None:
        yield f"the router routes {model.model} by load alone, not by cached tokens: {model.routing_reason}"
    elif model.router_mode not in ("", "kv"):
        yield f"the router's mode is {model.router_mode}, which does not look at caches (--router-mode kv)"
    elif not model.indexes_events:
        yield "the router has no KV events of its engines: it guesses what is cached from what it sent"


def _check_url(flag: str, url: str) -> None:
    mistake = url_mistake(url)
    if mistake is not None:
        raise ConfigError(f"{flag}: {url}: {mistake}", param=flag.removeprefix("--"))


def peers_of(options: BenchOptions) -> dict[str, str]:
    """Return the URLs of peers by name. Raises ConfigError."""
    found: dict[str, str] = {}
    for peer in options.peers:
        name, equals, url = peer.partition("=")
        if not equals or not name:
            raise ConfigError(f"--peer: must be NAME=URL, not {peer!r}", param="peer")
        if name in (OURS, ROUND_ROBIN, *found):
            raise ConfigError(f"--peer: {name!r} is another arm's name already", param="peer")
        _check_url("--peer", url)
        found[name] = url
    return found


def arms_of(
    fleet: BenchedFleet, router_url: str, peers: Mapping[str, str], api_key: str | None
) -> tuple[Arm, ...]:
    """Return the arms, ours first. Their servers are not open yet."""
    ours = EngineServer(router_url)
    arms = [Arm(OURS, f"through {router_url}", (ours,), {}, "--url")]
    if fleet.engine_urls:
        servers = tuple(EngineServer(url, api_key=api_key) for url in fleet.engine_urls)
        via = f"straight to {len(servers)} {'engine' if len(servers) == 1 else 'engines'}, in turn"
        arms.append(Arm(ROUND_ROBIN, via, servers, {}, "--engine-url"))
    else:
        override = {"nvext": {"router_config_override": {"router_mode": "round-robin"}}}
        via = f"through {router_url} in its mode round-robin, because {fleet.why_through}"
        arms.append(Arm(ROUND_ROBIN, via, (ours,), override, "--url"))
    arms += [
        Arm(name, f"through {url}", (EngineServer(url, api_key=api_key),), {}, "--peer")
        for name, url in peers.items()
    ]
    return tuple(arms)


async def reached_engines(fleet: BenchedFleet, options: BenchOptions, api_key: str | None) -> BenchedFleet:
    """Return the fleet, without the engines' URLs where the router says them and one does not answer here.
    Raises ConfigError for those that --engine-url gives.
    """
    try:
        for url in fleet.engine_urls:
            async with AsyncExitStack() as stack:
                server = EngineServer(url, api_key=api_key)
                await server.open()
                stack.push_async_callback(server.close)
                await _check_engine(server, fleet.model)
    except ConfigError as error:
        if options.engine_urls:
            raise
        return fleet._replace(engine_urls=(), why_through=error.message)
    return fleet


async def _check_engine(server: EngineServer, model: str) -> None:
    """Raise ConfigError for an engine that does not answer, or serves other models."""
    try:
        page = await server.look(MODELS)
        served = [] if page is None else decode_answer(page, ModelList).data
    except KeyRefused as error:
        raise ConfigError(
            f"--engine-url: {error.message}: give its key in {ENGINE_KEY_VARIABLE}", param="engine-url"
        ) from error
    except KvrouterError as error:
        raise ConfigError(f"--engine-url: {error.message}", param="engine-url") from error
    names = [each.id for each in served]
    if names and model not in names:
        raise ConfigError(
            f"--engine-url: {server.url} serves {', '.join(names)}, not {model!r}", param="engine-url"
        )
