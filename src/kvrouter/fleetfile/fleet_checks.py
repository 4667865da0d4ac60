"""Checks of a fleet file as a whole: names that refer to each other, domains, models, engines."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path as FilePath
from typing import NamedTuple

from pydantic import ValidationError

from kvrouter.core.constraints import PdSelection
from kvrouter.core.cost_rules import TIME
from kvrouter.core.taints import RESERVED
from kvrouter.core.workers import Enforcement, Role
from kvrouter.fleetfile.fleet_engines import AttachedEngineSpec, MockEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile, WorkerGroup
from kvrouter.fleetfile.fleet_workers import link_table
from kvrouter.fleetfile.link_table import links_of_router, unbound_blocks
from kvrouter.kernel.topology.policy import MismatchPolicy
from kvrouter.settings.problems import (
    Document,
    Path,
    Problem,
    config_error,
    did_you_mean,
    dotted,
    innermost,
    parse_document,
    problem_of,
    raise_problems,
)
from kvrouter.settings.tree import Settings

ENTRY_SECTIONS = ("models", "workers")
"""Sections that are lists of named entries."""

ANY = -1
"""Stands for every entry of a section in the paths that a check depends on."""


class FleetRest(NamedTuple):
    """``fleet`` without the values at ``mistaken``, which defaults or placeholders replace."""

    fleet: FleetFile
    mistaken: frozenset[Path]

    def can_judge(self, depends_on: Sequence[Path]) -> bool:
        """Whether a check of these paths of the file would read only values that its owner wrote."""
        return not any(_touches(mistake, path) for mistake in self.mistaken for path in depends_on)


def validated(content: Mapping[str, object]) -> tuple[FleetRest | None, list[Problem]]:
    """Return the rest of a file without its mistaken values, None if it is too little, and the mistakes.

    Some of them are found only once others are removed: of two keys of one section that contradict two
    others, the validation names one pair.
    """
    problems: list[Problem] = []
    units: frozenset[Path] = frozenset()
    rest = dict(content)
    while True:
        try:
            return FleetRest(FleetFile.model_validate(rest), units), problems
        except ValidationError as error:
            found = innermost([problem_of(item, FleetFile) for item in error.errors()])
        new = [problem for problem in found if _unit(problem.path) not in units]
        if not new:
            return None, problems  # what is wrong now follows from what was taken out
        problems += new
        units |= {_unit(problem.path) for problem in new}
        rest = copy.deepcopy(dict(content))
        for unit in units:
            _take_out(rest, unit)


def _unit(path: Path) -> Path:
    """Return the part of the file that a mistake spoils: a key of an entry or section, or a link."""
    if path[:2] == ("topology", "links"):
        return path[:4] if path[2:3] == ("within",) else path[:3]
    return path[:3] if path and path[0] in ENTRY_SECTIONS else path[:2]


def _take_out(rest: dict[str, object], unit: Path) -> None:
    section = rest.get(str(unit[0]))
    if len(unit) == 3 and isinstance(section, list):
        number, key = unit[1], unit[2]
        entry = section[number] if isinstance(number, int) else None
        if isinstance(entry, dict) and key == "name":
            entry["name"] = f"unnamed-{number}"
        elif isinstance(entry, dict):
            entry.pop(key, None)
    elif len(unit) == 2 and isinstance(section, list) and isinstance(unit[1], int):
        section[unit[1]] = {"name": f"unnamed-{unit[1]}"}
    elif unit == ("version",):
        rest["version"] = 1
    else:
        around: object = rest
        for key in unit[:-1]:
            around = around.get(str(key)) if isinstance(around, dict) else None
        if isinstance(around, dict):
            around.pop(unit[-1], None)


def _touches(mistake: Path, path: Path) -> bool:
    return all(mine in (its, ANY) for its, mine in zip(mistake, path, strict=False))


def entries(section: str, *keys: str) -> Iterator[Path]:
    """The paths of these keys in every entry of ``section``."""
    for key in keys:
        yield section, ANY, key


def engine_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Yield the problems of running engines; the names of models must be good."""
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
    """Return the path of the URL of the group's engine ``number``, from 0."""
    path = ("workers", position, "engine")
    return (*path, "url") if engine.urls is None else (*path, "urls", number)


