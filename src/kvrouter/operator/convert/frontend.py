"""Converts the main container of Dynamo's frontend to one that runs kvrouter's frontend."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from kvrouter.operator.convert.part import Json, Notes
from kvrouter.operator.plan.containers import HTTP_PORT_VARIABLE
from kvrouter.operator.plan.manifest import objects
from kvrouter.operator.plan.programs import ProgramProtocol, arguments_of, program_of
from kvrouter.settings.problems import Path
from kvrouter.settings.setting_spec import SettingKind, SettingSpec, written_settings
from kvrouter.settings.variables import OUR_PREFIX, SHARED_PREFIX, TOPOLOGY_VARIABLES, spellings

MODULE = "dynamo.frontend"
_PYTHON = re.compile(r"(.*/)?(python[0-9.]*|(ba)?sh)|exec|-m|-u|-e?c|-l?c")
"""Arguments that only start a Python module."""
_SHELL = re.compile(r"[|&;<>]|[0-9]>")
"""Arguments with which a shell ends a command, or redirects its output."""
REPLACED = (
    "image",
    "command",
    "args",
    "workingDir",
    "startupProbe",
    "readinessProbe",
    "livenessProbe",
    "ports",
)
"""Fields that the operator sets in a container that runs kvrouter's frontend."""

SET_BY_OPERATOR = frozenset(
    name
    for variable in (
        "DYN_NAMESPACE",
        "DYN_DISCOVERY_BACKEND",
        "DYN_REQUEST_PLANE",
        "DYN_EVENT_PLANE",
        "DYN_STORE_KV",
        "NATS_SERVER",
        "ETCD_ENDPOINTS",
        "ETCD_SERVER",
    )
    for name in spellings(variable)
)
"""Variables that tell Dynamo's processes where to find each other."""

BLOCK_SIZE_FLAG = "--kv-cache-block-size"
HTTP_PORT_FLAG = "--http-port"


@dataclass(frozen=True, slots=True)
class Places:
    """Paths of a component, its pods' spec and its main container in Dynamo's manifest. In v1alpha1 some of
    the container's fields are next to it, and the other containers begin ``n_before`` later in the result.
    """

    component: Path
    spec: Path
    main: Path
    env: tuple[Path, ...]
    """The paths of its variables."""
    fields: Mapping[str, Path] = field(default_factory=dict)
    """The paths of fields that are elsewhere, or have another name there."""
    n_before: int = 0

    def of(self, name: str) -> Path:
        """Return the path of a field of the container."""
        return self.fields.get(name, (*self.main, name))


def as_our_frontend(main: Json, places: Places, notes: Notes) -> None:
    """Change ``main``, which runs Dynamo's frontend, so that it runs kvrouter's."""
    at = places.main
    program = program_of(main)
    is_stated = bool(main.get("command"))
    if program.protocol is ProgramProtocol.KVROUTER and not _is_bare(main):
        return
    if is_stated and program.protocol is not ProgramProtocol.DYNAMO:
        notes.lost(at, "is no program of Dynamo's, and is kept: it has to find kvrouter's workers by itself")
        return
    flags = _frontend_arguments(main, at, notes)
    for name in REPLACED:
        if name in main:
            del main[name]
            if name != "args":
                notes.changed(places.of(name), "is left out: the operator runs kvrouter's own frontend")
    kept, port = _flags(flags, (*at, "args"), notes)
    env = kept_env(objects(main.pop("env", None)), places.env, notes)
    if port is not None and HTTP_PORT_VARIABLE not in [entry.get("name") for entry in env]:
        env.append({"name": HTTP_PORT_VARIABLE, "value": port})
        notes.changed(
            (*at, "args"), f"{HTTP_PORT_FLAG} {port} is {HTTP_PORT_VARIABLE}, which its Service follows"
        )
    if env:
        main["env"] = [*env]
    if kept:
        main["args"] = ["frontend", *kept]


