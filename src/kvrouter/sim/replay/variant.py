"""The variants that one replay compares: routing rules by name, and values of the fleet file."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import yaml

from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.problems import Document
from kvrouter.sim.rules.registry import parse_rule
from kvrouter.sim.rules.rule import PublishedRule

OURS = "kvrouter"
"""The router as the fleet file sets it."""

DEFAULT_FLEET = """\
version: 1
models: [{name: replay}]
workers: [{name: workers, replicas: 8}]
"""
"""The fleet without a named one."""

VARIANTS_MAX = 64
"""How many replays one command makes, seeds not counted."""


class Variant(NamedTuple):
    """A fleet with a rule. A rule may have state, so each replay makes its own."""

    name: str
    fleet: FleetFile
    make_rule: Callable[[], PublishedRule | None]
    source: str


class Setting(NamedTuple):
    """One key of the fleet file, as ``router.overlap_score_weight`` or ``workers[0].replicas``, and the
    values that it takes in turn.
    """

    key: str
    values: tuple[object, ...]


_STEP = re.compile(r"([^\[\]]+)((?:\[[0-9]{1,9}\])*)")
"""One part of a dotted key: a name, and positions in lists."""


def parse_sweep(text: str) -> Setting:
    """Parse ``key=value,value``; values are YAML. Raises ConfigError."""
    key, equals, values = (part.strip() for part in text.partition("="))
    if not (key and equals and values):
        raise ConfigError(f"sweep: {text!r} is not key=value,value,…", param="sweep")
    return Setting(key, _values(values, "sweep"))


def split_policies(text: str) -> list[str]:
    """Return the policies of ``a,b:x=1,y=2,c``: a part with ``=`` and no own name is a parameter."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if found and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def variants(document: Document, policies: Sequence[str], sweeps: Sequence[Setting]) -> list[Variant]:
    """Return every policy over every combination of swept values. Raises ConfigError."""
    for at, setting in enumerate(sweeps):
        if setting.key in (earlier.key for earlier in sweeps[:at]):
            raise ConfigError(f"sweep: {setting.key}: is given twice", param="sweep")
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
) -> tuple[FleetFile, Callable[[], PublishedRule | None], str]:
    name, _, parameters = policy.partition(":")
    if name != OURS:
        rule = parse_rule(policy)
        return changed_fleet(document, chosen), lambda: parse_rule(policy), rule.source
    own: dict[str, object] = {}
    for pair in parameters.split(",") if parameters else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            raise ConfigError(f"policy: {policy}: {pair!r} is not setting=value", param="policy")
        if f"router.{key}" in own:
            raise ConfigError(f"policy: {policy}: {key} is given twice", param="policy")
        (own[f"router.{key}"],) = _values(value, "policy")
    return changed_fleet(document, [*chosen, *own.items()]), lambda: None, "this router"


def _values(text: str, option: str) -> tuple[object, ...]:
    """Parse values in YAML with commas between them, for ``option``."""
    try:
        return tuple(yaml.safe_load(f"[{text}]"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that there is not
        raise ConfigError(f"{option}: {text!r} is not a list of values in YAML", param=option) from error


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
        found = _STEP.fullmatch(part)
        if found is None:
            raise ConfigError(f"{key}: is not the key of a value, as workers[0].replicas is", param=key)
        steps += [found[1], *(int(index) for index in re.findall(r"[0-9]+", found[2]))]
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
        raise ConfigError(f"{key}: there is no such place in the fleet file", param=key)


def _within(here: object, step: str | int, key: str) -> object:
    if isinstance(here, dict) and isinstance(step, str):
        if here.get(step) is None:
            here[step] = {}
        return here[step]
    if isinstance(here, list) and isinstance(step, int) and step < len(here):
        return here[step]
    raise ConfigError(f"{key}: there is no such place in the fleet file", param=key)


def _shown(value: object) -> str:
    if isinstance(value, Mapping | list):
        return yaml.safe_dump(value, default_flow_style=True, width=1_000).strip()
    return "null" if value is None else str(value)