def _place_problems(engine: AttachedEngineSpec, path: Path) -> Iterator[Problem]:
    if engine.url is None and engine.urls is None:
        yield Problem((*path, "url"), "is required: where the engine's server is, as http://HOST:PORT")
    if engine.url is not None and engine.urls is not None:
        yield Problem((*path, "urls"), "contradicts url: give one of the two")
    if engine.api_key_env is not None and engine.api_key_file is not None:
        yield Problem((*path, "api_key_file"), "contradicts api_key_env: give one of the two")


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
    """Yield pairs that could not hand KV over: only engines of one kind can."""
    for model in fleet.models:
        groups = fleet.groups_of(model)
        prefill = next((group for group in groups if group.role is Role.PREFILL), None)
        if prefill is None:
            continue
        for group in groups:
            if group.engine.kind != prefill.engine.kind:
                must = (
                    f"must be {prefill.engine.kind!r}, not {group.engine.kind!r}: {prefill.name!r} prefills "
                    f"for {fleet.shown_name(model)!r}, and KV goes between engines of one kind"
                )
                yield Problem(("workers", fleet.workers.index(group), "engine", "kind"), must)


def engine_warnings(fleet: FleetFile) -> Iterator[str]:
    """Yield valid settings of engines that are hardly meant."""
    for group in fleet.workers:
        yield from _group_warnings(fleet, group)
    for model in fleet.models:
        kinds = {group.engine.kind for group in fleet.groups_of(model)}
        if "mock" in kinds and len(kinds) > 1:
            yield (
                f"model {model.mock_name!r} has mock engines and others: its calls reach nobody as they were "
                "written, and tools, grammars and log probabilities are refused"
            )


def _group_warnings(fleet: FleetFile, group: WorkerGroup) -> Iterator[str]:
    model, engine = fleet.model_of(group), group.engine
    if isinstance(engine, MockEngineSpec):
        room_tokens = engine.total_kv_blocks * model.mock_block_size
        if room_tokens < model.mock_context_length:
            yield (
                f"group {group.name!r} has room for {room_tokens} tokens, "
                f"less than the context length of {model.mock_name!r} ({model.mock_context_length})"
            )
    if not engine.kv_events and fleet.router.kv_events:
        yield f"group {group.name!r} publishes no KV events: the router predicts its caches from decisions"


RANKS_MAX = 65_536
"""How many worker ranks one file may describe."""


class LoadedFleet(NamedTuple):
    """A valid fleet, and warnings for its owner."""

    fleet: FleetFile
    warnings: tuple[str, ...]


def default_fleet_document() -> Document:
    """Return the fleet of ``kvrouter up`` without a file: two zones, KV transfers kept inside each."""
    path = default_fleet_path()
    return parse_document(path.read_text("utf-8"), path.name)


def default_fleet_path() -> FilePath:
    """Return the path of that fleet's file."""
    return FilePath(str(files("kvrouter.fleetfile").joinpath("default-fleet.yaml")))


Check = Callable[[FleetFile], Iterable[Problem]]
"""A check of a file as a whole."""


def load_fleet(document: Document, further: Sequence[Check] = ()) -> LoadedFleet:
    """Validate a fleet file, by ``further`` checks too; raise ConfigError with one line, file and line number
    per mistake.
    """
    examined = examine_fleet(document, further)
    if examined.fleet is None or examined.problems:
        raise config_error(examined.problems, document.place)
    return _with_warnings(examined.fleet)


class ExaminedFleet(NamedTuple):
    """All mistakes of a fleet file, in the order of its lines.

    ``fleet`` is the file without its mistakes; None if too little is left of it.
    """

    fleet: FleetFile | None
    problems: tuple[Problem, ...]


def examine_fleet(document: Document, further: Sequence[Check] = ()) -> ExaminedFleet:
    """Return every mistake of a file at once: those of single values, and those of the rest together."""
    rest, problems = validated(document.content)
    if rest is not None:
        for check, depends_on in _CHECKS:
            if rest.can_judge(depends_on):
                problems += check(rest.fleet)
        for check in further:
            problems += check(rest.fleet)
    problems.sort(key=lambda problem: document.line_of(problem.path))
    return ExaminedFleet(None if rest is None else rest.fleet, tuple(problems))


def settings_document(document: Document) -> Document:
    """Return ``document``, a fleet file or a part of one; raise ConfigError for unknown keys."""
    known = FleetFile.model_fields
    raise_problems(
        [
            Problem((key,), f"unknown key{did_you_mean(key, known)}")
            for key in document.content
            if key not in known
        ],
        document.place,
    )
    return document


def load_part(document: Document) -> FleetFile:
    """Validate a part of a fleet, without its decode workers if they are elsewhere. Raises ConfigError."""
    rest, problems = validated(document.content)
    if rest is None or problems:
        raise config_error(
            sorted(problems, key=lambda problem: document.line_of(problem.path)), document.place
        )
    checks = (_repeated_names, _model_problems, _topology_problems, _prompt_problems, engine_problems)
    raise_problems([problem for check in checks for problem in check(rest.fleet)], document.place)
    return rest.fleet


