"""The arms of a bench, and what the router says of its engines: asked before anything is sent."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvrouter.api.client import RouterClient, decode_answer
from kvrouter.api.fleet_schema import Fleet, Model, Worker
from kvrouter.cli.bench.flags import BenchOptions
from kvrouter.cli.bench.load import Arm
from kvrouter.cli.bench.workload import ANSWER_TOKENS, Caches
from kvrouter.cli.doctor.diagnosis import reached_at
from kvrouter.cli.doctor.reading import counted
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.engines.openai.server import EngineServer
from kvrouter.fleetfile.fleet_engines import url_mistake
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE

OURS = "kvrouter"
ROUND_ROBIN = "round-robin"

WHERE_ENGINES_ARE = f"--engine-url says where it is, {ENGINE_KEY_VARIABLE} its key"


class BenchedFleet(NamedTuple):
    """What a router reports of one model's workers. ``engine_urls`` is empty where round-robin cannot send
    straight to the engines, and ``why_through`` is then the reason. ``notes`` are lines for the user.
    """

    model: str
    engines: int
    caches: Caches
    concurrency: int
    engine_urls: tuple[str, ...]
    why_through: str | None
    is_separate: bool
    """Whether prefill and decode are different workers: an answer then counts what decode had cached."""

    running_requests: int
    is_by_load: bool
    notes: tuple[str, ...]


def read_fleet(client: RouterClient, options: BenchOptions) -> BenchedFleet:
    """Ask a router for the workers of the model. Raises AskFailed, and ConfigError, which names the
    flag.
    """
    name = options.model or client.only_model()
    fleet = decode_answer(client.fleet(), Fleet)
    model = next((each for each in fleet.models if each.model == name), None)
    if model is None:
        served = ", ".join(each.model for each in fleet.models) or "no model"
        raise ConfigError(f"--model: {client.url} serves {served}, not {name!r}", param="model")
    workers = [worker for worker in fleet.workers_of(model) if worker.takes_requests]
    if not workers:
        raise ConfigError(f"--url: no worker of {name} at {client.url} takes requests", param="url")
    if fleet.running_requests and not options.yes:
        raise ConfigError(
            f"--yes: is needed, since {counted(fleet.running_requests, 'request')} of others run at "
            f"{client.url}: a bench makes them slower, and takes room in caches from their prompts",
            param="yes",
        )
    is_separate = any(not worker.prefills or not worker.decodes for worker in workers)
    urls, why = _given_urls(options, workers, client.url), None
    if not urls:
        urls, why = ((), "prefill and decode are separate") if is_separate else _urls_of(workers, client.url)
    caches = _caches(model, workers)
    return BenchedFleet(
        model=name,
        engines=len(workers),
        caches=caches,
        concurrency=options.concurrency or caches.number,
        engine_urls=urls,
        why_through=why,
        is_separate=is_separate,
        running_requests=fleet.running_requests,
        is_by_load=model.routing_reason is not None or model.router_mode not in ("", "kv"),
        notes=tuple(_notes(model)),
    )


def _given_urls(options: BenchOptions, workers: Sequence[Worker], router_url: str) -> tuple[str, ...]:
    """Return the URLs of --engine-url. Raises ConfigError unless there is one for each engine: both arms use
    the same caches.
    """
    urls = tuple(dict.fromkeys(options.engine_urls))
    for url in urls:
        _check_url("engine-url", url, router_url)
    n_engines = len(_urls_of(workers, router_url)[0]) or len(workers)
    if urls and len(urls) != n_engines:
        raise ConfigError(
            f"--engine-url: {len(urls)} given, and the router has {counted(n_engines, 'engine')}: give it "
            "once for each (--peer takes a server that is before all of them)",
            param="engine-url",
        )
    return urls


def _urls_of(workers: Sequence[Worker], router_url: str) -> tuple[tuple[str, ...], str | None]:
    urls: list[str] = []
    for worker in workers:
        if worker.engine_url is None:
            return (), "the router says no URL of its engines (mock engines have none)"
        try:
            urls.append(reached_at(worker.engine_url, worker.address, router_url))
        except KvrouterError as error:
            return (), f"{error.message} ({WHERE_ENGINES_ARE})"
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
        yield f"the router routes {model.model} by load and text, not by caches: {model.routing_reason}"
    elif model.router_mode not in ("", "kv"):
        yield f"the router's mode is {model.router_mode}, which does not look at caches (--router-mode kv)"
    elif not model.indexes_events:
        yield "the router has no KV events of its engines: it guesses what is cached from what it sent"


def _check_url(flag: str, url: str, router_url: str) -> None:
    mistake = url_mistake(url)
    if mistake is None and url.rstrip("/") == router_url.rstrip("/"):
        mistake = "is the router itself (--url)"
    if mistake is not None:
        raise ConfigError(f"--{flag}: {url}: {mistake}", param=flag)


def peers_of(options: BenchOptions, router_url: str) -> dict[str, str]:
    """Return the URLs of peers by name. Raises ConfigError."""
    found: dict[str, str] = {}
    for peer in options.peers:
        name, equals, url = peer.partition("=")
        if not equals or not name:
            raise ConfigError(f"--peer: must be NAME=URL, not {peer!r}", param="peer")
        if name in (OURS, ROUND_ROBIN, *found):
            raise ConfigError(f"--peer: {name!r} is another arm's name already", param="peer")
        _check_url("peer", url, router_url)
        found[name] = url
    return found


def arms_of(
    fleet: BenchedFleet, options: BenchOptions, router_url: str, peers: Mapping[str, str], api_key: str | None
) -> list[Arm]:
    """Return the arms: ours, round-robin, peers. Their servers are not open yet. ``api_key`` is sent to the
    URLs of flags alone, and not where a router's answer points to.
    """
    fields = {"model": fleet.model, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    ours = Arm(OURS, f"through {router_url}", (EngineServer(router_url),), fields, "--url")
    round_robin = through_router(ours, fleet.why_through)
    if fleet.engine_urls:
        key = api_key if options.engine_urls else None
        servers = tuple(EngineServer(url, api_key=key) for url in fleet.engine_urls)
        via = f"straight to {counted(len(servers), 'engine')}, in turn"
        flag = "--engine-url" if options.engine_urls else "--url"
        round_robin = Arm(ROUND_ROBIN, via, servers, fields, flag)
    others = (
        Arm(name, f"through {url}", (EngineServer(url, api_key=api_key),), fields, "--peer")
        for name, url in peers.items()
    )
    return [ours, round_robin, *others]


def through_router(ours: Arm, why: str | None) -> Arm:
    """Return the arm of round-robin that the router itself does."""
    override = {"nvext": {"router_config_override": {"router_mode": "round-robin"}}}
    via = f"{ours.via} in its mode round-robin, because {why}"
    return ours._replace(name=ROUND_ROBIN, via=via, fields={**ours.fields, **override})
