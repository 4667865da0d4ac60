"""What the engines of a fleet file must say together: where each is, and that they understand each other."""

from collections.abc import Iterator

from kvrouter.config.fleet import FleetFile, WorkerGroup
from kvrouter.config.fleet_engines import AttachedEngineSpec, MockEngineSpec
from kvrouter.config.problems import Path, Problem, dotted
from kvrouter.core.workers import Role


def engine_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Yield what is wrong with engines that run already; the names of models must be good."""
    first_at: dict[str, Path] = {}
    for position, group in enumerate(fleet.workers):
        engine, path = group.engine, ("workers", position, "engine")
        if not isinstance(engine, AttachedEngineSpec):
            continue
        yield from _place_problems(engine, path)
        yield from _event_problems(engine, path)
        if group.replicas is not None and group.replicas != max(1, group.n_workers):
            must = f"must be the number of engines ({group.n_workers}) or be left out, not {group.replicas}"
            yield Problem(("workers", position, "replicas"), must)
        for number, url in enumerate(engine.all_urls):
            at = url_path(position, engine, number)
            if url in first_at:
                yield Problem(at, f"must be unique: {url} is {dotted(first_at[url])}")
            first_at.setdefault(url, at)


def url_path(position: int, engine: AttachedEngineSpec, number: int) -> Path:
    """Where the URL of the group's engine ``number``, from 0, stands."""
    path = ("workers", position, "engine")
    return (*path, "url") if engine.urls is None else (*path, "urls", number)


def _place_problems(engine: AttachedEngineSpec, path: Path) -> Iterator[Problem]:
    if engine.url is None and engine.urls is None:
        yield Problem((*path, "url"), "is required: where the engine's server is, as http://HOST:PORT")
    if engine.url is not None and engine.urls is not None:
        yield Problem((*path, "urls"), "contradicts url: give one of the two")


def _event_problems(engine: AttachedEngineSpec, path: Path) -> Iterator[Problem]:
    if engine.kv_events_endpoint is None:
        if engine.kv_events_replay_endpoint is not None:
            yield Problem((*path, "kv_events_replay_endpoint"), "only together with kv_events_endpoint")
        return
    at = (*path, "kv_events_endpoint")
    if not engine.kv_events:
        yield Problem(at, "contradicts kv_events: false")
    if engine.urls is not None:
        yield Problem(at, "is one engine's, and urls are several: leave it out, or make a group of each")


def pair_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Yield pairs that could not hand KV on: engines of one kind understand each other, and nobody else."""
    for model in fleet.models:
        groups = fleet.groups_of(model)
        prefill = next((group for group in groups if group.role is Role.PREFILL), None)
        if prefill is None:
            continue
        for group in groups:
            if group.engine.kind != prefill.engine.kind:
                must = (
                    f"must be {prefill.engine.kind!r}, not {group.engine.kind!r}: {prefill.name!r} prefills "
                    f"for {model.name!r}, and KV goes between engines of one kind"
                )
                yield Problem(("workers", fleet.workers.index(group), "engine", "kind"), must)


def engine_warnings(fleet: FleetFile) -> Iterator[str]:
    """Yield what can be run and was hardly meant."""
    for group in fleet.workers:
        yield from _group_warnings(fleet, group)
    for model in fleet.models:
        kinds = {group.engine.kind for group in fleet.groups_of(model)}
        if "mock" in kinds and len(kinds) > 1:
            yield (
                f"model {model.name!r} has mock engines beside others: its calls reach nobody as they were "
                "written, and tools, grammars and log probabilities are refused"
            )


def _group_warnings(fleet: FleetFile, group: WorkerGroup) -> Iterator[str]:
    model, engine = fleet.model_of(group), group.engine
    if isinstance(engine, MockEngineSpec):
        room_tokens = engine.total_kv_blocks * model.mock_block_size
        if room_tokens < model.mock_context_length:
            yield (
                f"group {group.name!r} has room for {room_tokens} tokens, "
                f"less than the context length of {model.name!r} ({model.mock_context_length})"
            )
    if not engine.kv_events and fleet.router.kv_events:
        yield f"group {group.name!r} publishes no KV events: the router takes its caches for empty"