def settings_in(fleet: FleetFile) -> Settings:
    """Return the settings of a file alone."""
    return Settings(
        router=fleet.router,
        frontend=fleet.frontend,
        planes=fleet.planes,
        recording=fleet.recording,
        log=fleet.log,
    )


def settled(fleet: FleetFile, settings: Settings) -> LoadedFleet:
    """Return ``fleet`` under the settings that flags and variables have made of the file's own.

    Raises ConfigError where the two together cannot be run.
    """
    fleet = fleet.model_copy(
        update={
            "router": settings.router,
            "frontend": settings.frontend,
            "planes": settings.planes,
            "recording": settings.recording,
            "log": settings.log,
        }
    )
    raise_problems([*_router_problems(fleet), *_selection_problems(fleet)], dotted)
    return _with_warnings(fleet)


def _with_warnings(fleet: FleetFile) -> LoadedFleet:
    return LoadedFleet(fleet, (*_transfer_warnings(fleet), *engine_warnings(fleet)))


def _repeated_names(fleet: FleetFile) -> Iterator[Problem]:
    yield from _repeated("models", [model.name for model in fleet.models if model.name is not None])
    yield from _repeated("workers", [group.name for group in fleet.workers])


def _model_problems(fleet: FleetFile) -> Iterator[Problem]:
    names = [model.name for model in fleet.models if model.name is not None]
    if len(fleet.models) > 1:
        for position, model in enumerate(fleet.models):
            if model.name is None:
                must = f"is required: the file has {len(fleet.models)} models"
                yield Problem(("models", position, "name"), must)
    for position, group in enumerate(fleet.workers):
        path = ("workers", position, "model")
        if group.model is None and len(fleet.models) > 1:
            yield Problem(path, f"is required: the file has {len(fleet.models)} models")
        elif group.model is not None and group.model not in names:
            yield Problem(
                path, f"must be a model of this file, not {group.model!r}{did_you_mean(group.model, names)}"
            )


def _repeated(section: str, names: list[str]) -> Iterator[Problem]:
    for position, name in enumerate(names):
        if name in names[:position]:
            yield Problem(
                (section, position, "name"), f"must be unique: {name!r} is {section}[{names.index(name)}]"
            )


def _prompt_problems(fleet: FleetFile) -> Iterator[Problem]:
    for position, group in enumerate(fleet.workers):
        prompts = group.prompt_tokens
        if prompts is not None and prompts.min and prompts.max and prompts.min > prompts.max:
            must = f"must be at least min, which is {prompts.min}, not {prompts.max}"
            yield Problem(("workers", position, "prompt_tokens", "max"), must)


def _topology_problems(fleet: FleetFile) -> Iterator[Problem]:
    levels = fleet.topology.levels
    for position, level in enumerate(levels):
        if level in levels[:position]:
            yield Problem(("topology", "levels", position), f"must be unique: {level!r} is there already")

    links = fleet.topology.link_table
    for level in links.within:
        if must := _unknown_level(fleet, level):
            yield Problem(("topology", "links", "within", level), must)
    for position, pair in enumerate(links.pairs):
        if must := _unknown_level(fleet, pair.level):
            yield Problem(("topology", "links", "pairs", position, "level"), must)
    for position, group in enumerate(fleet.workers):
        for domain in group.domains:
            if must := _unknown_level(fleet, domain):
                yield Problem(("workers", position, "domains", domain), must)
        for index, taint in enumerate(group.taints):
            for prefix in filter(taint.startswith, RESERVED):
                must = f"must not begin with {prefix}: {RESERVED[prefix]}"
                yield Problem(("workers", position, "taints", index), must)
    policy = fleet.kv_transfer
    if policy is not None:
        if must := _unknown_level(fleet, policy.domain):
            yield Problem(("kv_transfer", "domain"), must)
        if policy.enforcement is Enforcement.PREFERRED and policy.preferred_weight is None:
            yield Problem(("kv_transfer", "preferred_weight"), "is required under 'preferred': from 0 to 1")


def _unknown_level(fleet: FleetFile, name: str) -> str | None:
    """Return what a level must be, if ``name`` is none of the file's; else None."""
    levels = fleet.topology.levels
    if name in levels:
        return None
    listed = ", ".join(levels) if levels else "none are given"
    return f"must be one of topology.levels ({listed}), not {name!r}{did_you_mean(name, levels)}"


