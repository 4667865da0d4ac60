"""Where settings come from: a flag wins over a variable, that over the YAML file, that over the default."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

from pydantic import SecretStr, ValidationError

from kvrouter.core.hosts import LOOPBACK
from kvrouter.settings.dynamo_settings import FOREIGN_VARIABLES
from kvrouter.settings.problems import (
    Document,
    Path,
    Problem,
    config_error,
    did_you_mean_variable,
    dotted,
    problem_of,
    raise_problems,
)
from kvrouter.settings.setting_spec import SettingKind, SettingSpec, SettingValue
from kvrouter.settings.tree import SETTINGS, AdminAccess, Settings
from kvrouter.settings.variables import (
    ENGINE_KEY_VARIABLE,
    ENGINE_KEYS_PREFIX,
    FLEET_VARIABLE,
    OUR_PREFIX,
    SHARED_PREFIX,
    TOPOLOGY_VARIABLES,
    spellings,
    without_prefix,
    without_service_links,
)

_NEAR_MISS_CUTOFF = 0.8


class Loaded(NamedTuple):
    """The settings, and warnings for their owner."""

    settings: Settings
    warnings: tuple[str, ...]


def load_settings(
    *,
    flags: Mapping[str, SettingValue],
    environ: Mapping[str, str],
    document: Document | None = None,
) -> Loaded:
    """Merge all sources into one validated tree.

    ``flags`` maps YAML keys (``router.router_mode``), and further names of flags (``--router-ttl-secs``), to
    the values on the command line; ``environ`` is the whole environment, in which a blank variable counts as
    unset, and a kubelet's variables for Services are no settings; ``document`` holds the sections. A setting
    that one source gives under two names that differ is a mistake. Raises ConfigError with one line per
    mistake, each with its origin and its field.
    """
    environ = without_service_links(environ)
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
        given = _given(spec, _from_flags(spec, flags) or _from_variables(spec, environ))
        if given is None:
            continue
        origins[path] = given.origin
        if given.mistake is not None:
            problems.append(Problem(path, given.mistake))
        for name in (spec.name, *spec.aliases.names):
            section_values.pop(name, None)
        section_values[spec.name] = given.value

    def place(path: Path) -> str:
        origin = origins.get(path)
        if origin is not None:
            return f"{origin} ({dotted(path)})"
        return document.place(path) if document else dotted(path)

    raise_problems(problems, place)
    settings = _validate(merged, place)
    raise_problems(conflicts(settings), place)
    return Loaded(settings, (*_near_misses(environ), *settings_warnings(settings)))


class _Given(NamedTuple):
    """The value of one setting in flags or variables, and its origin or mistake."""

    origin: str
    value: SettingValue | None = None
    mistake: str | None = None


def _given(spec: SettingSpec, texts: Mapping[str, SettingValue]) -> _Given | None:
    """Return the one value in ``texts``, by flag or variable; None without any."""
    found: _Given | None = None
    for origin, raw in texts.items():
        try:
            value = spec.parse(raw) if isinstance(raw, str) else raw
        except ValueError as error:
            return _Given(origin, mistake=str(error))
        if found is None:
            found = _Given(origin, value)
        elif found.value != value:
            return _Given(origin, mistake=f"{found.origin} is the same setting, and differs: leave one out")
    return found


def _from_flags(spec: SettingSpec, flags: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    """Return what flags give, by the flag."""
    keys = (spec.yaml_key, *spec.flags[1:])
    return {
        flag: flags[key] for flag, key in zip(spec.flags, keys, strict=False) if flags.get(key) is not None
    }


def _from_variables(spec: SettingSpec, environ: Mapping[str, str]) -> dict[str, SettingValue]:
    """Return what variables give, by the variable."""
    return {name: environ[name] for name in spec.variables if environ.get(name, "").strip()}


def _validate(merged: Mapping[str, object], place: Callable[[Path], str]) -> Settings:
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise config_error([problem_of(item, Settings) for item in error.errors()], place) from error


_RISING = ("write_low_water_bytes", "write_high_water_bytes", "write_overflow_bytes")


def conflicts(settings: Settings) -> list[Problem]:
    """Return what no single field can show; placed at the field that its owner gave."""
    front = settings.frontend
    problems: list[Problem] = []
    for low, high in pairwise(_RISING):
        low_bytes, high_bytes = getattr(front, low), getattr(front, high)
        if low_bytes < high_bytes:
            continue
        if low not in front.model_fields_set:
            must = f"must be > frontend.{low} ({low_bytes}), not {high_bytes}"
            problems.append(Problem(("frontend", high), must))
        else:
            must = f"must be < frontend.{high} ({high_bytes}), not {low_bytes}"
            problems.append(Problem(("frontend", low), must))
    file_bytes, total_bytes = settings.recording.file_bytes, settings.recording.total_bytes
    if 2 * file_bytes > total_bytes:
        must = f"must be at most half of recording.total_bytes ({total_bytes}), not {file_bytes}"
        problems.append(Problem(("recording", "file_bytes"), must))
    return problems


def settings_warnings(settings: Settings) -> list[str]:
    """Return warnings on valid settings that do not do what their owner probably wanted."""
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
    if settings.planes.cluster is not None and settings.planes.other_clusters is None:
        warnings.append("planes.cluster has no effect without planes.other_clusters")
    is_open = front.admin_token is None and front.admin_routes is AdminAccess.OPEN
    if front.http_host not in LOOPBACK and is_open:
        warnings.append(
            f"the admin routes are open to everyone who reaches {front.http_host}: set KVROUTER_ADMIN_TOKEN"
        )
    return warnings


_KNOWN = frozenset({FLEET_VARIABLE, ENGINE_KEY_VARIABLE}).union(
    *map(spellings, TOPOLOGY_VARIABLES), *(spec.variables for spec in SETTINGS)
)
"""Every variable that is read, under each of its names."""


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    problems = [
        Problem((name,), _unknown(name))
        for name in sorted(environ)
        if name.startswith(OUR_PREFIX) and name not in _KNOWN and not name.startswith(ENGINE_KEYS_PREFIX)
    ]
    raise_problems(problems, dotted)


def _unknown(name: str) -> str:
    foreign = FOREIGN_VARIABLES.get(SHARED_PREFIX + without_prefix(name))
    if foreign is not None:
        return foreign.message
    return f"unknown variable{did_you_mean_variable(name, _KNOWN)}"


def _near_misses(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable of Dynamo's without effect here, and for each ``DYN_*`` variable
    that is almost one of kvrouter's: the rest belongs to others.
    """
    warnings: list[str] = []
    for name in sorted(environ):
        if name in _KNOWN or not environ[name].strip():
            continue
        foreign = FOREIGN_VARIABLES.get(name)
        if foreign is not None:
            if not foreign.is_met_by_text(environ[name]):
                warnings.append(f"{name} {foreign.message}")
            continue
        if not name.startswith(SHARED_PREFIX):
            continue
        meant = did_you_mean_variable(name, _KNOWN, cutoff=_NEAR_MISS_CUTOFF)
        if meant:
            warnings.append(f"{name} is not read{meant}")
    return warnings


