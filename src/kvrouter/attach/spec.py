"""The attachment record: what is asked for of an engine's worker, and the card that it publishes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from kvrouter.config import AttachedEngineSpec, FleetFile, WorkerGroup
from kvrouter.config.fleet_checks import url_path
from kvrouter.config.problems import dotted
from kvrouter.core.constraints import adapter_taint
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import EventSource, ModelRuntimeConfig, ModelType, Role, WorkerCard
from kvrouter.engines.attach import Attached, EngineAt, EngineKind
from kvrouter.text.source import is_repository, settled_source
from kvrouter.wiring.fleet_build import numbered_workers, placed_config, said_context_length
from kvrouter.wiring.tls import LOOPBACK
from kvrouter.worker.topology_env import parse_topology_env


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkerSpec:
    """Which worker a process is: its engine, and what no engine knows of itself.

    ``runtime_config`` has its place, its taints and its transfer policy.
    """

    at: EngineAt
    worker_id: WorkerId
    tokenizer: str | None
    runtime_config: ModelRuntimeConfig
    enable_local_indexer: bool = False
    is_standby: bool = False


def engine_card(
    spec: EngineWorkerSpec,
    attached: Attached,
    *,
    incarnation: Epoch,
    address: str,
    namespace: str,
    event_source: EventSource,
    here: str,
) -> WorkerCard:
    """What the worker publishes. ``here`` is the host under which others reach this one."""
    return WorkerCard(
        worker_id=spec.worker_id,
        incarnation=incarnation,
        model=ModelName(attached.model),
        role=spec.at.role,
        block_size=attached.block_size,
        context_length=attached.context_length,
        address=address,
        dp_size=attached.dp_size,
        dp_start=attached.dp_start,
        namespace=namespace,
        component="prefill" if spec.at.role is Role.PREFILL else "backend",
        serves=ModelType.Prefill if spec.at.role is Role.PREFILL else ModelType.Chat | ModelType.Completions,
        publishes_kv_events=attached.publishes_kv_events,
        event_source=event_source,
        tokenizer=tokenizer_of(spec, attached),
        takes_calls=True,
        names=attached.names,
        engine=attached.version,
        runtime_config=replace(
            spec.runtime_config,
            taints=spec.runtime_config.taints
            | {adapter_taint(name) for name in attached.names.values() if name is not None},
            total_kv_blocks=attached.total_kv_blocks,
            enable_local_indexer=spec.enable_local_indexer,
            bootstrap_host=None if attached.bootstrap is None else _reached_at(attached.bootstrap[0], here),
            bootstrap_port=None if attached.bootstrap is None else attached.bootstrap[1],
        ),
    )


def tokenizer_of(spec: EngineWorkerSpec, attached: Attached) -> str | None:
    """What the model is tokenized with: what was said, else the engine's own, where that can be read here.

    It is a folder of this host, or a Hugging Face repository.
    """
    own = attached.tokenizer
    can_be_read = Path(own).is_dir() or is_repository(own)
    source = spec.tokenizer or (own if can_be_read else None)
    return None if source is None else settled_source(source)


def _reached_at(engine_host: str, here: str) -> str:
    """Where others reach an engine's host: its worker may know it by a name that holds on this host alone."""
    return here if engine_host in LOOPBACK else engine_host


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
    """The worker for an engine of the file, which may take ``wait_s`` seconds to answer."""
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