def _router_problems(fleet: FleetFile) -> Iterator[Problem]:
    """A level that no worker has a value of would have every pair refused, and the router never ready."""
    level = fleet.router.kv_transfer_topology_level
    if level is None or not any(group.role is Role.PREFILL for group in fleet.workers):
        return
    if any(group.topology_env for group in fleet.workers):
        return  # which domains there are, those workers' files say
    if must := _unknown_level(fleet, level.strip()):
        yield Problem(("router", "kv_transfer_topology_level"), must)


def _selection_problems(fleet: FleetFile) -> Iterator[Problem]:
    router = fleet.router
    if router.router_pd_selection is PdSelection.JOINT and router.cost != TIME:
        must = f"joint compares times: router_cost has to be time, not {router.cost}"
        yield Problem(("router", "router_pd_selection"), must)


def _size_problems(fleet: FleetFile) -> Iterator[Problem]:
    ranks = sum(group.n_workers * (group.dp_size or 1) for group in fleet.workers)
    if ranks > RANKS_MAX:
        yield Problem(("workers",), f"must have ≤ {RANKS_MAX} ranks together, not {ranks}")
    yield from pair_problems(fleet)


def _role_problems(fleet: FleetFile) -> Iterator[Problem]:
    names = [model.name for model in fleet.models]
    if any(group.model not in (None, *names) for group in fleet.workers):
        return  # a group whose model is misspelt may be the one that decodes
    for position, model in enumerate(fleet.models):
        roles = {group.role for group in fleet.groups_of(model)}
        if not roles & {Role.DECODE, Role.BOTH}:
            yield Problem(
                ("models", position),
                f"no worker decodes {fleet.shown_name(model)!r}: add role decode or both",
            )


def _transfer_warnings(fleet: FleetFile) -> Iterator[str]:
    policy, router = fleet.kv_transfer, fleet.router
    of_file = link_table(fleet)
    if router.kv_transfer_weight > 0 and links_of_router(router, of_file).is_assumed:
        yield "router.kv_transfer_weight has no effect without links: measure them and write topology.links"
    if policy is not None:
        if policy.preferred_weight is not None and policy.enforcement is not Enforcement.PREFERRED:
            yield f"kv_transfer.preferred_weight has no effect under {policy.enforcement.value!r}"
        source, domain = "kv_transfer", policy.domain
        is_required = policy.enforcement is Enforcement.REQUIRED
    elif router.kv_transfer_topology_level is not None:
        source, domain = "router.kv_transfer_topology_level", router.kv_transfer_topology_level.strip()
        is_required = router.kv_transfer_mismatch_policy is MismatchPolicy.FAIL
    else:
        if any(group.role is Role.PREFILL for group in fleet.workers):
            yield from unbound_blocks(router, of_file)
        return
    for model in fleet.models:
        groups, name = fleet.groups_of(model), fleet.shown_name(model)
        if all(group.role is not Role.PREFILL for group in groups):
            yield f"{source} has no effect on model {name!r}: no worker of it has role prefill"
        elif is_required and not any(group.topology_env for group in groups):
            yield from _domain_warnings(groups, name, domain)


def _domain_warnings(groups: Sequence[WorkerGroup], model: str, domain: str) -> Iterator[str]:
    """Yield the workers that get no requests while KV must keep to ``domain``."""
    prefill = [group for group in groups if group.role is Role.PREFILL]
    for group in groups:
        if domain not in group.domains:
            yield f"group {group.name!r} has no {domain}: under 'required' KV may neither reach nor leave it"
    decodes = {
        group.domains[domain]
        for group in groups
        if group.role is not Role.PREFILL and domain in group.domains
    }
    prefills = {group.domains[domain] for group in prefill if domain in group.domains}
    for value in sorted(prefills - decodes):
        yield f"{domain}={value} has prefill workers and no decode worker: they get no requests of {model!r}"
    for value in sorted(decodes - prefills):
        yield f"{domain}={value} has decode workers and no prefill worker: they get no requests of {model!r}"


_LEVELS: Path = ("topology", "levels")

_CHECKS: tuple[tuple[Check, tuple[Path, ...]], ...] = (
    (_repeated_names, ()),
    (_model_problems, tuple(entries("models", "name"))),
    (_topology_problems, (_LEVELS,)),
    (_prompt_problems, ()),
    (_router_problems, (_LEVELS, *entries("workers", "role", "topology_env"))),
    (engine_problems, ()),
    (_size_problems, tuple(entries("workers", "model", "role", "engine"))),
    (_role_problems, (*entries("workers", "model", "role"), *entries("models", "name"))),
)
"""The checks of a file as a whole, and the values without which a check would judge wrongly."""
