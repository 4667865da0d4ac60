"""``kvrouter fleet show``: what a fleet file means after defaults, or which workers a running router has."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.api.fleet_schema import Fleet, Worker
from kvrouter.app.fleet_build import stated_context_length
from kvrouter.fleetfile.fleet_checks import settings_in
from kvrouter.fleetfile.fleet_engines import AttachedEngineSpec, MockEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile, LinkSpec, WorkerGroup
from kvrouter.fleetfile.fleet_workers import link_table, numbered_workers
from kvrouter.kernel.topology.link_table import Link
from kvrouter.settings.tree import SETTINGS
from kvrouter.telemetry.joined_workers import ids_text

ASKED = "asked"
"""Stands for a value that the file leaves to the engines, which are asked."""


class ModelShown(msgspec.Struct, frozen=True):
    """A model; None for values that its engines are asked for, or the router does not report."""

    model: str
    tokenizer: str | None
    block_size: int | None
    context_length: int | None
    workers: int


class GroupShown(msgspec.Struct, frozen=True):
    """Workers that are alike. ``kv_tokens`` is the room of one rank; None where its engine is asked."""

    group: str | None
    model: str
    role: str
    worker_ids: tuple[int, ...]
    domains: Mapping[str, str]
    engine: str
    urls: tuple[str, ...]
    ranks: int | None
    kv_tokens: int | None
    taints: tuple[str, ...]
    kv_transfer: str | None


class PlaceShown(msgspec.Struct, frozen=True):
    """A value of a level, and its number of workers of each role."""

    level: str
    value: str
    prefill: int
    decode: int
    both: int


class LinkShown(msgspec.Struct, frozen=True):
    """A link: seconds, bytes a second, and the price of 10⁹ bytes, None if unknown."""

    link: str
    latency_s: float
    bandwidth_bytes_per_s: float
    price_per_gb: float | None


class FleetShown(msgspec.Struct, frozen=True):
    """A fleet. ``settings`` are those that the file sets, by their keys."""

    source: str
    models: tuple[ModelShown, ...]
    groups: tuple[GroupShown, ...]
    places: tuple[PlaceShown, ...]
    kv_transfer: str | None
    links: tuple[LinkShown, ...]
    settings: Mapping[str, object]


def file_shown(source: str, fleet: FleetFile) -> FleetShown:
    """Return the content of a file after defaults."""
    groups = tuple(_groups(fleet))
    policy = fleet.kv_transfer
    return FleetShown(
        source=source,
        models=tuple(
            ModelShown(
                model=fleet.shown_name(model),
                tokenizer=fleet.stated_tokenizer(model),
                block_size=model.mock_block_size if fleet.has_mocks(model) else model.block_size,
                context_length=stated_context_length(fleet, model),
                workers=sum(group.n_workers for group in fleet.groups_of(model)),
            )
            for model in fleet.models
        ),
        groups=groups,
        places=places_of(groups, fleet.topology.levels),
        kv_transfer=None
        if policy is None
        else _policy(policy.enforcement.value, policy.domain, policy.preferred_weight),
        links=tuple(_links(fleet)) if fleet.topology.levels else (),
        settings=_set_in(fleet),
    )


def _groups(fleet: FleetFile) -> Iterable[GroupShown]:
    ids: dict[str, list[int]] = {}
    for worker_id, group in numbered_workers(fleet):
        ids.setdefault(group.name, []).append(worker_id)
    policy = fleet.kv_transfer
    for group in fleet.workers:
        engine, model = group.engine, fleet.model_of(group)
        is_mock = isinstance(engine, MockEngineSpec)
        yield GroupShown(
            group=group.name,
            model=fleet.shown_name(model),
            role=group.role.value,
            worker_ids=tuple(ids[group.name]),
            domains=group.domains,
            engine=engine.kind,
            urls=engine.all_urls if isinstance(engine, AttachedEngineSpec) else (),
            ranks=group.dp_size or (1 if is_mock else None),
            kv_tokens=engine.total_kv_blocks * model.mock_block_size
            if isinstance(engine, MockEngineSpec)
            else None,
            taints=group.taints,
            kv_transfer=_contract(group)
            or (None if policy is None else _policy(policy.enforcement.value, policy.domain, None)),
        )


def _contract(group: WorkerGroup) -> str | None:
    """Return a text on a group with workers that read their place, and their policy, from files."""
    return "from its topology_env" if group.topology_env else None


def _policy(enforcement: str, domain: str, weight: float | None) -> str:
    return f"{enforcement} on {domain}" + ("" if weight is None else f", weight {weight:g}")


def _links(fleet: FleetFile) -> Iterable[LinkShown]:
    table = fleet.topology.link_table
    named: list[tuple[str, LinkSpec | Link]] = [
        (f"within a {level}", link) for level, link in table.within.items()
    ]
    named += [(f"{pair.level} {' – '.join(pair.between)}", pair) for pair in table.pairs]
    for name, link in (*named, ("elsewhere", link_table(fleet).otherwise)):
        yield _link(name, link)


def _link(name: str, link: LinkSpec | Link) -> LinkShown:
    return LinkShown(name, link.latency_s, link.bandwidth_bytes_per_s, link.price_per_gb)


def _set_in(fleet: FleetFile) -> dict[str, object]:
    settings = settings_in(fleet)
    found: dict[str, object] = {}
    for spec in SETTINGS:
        section = getattr(settings, spec.section)
        if spec.name in section.model_fields_set:
            found[spec.yaml_key] = section.model_dump(mode="json", include={spec.name})[spec.name]
    return found


def places_of(groups: Sequence[GroupShown], levels: Sequence[str]) -> tuple[PlaceShown, ...]:
    """Return the number of workers of each role in each place."""
    found = []
    for level in levels:
        for value in sorted({group.domains[level] for group in groups if level in group.domains}):
            there = [group for group in groups if group.domains.get(level) == value]
            counts = {
                role: sum(len(group.worker_ids) for group in there if group.role == role)
                for role in ("prefill", "decode", "both")
            }
            found.append(PlaceShown(level, value, **counts))
    return tuple(found)


def running_shown(source: str, fleet: Fleet) -> FleetShown:
    """Return the workers of a running router, those that are alike together."""
    sizes = {model.model: model.block_size for model in fleet.models}
    alike: list[tuple[GroupShown, list[int]]] = []
    for worker in fleet.workers:
        row = _row_of(worker, sizes.get(worker.model))
        ids = next((ids for other, ids in alike if other == row), None)
        if ids is None:
            alike.append((row, [worker.worker_id]))
        else:
            ids.append(worker.worker_id)
    groups = tuple(msgspec.structs.replace(row, worker_ids=tuple(ids)) for row, ids in alike)
    levels = list(dict.fromkeys(level for worker in fleet.workers for level in worker.levels))
    models = tuple(
        ModelShown(model.model, None, model.block_size, None, model.workers) for model in fleet.models
    )
    return FleetShown(source, models, groups, places_of(groups, levels), None, (), {})


def _row_of(worker: Worker, block_size: int | None) -> GroupShown:
    """Return a worker without its id: workers that are alike are equal."""
    policy = worker.kv_transfer
    total_blocks = worker.ranks[0].total_blocks if worker.ranks else None
    return GroupShown(
        group=None,
        model=worker.model,
        role=worker.role,
        worker_ids=(),
        domains=worker.domains,
        engine=worker.engine or "–",
        urls=(),
        ranks=len(worker.ranks),
        kv_tokens=None if total_blocks is None or block_size is None else total_blocks * block_size,
        taints=tuple(worker.taints),
        kv_transfer=None if policy is None else _policy(policy.enforcement, policy.domain, policy.weight),
    )


def draw_fleet(fleet: FleetShown, console: Console) -> None:
    """Print a fleet as tables: models, workers, their numbers in each place, links, settings."""
    n_workers = sum(len(group.worker_ids) for group in fleet.groups)
    head = f": {n_workers} worker{'' if n_workers == 1 else 's'}"
    if fleet.kv_transfer is not None:
        head += f", KV {fleet.kv_transfer}"
    console.print(Text.assemble((fleet.source, "bold"), head))
    is_file = bool(fleet.groups) and fleet.groups[0].group is not None

    names_model = len(fleet.models) > 1

    def asked(value: object) -> object:
        return ASKED if value is None and is_file else value

    for columns, rows in (
        (
            ("model", "tokenizer", "block size", "context length", "workers"),
            [
                (
                    each.model,
                    *map(asked, (each.tokenizer, each.block_size, each.context_length)),
                    each.workers,
                )
                for each in fleet.models
            ],
        ),
        (_GROUP_COLUMNS, [_group_row(each, asked, names_model=names_model) for each in fleet.groups]),
        (
            ("place", "prefill", "decode", "both"),
            [(f"{each.level} {each.value}", each.prefill, each.decode, each.both) for each in fleet.places],
        ),
        (
            ("link", "latency ms", "GB/s", "price per GB"),
            [
                (each.link, 1e3 * each.latency_s, each.bandwidth_bytes_per_s / 1e9, each.price_per_gb)
                for each in fleet.links
            ],
        ),
        (("setting", "value"), [(key, str(value)) for key, value in fleet.settings.items()]),
    ):
        if rows:
            console.print()
            console.print(_table(columns, rows))


_GROUP_COLUMNS = (
    "group",
    "model",
    "role",
    "workers",
    "ids",
    "place",
    "engine",
    "ranks",
    "KV tokens a rank",
    "taints",
    "KV transfer",
)


def _group_row(
    group: GroupShown, asked: Callable[[object], object], *, names_model: bool
) -> tuple[object, ...]:
    return (
        group.group,
        group.model if names_model else None,
        group.role,
        len(group.worker_ids),
        ids_text(group.worker_ids),
        " ".join(f"{level}={value}" for level, value in group.domains.items()),
        " ".join((group.engine, *group.urls)),
        asked(group.ranks),
        asked(group.kv_tokens),
        " ".join(group.taints),
        group.kv_transfer,
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Return a table; columns without a value in any row are left out."""
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    shown = [at for at in range(len(columns)) if any(row[at] not in (None, "") for row in rows)]
    for at in shown:
        is_number = any(isinstance(row[at], int | float) for row in rows)
        table.add_column(columns[at], justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row[at])) for at in shown))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
