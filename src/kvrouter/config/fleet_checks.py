"""What a fleet file must say as a whole: names that meet, domains that exist, models that somebody
decodes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path as FilePath
from typing import NamedTuple

from kvrouter.config.document import Document, parse_document
from kvrouter.config.engine_checks import engine_problems, engine_warnings, pair_problems
from kvrouter.config.fleet import FleetFile, WorkerGroup
from kvrouter.config.fleet_rest import entries, validated
from kvrouter.config.problems import (
    Path,
    Problem,
    config_error,
    did_you_mean,
    dotted,
    raise_problems,
)
from kvrouter.config.tree import Settings
from kvrouter.core.workers import Enforcement, Role
from kvrouter.topology import RESERVED_TAINT_PREFIX, MismatchPolicy

RANKS_MAX = 65_536
"""How many worker ranks one file may describe."""


class LoadedFleet(NamedTuple):
    """A fleet that can be run, and what its owner should hear about before relying on it."""

    fleet: FleetFile
    warnings: tuple[str, ...]


def default_fleet_document() -> Document:
    """Return the fleet of ``kvrouter up`` without a file: two zones, KV transfers kept inside each."""
    path = default_fleet_path()
    return parse_document(path.read_text("utf-8"), path.name)


def default_fleet_path() -> FilePath:
    """Return where that fleet's file is."""
    return FilePath(str(files("kvrouter.config").joinpath("default-fleet.yaml")))


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
    """All that is wrong with a fleet file, in the order of its lines.

    ``fleet`` is the file without what is wrong; None where too little is left of it.
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
    """Return ``document``, a fleet file or a part of one; raise ConfigError for keys that none has."""
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
    """Validate a part of a fleet, such as one worker: who decodes may be elsewhere. Raises ConfigError."""
    rest, problems = validated(document.content)
    if rest is None or problems:
        raise config_error(
            sorted(problems, key=lambda problem: document.line_of(problem.path)), document.place
        )
    checks = (_repeated_names, _model_problems, _topology_problems, engine_problems)
    raise_problems([problem for check in checks for problem in check(rest.fleet)], document.place)
    return rest.fleet


def settings_in(fleet: FleetFile) -> Settings:
    """Return the settings of a file alone."""
    return Settings(router=fleet.router, frontend=fleet.frontend, planes=fleet.planes, log=fleet.log)


def settled(fleet: FleetFile, settings: Settings) -> LoadedFleet:
    """Return ``fleet`` under the settings that flags and variables have made of the file's own.

    Raises ConfigError where the two together cannot be run.
    """
    fleet = fleet.model_copy(
        update={
            "router": settings.router,
            "frontend": settings.frontend,
            "planes": settings.planes,
            "log": settings.log,
        }
    )
    raise_problems(list(_router_problems(fleet)), dotted)
    return _with_warnings(fleet)


def _with_warnings(fleet: FleetFile) -> LoadedFleet:
    return LoadedFleet(fleet, (*_transfer_warnings(fleet), *engine_warnings(fleet)))


def _repeated_names(fleet: FleetFile) -> Iterator[Problem]:
    yield from _repeated("models", [model.name for model in fleet.models])
    yield from _repeated("workers", [group.name for group in fleet.workers])


def _model_problems(fleet: FleetFile) -> Iterator[Problem]:
    names = [model.name for model in fleet.models]
    for position, group in enumerate(fleet.workers):
        path = ("workers", position, "model")
        if group.model is None and len(names) > 1:
            yield Problem(path, f"is required: the file has {len(names)} models")
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
            if taint.startswith(RESERVED_TAINT_PREFIX):
                must = f"must not begin with {RESERVED_TAINT_PREFIX}: topology taints come from domains"
                yield Problem(("workers", position, "taints", index), must)
    policy = fleet.kv_transfer
    if policy is not None:
        if must := _unknown_level(fleet, policy.domain):
            yield Problem(("kv_transfer", "domain"), must)
        if policy.enforcement is Enforcement.PREFERRED and policy.preferred_weight is None:
            yield Problem(("kv_transfer", "preferred_weight"), "is required under 'preferred': from 0 to 1")


def _unknown_level(fleet: FleetFile, name: str) -> str | None:
    """Say what a level must be, where ``name`` is none of the file's."""
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
            yield Problem(("models", position), f"no worker decodes {model.name!r}: add role decode or both")


def _transfer_warnings(fleet: FleetFile) -> Iterator[str]:
    policy, router = fleet.kv_transfer, fleet.router
    if router.kv_transfer_weight > 0 and fleet.topology.links is None:
        yield "router.kv_transfer_weight weighs assumed links: measure them and write topology.links"
    if policy is not None:
        if policy.preferred_weight is not None and policy.enforcement is not Enforcement.PREFERRED:
            yield f"kv_transfer.preferred_weight has no effect under {policy.enforcement.value!r}"
        source, domain = "kv_transfer", policy.domain
        is_required = policy.enforcement is Enforcement.REQUIRED
    elif router.kv_transfer_topology_level is not None:
        source, domain = "router.kv_transfer_topology_level", router.kv_transfer_topology_level.strip()
        is_required = router.kv_transfer_mismatch_policy is MismatchPolicy.FAIL
    else:
        return
    for model in fleet.models:
        groups = fleet.groups_of(model)
        if all(group.role is not Role.PREFILL for group in groups):
            yield f"{source} has no effect on model {model.name!r}: no worker of it has role prefill"
        elif is_required and not any(group.topology_env for group in groups):
            yield from _domain_warnings(groups, model.name, domain)


def _domain_warnings(groups: Sequence[WorkerGroup], model: str, domain: str) -> Iterator[str]:
    """Tell of workers that get nothing while KV must keep to ``domain``."""
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
    (_router_problems, (_LEVELS, *entries("workers", "role", "topology_env"))),
    (engine_problems, ()),
    (_size_problems, tuple(entries("workers", "model", "role", "engine"))),
    (_role_problems, (*entries("workers", "model", "role"), *entries("models", "name"))),
)
"""What is checked of a file as a whole, and the values without which a check would judge wrongly."""
