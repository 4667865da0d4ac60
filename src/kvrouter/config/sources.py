"""Where settings come from: a flag wins over a variable, that over the YAML file, that over the default."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from itertools import pairwise
from typing import NamedTuple

from pydantic import ValidationError

from kvrouter.config.document import Document
from kvrouter.config.problems import (
    Path,
    Problem,
    config_error,
    did_you_mean,
    dotted,
    problem_of,
    raise_problems,
)
from kvrouter.config.setting import SettingSpec, SettingValue
from kvrouter.config.tree import SETTINGS, Settings

FLEET_VARIABLE = "KVROUTER_FLEET"
"""The variable behind ``--fleet``: the fleet file, which holds settings rather than being one."""

ENGINE_KEY_VARIABLE = "KVROUTER_ENGINE_API_KEY"
"""The variable with the key that engines' servers ask for. Nothing else holds it: neither a flag, which
every process list shows, nor a file that is diffed."""

_OUR_PREFIX = "KVROUTER_"
_SHARED_PREFIX = "DYN_"
_NEAR_MISS_CUTOFF = 0.84
_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


class Loaded(NamedTuple):
    """The settings, and what their owner should hear about before relying on them."""

    settings: Settings
    warnings: tuple[str, ...]


def load_settings(
    *,
    flags: Mapping[str, SettingValue],
    environ: Mapping[str, str],
    document: Document | None = None,
) -> Loaded:
    """Merge all sources into one validated tree.

    ``flags`` maps YAML keys (``router.router_mode``) to what was given on the command line; ``environ`` is
    the whole environment, of which a blank variable counts as unset; ``document`` holds the sections.
    Raises ConfigError with one line per mistake, each with its origin and its field.
    """
    _refuse_unknown_variables(environ)
    merged: dict[str, object] = {}
    origins: dict[Path, str] = {}
    problems: list[Problem] = []
    for section in Settings.model_fields:
        values = document.content.get(section, {}) if document else {}
        merged[section] = dict(values) if isinstance(values, Mapping) else values
    for spec in SETTINGS:
        section_values = merged[spec.section]
        if not isinstance(section_values, dict):
            continue
        path: Path = (spec.section, spec.name)
        given = _from_flag_or_variable(spec, flags, environ)
        if given is None:
            continue
        origins[path], raw = given
        try:
            section_values[spec.name] = spec.parse(raw) if isinstance(raw, str) else raw
        except ValueError as error:
            problems.append(Problem(path, str(error)))

    def place(path: Path) -> str:
        origin = origins.get(path)
        if origin is not None:
            return f"{origin} ({dotted(path)})"
        return document.place(path) if document else dotted(path)

    raise_problems(problems, place)
    settings = _validate(merged, place)
    raise_problems(_contradictions(settings, merged), place)
    return Loaded(settings, (*_near_misses(environ), *_warnings(settings)))


def _from_flag_or_variable(
    spec: SettingSpec, flags: Mapping[str, SettingValue], environ: Mapping[str, str]
) -> tuple[str, SettingValue] | None:
    """Return the origin and the value as given, or None when neither gives one."""
    value = flags.get(spec.yaml_key)
    if value is not None and spec.flag is not None:
        return spec.flag, value
    text = environ.get(spec.variable, "")
    return (spec.variable, text) if text.strip() else None


def _validate(merged: Mapping[str, object], place: Callable[[Path], str]) -> Settings:
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise config_error([problem_of(item, Settings) for item in error.errors()], place) from error


_RISING = ("write_low_water_bytes", "write_high_water_bytes", "write_overflow_bytes")


def _contradictions(settings: Settings, merged: Mapping[str, object]) -> list[Problem]:
    """Return what no single field can tell; placed at the field that its owner gave."""
    front, given = settings.frontend, merged["frontend"]
    problems: list[Problem] = []
    for low, high in pairwise(_RISING):
        low_bytes, high_bytes = getattr(front, low), getattr(front, high)
        if low_bytes < high_bytes:
            continue
        if isinstance(given, Mapping) and low not in given:
            must = f"must be > frontend.{low} ({low_bytes}), not {high_bytes}"
            problems.append(Problem(("frontend", high), must))
        else:
            must = f"must be < frontend.{high} ({high_bytes}), not {low_bytes}"
            problems.append(Problem(("frontend", low), must))
    return problems


def _warnings(settings: Settings) -> list[str]:
    """Return what is legal and does not do what its owner probably wanted."""
    router, front = settings.router, settings.frontend
    warnings: list[str] = []
    if router.kv_transfer_topology_level is None and "kv_transfer_mismatch_policy" in router.model_fields_set:
        warnings.append(
            "router.kv_transfer_mismatch_policy has no effect without router.kv_transfer_topology_level"
        )
    if router.admission_queue_max > 0 and router.admission_wait_s == 0:
        warnings.append("router.admission_queue_max has no effect while router.admission_wait_s is 0")
    if router.admission_wait_s > 0 and router.admission_queue_max == 0:
        warnings.append("router.admission_wait_s has no effect while router.admission_queue_max is 0")
    if front.http_host not in _LOOPBACK_HOSTS and front.admin_token is None:
        warnings.append(
            f"the admin routes are open to everyone who reaches {front.http_host}: set KVROUTER_ADMIN_TOKEN"
        )
    return warnings


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = {spec.variable for spec in SETTINGS} | {FLEET_VARIABLE, ENGINE_KEY_VARIABLE}
    problems = [
        Problem((name,), f"unknown variable{did_you_mean(name, known)}")
        for name in sorted(environ)
        if name.startswith(_OUR_PREFIX) and name not in known
    ]
    raise_problems(problems, dotted)


def _near_misses(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable that is almost one of ours: the rest of DYN_* belongs to others."""
    known = [spec.variable for spec in SETTINGS if spec.variable.startswith(_SHARED_PREFIX)]
    warnings: list[str] = []
    for name in sorted(environ):
        if not name.startswith(_SHARED_PREFIX) or name in known:
            continue
        nearest = get_close_matches(name, known, n=1, cutoff=_NEAR_MISS_CUTOFF)
        if nearest:
            warnings.append(f"{name} is not read (did you mean {nearest[0]}?)")
    return warnings
