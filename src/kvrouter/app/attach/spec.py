"""Attach specs: what a fleet file asks of each engine, and the card that the engine's worker publishes."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from msgspec.structs import replace

from kvrouter.app.fleet_build import stated_context_length
from kvrouter.core.errors import ConfigError
from kvrouter.core.hosts import LOOPBACK
from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.secret import secret_file, secret_variable
from kvrouter.core.taints import adapter_taints
from kvrouter.core.workers import EventSource, ModelType, Role, WorkerCard, component_of
from kvrouter.engines.attach import Attached, AttachSpec
from kvrouter.fleetfile.fleet_checks import url_path
from kvrouter.fleetfile.fleet_engines import AttachedEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile, WorkerGroup
from kvrouter.fleetfile.fleet_workers import numbered_workers, placed_config
from kvrouter.settings.problems import FieldPlace, dotted
from kvrouter.settings.problems import Path as FieldPath
from kvrouter.settings.setting import installed_version
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE
from kvrouter.text.source import settled_source
from kvrouter.worker.topology_env import parse_topology_env


def engine_card(
    spec: AttachSpec,
    attached: Attached,
    *,
    incarnation: Epoch,
    address: str,
    namespace: str,
    event_source: EventSource,
    here: str,
) -> WorkerCard:
    """The card of an attached worker. ``here`` is the host name under which other hosts reach this one."""
    return WorkerCard(
        worker_id=spec.worker_id,
        incarnation=incarnation,
        model=ModelName(attached.model),
        role=spec.role,
        block_size=attached.block_size,
        context_length=attached.context_length,
        address=address,
        dp_size=attached.dp_size,
        dp_start=attached.dp_start,
        namespace=namespace,
        component=component_of(spec.role, spec.component),
        serves=ModelType.Prefill if spec.role is Role.PREFILL else ModelType.Chat | ModelType.Completions,
        publishes_kv_events=attached.publishes_kv_events,
        event_source=event_source,
        tokenizer=tokenizer_of(spec, attached),
        takes_calls=True,
        names=attached.names,
        engine=attached.version,
        engine_start=attached.start,
        pod=spec.pod,
        node=spec.node,
        decode_only=attached.decode_only,
        ends_after_transfer=attached.ends_after_transfer,
        bidirectional_kv=attached.bidirectional_kv,
        engine_url=without_credentials(spec.url),
        version=installed_version(),
        runtime_config=replace(
            spec.runtime_config,
            taints=spec.runtime_config.taints | adapter_taints(attached.names.values()),
            kv_format=spec.runtime_config.kv_format.over(attached.kv_format),
            total_kv_blocks=attached.total_kv_blocks,
            enable_local_indexer=spec.enable_local_indexer,
            bootstrap_host=None if attached.bootstrap is None else _reached_at(attached.bootstrap[0], here),
            bootstrap_port=None if attached.bootstrap is None else attached.bootstrap[1],
        ),
    )


def without_credentials(url: str) -> str:
    """Return an engine's URL without user, password and query, for publication."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def tokenizer_of(spec: AttachSpec, attached: Attached) -> str | None:
    """The model's tokenizer: the configured one, else the engine's own; None where neither is named. It is a
    folder of this host or a Hugging Face repository; the engine's own may be a folder of its host only.
    """
    source = spec.tokenizer or attached.tokenizer
    if not source:
        return None
    is_here = spec.tokenizer is not None or Path(source).is_dir()
    return settled_source(source) if is_here else source


def _reached_at(engine_host: str, here: str) -> str:
    """The host under which others reach an engine whose worker may know it by a loopback name."""
    return here if engine_host in LOOPBACK else engine_host


class FileEngine(NamedTuple):
    """One engine of a fleet file, without its key, and its group."""

    group: WorkerGroup
    spec: AttachSpec

    def with_key(self, environ: Mapping[str, str]) -> AttachSpec:
        """Return the spec with the engine's key. Raises ConfigError for a key that cannot be read."""
        engine = self.group.engine
        if not isinstance(engine, AttachedEngineSpec):
            raise TypeError("a mock engine asks for no key")
        return with_key(self.spec, engine, environ)