def environment_of(settings: Settings, *sections: str) -> dict[str, str]:
    """Return the variables that make a process run with ``sections`` of ``settings``.

    An unset setting has no variable: that process has the same defaults, and the same fleet file.
    """
    environ: dict[str, str] = {}
    for spec in SETTINGS:
        if spec.section not in sections:
            continue
        section = getattr(settings, spec.section)
        if spec.name not in section.model_fields_set:
            continue
        value = getattr(section, spec.name)
        if isinstance(value, SecretStr):
            environ[spec.variable] = value.get_secret_value()
        elif isinstance(value, bool):
            environ[spec.variable] = "true" if value else "false"
        elif value is not None:
            environ[spec.variable] = str(value)
        elif spec.kind in (SettingKind.WHOLE, SettingKind.NUMBER):
            environ[spec.variable] = "none"
    return environ


def environment_with(own: Mapping[str, str], settings: Settings, *sections: str) -> dict[str, str]:
    """Return ``own`` with ``sections`` of ``settings``. A setting's further names are not handed on: a flag
    of this process may have overruled them.
    """
    variables = environment_of(settings, *sections)
    overruled = {name for spec in SETTINGS if spec.variable in variables for name in spec.variables}
    return {name: text for name, text in own.items() if name not in overruled} | variables
