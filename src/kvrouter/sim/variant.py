"""The variants that one replay compares: routing rules by name, and values of the fleet file."""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import yaml

from kvrouter.config.fleet import FleetFile
from kvrouter.config.fleet_checks import load_fleet
from kvrouter.config.problems import Document
from kvrouter.core.errors import ConfigError
from kvrouter.sim.rules.registry import parse_rule
from kvrouter.sim.rules.rule import Rule

OURS = "kvrouter"
"""The router as the fleet file sets it."""

DEFAULT_FLEET = """\
version: 1
models: [{name: replay}]
workers: [{name: workers, replicas: 8}]
"""
"""The fleet where none is named."""

VARIANTS_MAX = 64
"""How many replays one command makes, seeds not counted."""


class Variant(NamedTuple):
    """A fleet with a rule. A rule may remember what it saw, so each replay makes its own."""

    name: str
    fleet: FleetFile
    make_rule: Callable[[], Rule | None]
    source: str


class Setting(NamedTuple):
    """One key of the fleet file, as ``router.overlap_score_weight`` or ``workers[0].replicas``, and the
    values that it takes in turn.
    """

    key: str
    values: tuple[object, ...]


def parse_sweep(text: str) -> Setting:
    """Parse ``key=value,value``; values are YAML. Raises ConfigError."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ConfigError(f"sweep: {text!r} is not key=value,value,…", param="sweep")
    try:
        parsed = yaml.safe_load(f"[{values}]")
    except yaml.YAMLError as error:
        raise ConfigError(f"sweep: {values!r} is not a list of values: {error}", param="sweep") from error
    return Setting(key.strip(), tuple(parsed))


def split_policies(text: str) -> list[str]:
    """Return the policies of ``a,b:x=1,y=2,c``: what has ``=`` and no name of its own is a parameter."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if found and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def variants(document: Document, policies: Sequence[str], sweeps: Sequence[Setting]) -> list[Variant]:
    """Return every policy over every combination of swept values. Raises ConfigError."""
    found: list[Variant] = []
    for values in product(*(setting.values for setting in sweeps)):
        chosen = list(zip((setting.key for setting in sweeps), values, strict=True))
        suffix = ", ".join(f"{key}={_shown(value)}" for key, value in chosen)
        for policy in policies:
            fleet, make_rule, source = _policy(document, policy, chosen)
            name = f"{policy} [{suffix}]" if suffix else policy
            found.append(Variant(name, fleet, make_rule, source))
    if len(found) > VARIANTS_MAX:
        raise ConfigError(f"sweep: {len(found)} replays; at most {VARIANTS_MAX}", param="sweep")
    return found


def _policy(
    document: Document, policy: str, chosen: Sequence[tuple[str, object]]
) -> tuple[FleetFile, Callable[[], Rule | None], str]:
    name, _, parameters = policy.partition(":")
    if name != OURS:
        rule = parse_rule(policy)
        return changed_fleet(document, chosen), lambda: parse_rule(policy), rule.source
    own: list[tuple[str, object]] = []
    for pair in parameters.split(",") if parameters else ():
        setting = parse_sweep(pair)
        own.append((f"router.{setting.key}", setting.values[0]))
    return changed_fleet(document, [*chosen, *own]), lambda: None, "this router"


def changed_fleet(document: Document, chosen: Sequence[tuple[str, object]]) -> FleetFile:
    """Return the fleet of a file in which these keys have these values; None takes a key out. Raises
    ConfigError.
    """
    if not chosen:
        return load_fleet(document).fleet
    content = copy.deepcopy(dict(document.content))
    for key, value in chosen:
        _set(content, key, value)
    name = f"{document.name} with {', '.join(f'{key}={_shown(value)}' for key, value in chosen)}"
    return load_fleet(Document(name, content, {})).fleet


def _set(content: dict[str, object], key: str, value: object) -> None:
    """Set the value at a dotted key; null takes it out. Mappings on the way are made."""
    steps: list[str | int] = []
    for part in key.split("."):
        name, *indices = part.replace("]", "").split("[")
        if name:
            steps.append(name)
        if not all(index.isdigit() for index in indices):
            raise ConfigError(f"sweep: {key}: an index is a number in [ ]", param="sweep")
        steps += [int(index) for index in indices]
    here: object = content
    for step in steps[:-1]:
        here = _within(here, step, key)
    last = steps[-1]
    if isinstance(here, dict) and isinstance(last, str):
        if value is None:
            here.pop(last, None)
        else:
            here[last] = value
    elif isinstance(here, list) and isinstance(last, int) and last < len(here):
        here[last] = value
    else:
        raise ConfigError(f"sweep: {key}: there is no such place in the fleet file", param="sweep")


def _within(here: object, step: str | int, key: str) -> object:
    if isinstance(here, dict) and isinstance(step, str):
        return here.setdefault(step, {})
    if isinstance(here, list) and isinstance(step, int) and step < len(here):
        return here[step]
    raise ConfigError(f"sweep: {key}: there is no such place in the fleet file", param="sweep")


def _shown(value: object) -> str:
    if isinstance(value, Mapping | list):
        return yaml.safe_dump(value, default_flow_style=True, width=1_000).strip()
    return "null" if value is None else str(value)