def with_key(spec: AttachSpec, engine: AttachedEngineSpec, environ: Mapping[str, str]) -> AttachSpec:
    """Return ``spec`` with the engine's own key where one is configured, else the key of all engines, if any.

    Raises ConfigError that names the field or the variable.
    """
    if engine.api_key_file is not None:
        key = secret_file(Path(engine.api_key_file), spec.fields_at["api_key_file"])
        return dataclasses.replace(spec, api_key=key, key_at=engine.api_key_file)
    variable = engine.api_key_env or ENGINE_KEY_VARIABLE
    found = secret_variable(environ, variable)
    if found is None and engine.api_key_env is not None:
        must = f"the variable {variable} is unset or empty"
        raise ConfigError(f"{spec.fields_at['api_key_env']}: {must}", param="api_key_env")
    return dataclasses.replace(spec, api_key=found, key_at=variable)


def file_engines(fleet: FleetFile, place: FieldPlace = dotted) -> Iterator[FileEngine]:
    """Yield every engine of the file that already runs. ``place(path)`` names where a field is written."""
    counts = Counter[str]()
    for worker_id, group in numbered_workers(fleet):
        if not isinstance(group.engine, AttachedEngineSpec):
            continue
        number = counts[group.name]
        counts[group.name] += 1
        position = fleet.workers.index(group)
        model: FieldPath = ("models", fleet.models.index(fleet.model_of(group)))
        line: FieldPath = ("workers", position)
        fields: dict[str, FieldPath] = {
            "model": (*model, "name"),
            "tokenizer": (*model, "tokenizer"),
            "block_size": (*model, "block_size"),
            "context_length": (*model, "context_length"),
            "role": (*line, "role"),
            "dp_size": (*line, "dp_size"),
            "kind": (*line, "engine", "kind"),
            "api_key_env": (*line, "engine", "api_key_env"),
            "api_key_file": (*line, "engine", "api_key_file"),
            "kv_events": (*line, "engine", "kv_events_endpoint"),
            "kv_events_replay": (*line, "engine", "kv_events_replay_endpoint"),
        }
        spec = attach_spec(
            fleet,
            group,
            group.engine,
            worker_id=worker_id,
            url=group.engine.all_urls[number],
            written_at=place(url_path(position, group.engine, number)),
            fields_at={name: place(path) for name, path in fields.items()},
        )
        yield FileEngine(group, spec)


def attach_spec(
    fleet: FleetFile,
    group: WorkerGroup,
    engine: AttachedEngineSpec,
    *,
    worker_id: WorkerId,
    url: str,
    written_at: str,
    fields_at: Mapping[str, str],
) -> AttachSpec:
    """Return the attach spec of one engine of a group."""
    model = fleet.model_of(group)
    return AttachSpec(
        kind=engine.kind,
        url=url,
        worker_id=worker_id,
        role=group.role,
        model=fleet.stated_name(model),
        tokenizer=fleet.stated_tokenizer(model),
        block_size=model.mock_block_size if fleet.has_mocks(model) else model.block_size,
        context_length=stated_context_length(fleet, model),
        dp_size=group.dp_size,
        kv_events=engine.kv_events_endpoint,
        kv_events_replay=engine.kv_events_replay_endpoint,
        publishes_kv_events=engine.kv_events,
        runtime_config=placed_config(fleet, group),
        written_at=written_at,
        fields_at=fields_at,
    )


def pick_engine(engines: Iterable[FileEngine], kind: str, *, group: str | None, index: int) -> FileEngine:
    """Return engine ``index`` of a group of engines of this kind. Raises ConfigError that names the flag."""
    of_kind = [engine for engine in engines if engine.spec.kind == kind]
    names = list(dict.fromkeys(engine.group.name for engine in of_kind))
    if not names:
        raise ConfigError(f"--fleet: the file has no engines of kind {kind!r}", param="fleet")
    if group is None and len(names) > 1:
        raise ConfigError(f"--group: must be one of {', '.join(names)}", param="group")
    if group is not None and group not in names:
        raise ConfigError(f"--group: must be one of {', '.join(names)}, not {group!r}", param="group")
    found = [engine for engine in of_kind if engine.group.name == (group or names[0])]
    if not 0 <= index < len(found):
        raise ConfigError(
            f"--index: group {found[0].group.name!r} has engines 0 to {len(found) - 1}, not {index}",
            param="index",
        )
    return found[index]


def worker_environ(group: WorkerGroup, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a worker process, with the topology variables of its group unless it has its own."""
    own = parse_topology_env(environ)
    variables = {str(name): value for name, value in group.topology_env.items()}
    return environ if own.enabled else {**environ, **variables}
