"""What a fleet file says of engines that run already, in the words of those who attach them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvrouter.assembly.attach_words import EngineAt, EngineKind
from kvrouter.assembly.described import (
    numbered_workers,
    placed_config,
    said_context_length,
)
from kvrouter.assembly.engine_worker import EngineWorkerSpec
from kvrouter.config import AttachedEngineSpec, FleetFile, WorkerGroup
from kvrouter.config.engine_checks import url_path
from kvrouter.config.problems import dotted
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.worker.topology_env import parse_topology_env


class EngineLine(NamedTuple):
    """One engine of the file, and where the file names it."""

    worker_id: WorkerId
    group: WorkerGroup
    engine: AttachedEngineSpec
    url: str
    at: str
    """As ``workers[0].engine.url``."""


def engine_lines(fleet: FleetFile) -> Iterator[EngineLine]:
    """Every engine of the file that runs already."""
    seen = Counter[str]()
    for worker_id, group in numbered_workers(fleet):
        if isinstance(group.engine, AttachedEngineSpec):
            number = seen[group.name]
            seen[group.name] += 1
            at = dotted(url_path(fleet.workers.index(group), group.engine, number))
            yield EngineLine(worker_id, group, group.engine, group.engine.all_urls[number], at)


def worker_spec(
    fleet: FleetFile, line: EngineLine, *, engine_key: str | None, wait_s: float
) -> EngineWorkerSpec:
    """The worker beside an engine of the file, which may take ``wait_s`` seconds to answer."""
    model = fleet.model_of(line.group)
    return EngineWorkerSpec(
        at=EngineAt(
            kind=EngineKind(line.engine.kind),
            url=line.url,
            role=line.group.role,
            model=model.name,
            block_size=model.mock_block_size if fleet.has_mocks(model) else model.block_size,
            context_length=said_context_length(fleet, model),
            kv_events=line.engine.kv_events_endpoint,
            kv_events_replay=line.engine.kv_events_replay_endpoint,
            publishes_kv_events=line.engine.kv_events,
            api_key=engine_key,
            wait_s=wait_s,
        ),
        worker_id=line.worker_id,
        tokenizer=fleet.said_tokenizer(model),
        runtime_config=placed_config(fleet, line.group),
    )


def pick_engine(fleet: FleetFile, kind: str, *, group: str | None, index: int) -> EngineLine:
    """Return engine ``index`` of a group of engines of this kind. Raises ConfigError that names the flag."""
    lines = [line for line in engine_lines(fleet) if line.engine.kind == kind]
    names = list(dict.fromkeys(line.group.name for line in lines))
    if not names:
        raise ConfigError(f"--fleet: the file has no engines of kind {kind!r}", param="fleet")
    if group is None and len(names) > 1:
        raise ConfigError(f"--group: must be one of {', '.join(names)}", param="group")
    if group is not None and group not in names:
        raise ConfigError(f"--group: must be one of {', '.join(names)}, not {group!r}", param="group")
    found = [line for line in lines if line.group.name == (group or names[0])]
    if not 0 <= index < len(found):
        raise ConfigError(
            f"--index: group {found[0].group.name!r} has engines 0 to {len(found) - 1}, not {index}",
            param="index",
        )
    return found[index]


def worker_environ(line: EngineLine, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a worker process: its own topology contract, else that of its group."""
    own = parse_topology_env(environ)
    contract = {str(name): value for name, value in line.group.topology_env.items()}
    return environ if own.enabled else {**environ, **contract}