def _frontend_arguments(main: Json, at: Path, notes: Notes) -> list[str]:
    """Return the arguments of Dynamo's frontend; commands that a shell runs around it are lost."""
    arguments = arguments_of(main)
    if MODULE not in arguments:
        return [] if main.get("command") else arguments
    start = arguments.index(MODULE) + 1
    ends = (at for at, arg in enumerate(arguments) if at >= start and _SHELL.match(arg))
    end = next(ends, len(arguments))
    around = [arg for arg in arguments[: start - 1] if _PYTHON.fullmatch(arg) is None] + arguments[end:]
    if around:
        notes.lost((*at, "args"), f"{' '.join(around)}: only Dynamo's frontend is replaced, by kvrouter's")
    return arguments[start:end]


def _is_bare(main: Json) -> bool:
    """Whether a container states no program: Dynamo then runs its own frontend."""
    return not any(main.get(name) for name in ("image", "command", "args"))


def _flags(arguments: list[str], at: Path, notes: Notes) -> tuple[list[JsonValue], str | None]:
    """Return the flags that kvrouter's frontend has too, and the port, which is a variable there."""
    known = {flag: spec for spec in written_settings() for flag in _spellings(spec)}
    kept: list[JsonValue] = []
    port: str | None = None
    for arguments_of_flag in _grouped(arguments):
        flag, joint, value = arguments_of_flag[0].partition("=")
        value = value if joint else " ".join(arguments_of_flag[1:])
        spec = known.get(flag)
        if flag == BLOCK_SIZE_FLAG:
            notes.changed(at, f"{flag} is left out: the size of blocks is asked of engines")
        elif spec is None:
            notes.lost(at, f"{' '.join(arguments_of_flag)}: kvrouter's frontend has no such flag")
        elif (wrong := _wrong_value(spec, value)) is not None:
            notes.lost(at, f"{' '.join(arguments_of_flag)}: {wrong}")
        elif flag == HTTP_PORT_FLAG:
            port = value
        else:
            kept += arguments_of_flag
    return kept, port


def _spellings(spec: SettingSpec) -> list[str]:
    """Return the flags of a setting; a switch has another one that turns it off."""
    off = [f"--no-{flag.removeprefix('--')}" for flag in spec.flags if spec.kind is SettingKind.SWITCH]
    return [*spec.flags, *off]


def _grouped(arguments: list[str]) -> list[list[str]]:
    """Return each flag with its values."""
    groups: list[list[str]] = []
    for arg in arguments:
        if arg.startswith("--") or not groups:
            groups.append([arg])
        else:
            groups[-1].append(arg)
    return groups


def _wrong_value(spec: SettingSpec, value: str) -> str | None:
    """Return why a frontend would refuse this value at its start; None if it takes it."""
    if not value and spec.kind is SettingKind.SWITCH:
        return None
    if spec.kind is SettingKind.CHOICE and value not in spec.choices:
        return f"must be {' or '.join(spec.choices)}"
    try:
        spec.parse(value)
    except ValueError as error:
        return str(error)
    return None


def kept_env(env: list[Json], places: Sequence[Path], notes: Notes) -> list[Json]:
    """Return the variables that mean the same to kvrouter; note each of the others at its path."""
    known = {name: spec for spec in written_settings() for name in spec.variables}
    topology = {name for variable in TOPOLOGY_VARIABLES for name in spellings(variable)}
    kept: list[Json] = []
    for here, entry in zip(places, env, strict=True):
        name, value = str(entry.get("name")), entry.get("value")
        spec = known.get(name)
        wrong = _wrong_value(spec, value) if spec is not None and isinstance(value, str) else None
        if name in SET_BY_OPERATOR:
            notes.changed(here, f"{name} is left out: the operator says where processes find each other")
        elif wrong is not None:
            notes.lost(here, f"{name}: {wrong}")
        elif spec is None and name not in topology and name.startswith((SHARED_PREFIX, OUR_PREFIX)):
            notes.lost(here, f"kvrouter does not read {name}")
        else:
            kept.append(entry)
    return kept
