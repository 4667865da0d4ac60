"""What a fleet file says of engines that run already, in the words of those who attach them."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvrouter.assembly.attach_words import EngineAt, EngineKind
from kvrouter.assembly.described import numbered_workers, placed_config, tokenizer_folder
from kvrouter.assembly.engine_worker import EngineWorkerSpec
from kvrouter.config import AttachedEngineSpec, FleetFile, MockEngineSpec, ModelSpec, WorkerGroup
from kvrouter.config.engine_checks import url_path
from kvrouter.config.problems import dotted
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import ModelName, WorkerId

ENGINE_WAIT_MAX_S = 86_400
"""How long a worker that is a process of its own waits for its engine before it is started again."""


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


def worker_spec(fleet: FleetFile, line: EngineLine, *, engine_key: str | None) -> EngineWorkerSpec:
    """The worker beside an engine of the file. It waits for its engine for as long as it runs."""
    model = fleet.model_of(line.group)
    return EngineWorkerSpec(
        at=EngineAt(
            kind=EngineKind(line.engine.kind),
            url=line.url,
            role=line.group.role,
            model=model.name,
            block_size=model.mock_block_size if _has_mocks(fleet, model) else model.block_size,
            context_length=said_context_length(fleet, model),
            kv_events=line.engine.kv_events_endpoint,
            kv_events_replay=line.engine.kv_events_replay_endpoint,
            publishes_kv_events=line.engine.kv_events,
            api_key=engine_key,
            wait_s=math.inf,
        ),
        worker_id=line.worker_id,
        tokenizer=_said_folder(fleet, model),
        runtime_config=placed_config(fleet, line.group),
    )


def said_context_length(fleet: FleetFile, model: ModelSpec) -> int | None:
    """Tokens of prompt and answer together that the file says every engine of ``model`` takes."""
    return model.mock_context_length if _has_mocks(fleet, model) else model.context_length


def _said_folder(fleet: FleetFile, model: ModelSpec) -> Path | None:
    said = model.mock_tokenizer if _has_mocks(fleet, model) else model.tokenizer
    return None if said is None else tokenizer_folder(said)


def _has_mocks(fleet: FleetFile, model: ModelSpec) -> bool:
    return any(isinstance(group.engine, MockEngineSpec) for group in fleet.groups_of(model))


def worker_arguments(fleet: FleetFile, line: EngineLine) -> list[str]:
    """The command that runs the worker beside an engine of the file as a process of its own."""
    spec = worker_spec(fleet, line, engine_key=None)
    at, place = spec.at, spec.runtime_config
    given: list[tuple[str, object]] = [
        ("--url", at.url),
        ("--model", at.model),
        ("--role", at.role.value),
        ("--worker-id", spec.worker_id),
        ("--tokenizer", spec.tokenizer),
        ("--block-size", at.block_size),
        ("--context-length", at.context_length),
        ("--kv-events", at.kv_events),
        ("--kv-events-replay", at.kv_events_replay),
        *(("--domain", f"{level}={place.topology_domains[level]}") for level in place.topology_levels
          if level in place.topology_domains),
        *(("--taint", taint) for taint in line.group.taints),
        ("--kv-transfer-domain", place.kv_transfer_domain),
        ("--kv-transfer-enforcement", place.kv_transfer_enforcement),
        ("--kv-transfer-preferred-weight", place.kv_transfer_preferred_weight),
        ("--engine-wait-s", ENGINE_WAIT_MAX_S),
    ]  # fmt: skip
    flags = [text for flag, value in given if value is not None for text in (flag, str(value))]
    return ["worker", at.kind.value, *flags, *([] if at.publishes_kv_events else ["--no-kv-events"])]


def tokenizer_folders(fleet: FleetFile) -> dict[ModelName, Path]:
    """The folders that the file names for models of engines that run already. Raises ConfigError."""
    folders: dict[ModelName, Path] = {}
    for position, model in enumerate(fleet.models):
        is_attached = any(isinstance(each.engine, AttachedEngineSpec) for each in fleet.groups_of(model))
        folder = _said_folder(fleet, model) if is_attached else None
        if folder is None:
            continue
        if not (folder / "tokenizer.json").is_file():
            field = f"models[{position}].tokenizer"
            raise ConfigError(f"{field}: {folder} has no tokenizer.json", param=field)
        folders[ModelName(model.name)] = folder
    return folders
