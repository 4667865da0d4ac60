"""A setting: one field of a frozen model, with its sources, unit and group.

The field's type, default and docstring are read off the model; :class:`Setting` adds the properties that a
type cannot state. The resulting :class:`SettingSpec` is the source of the environment, the YAML keys, the
documentation page, and of the table that flags and ``--help`` are made from.
"""

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Lt, MaxLen
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SecretStr,
    Strict,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from kvrouter.core.hosts import is_resolvable
from kvrouter.core.secret import secret_mistake, trimmed
from kvrouter.settings.setting_spec import Aliases, SettingGroup, SettingKind, SettingSpec


def plain_type(annotation: object) -> tuple[object, list[object]]:
    """Return the type inside ``X | None`` and ``Annotated``, and all metadata on the way to it."""
    metadata: list[object] = []
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation, *found = get_args(annotation)
            metadata += found
        elif origin in (Union, UnionType) and NoneType in get_args(annotation):
            (annotation,) = (arg for arg in get_args(annotation) if arg is not NoneType)
        else:
            return annotation, metadata


def choices_of(plain: object) -> tuple[str, ...]:
    """Return the values that an enumeration or a literal allows; empty for another type."""
    if isinstance(plain, type) and issubclass(plain, StrEnum):
        return tuple(member.value for member in plain)
    return tuple(map(str, get_args(plain))) if get_origin(plain) is Literal else ()


def limits_of(field: FieldInfo) -> str:
    """Return what a value must be, as in ``≥ 0, ≤ 1`` or ``kv | random``; empty without limits."""
    plain, metadata = plain_type(field.annotation)
    choices = choices_of(plain)
    if choices:
        return " | ".join(choices)
    bounds = [
        bound
        for item in (*metadata, *field.metadata)
        for bound in (item if isinstance(item, Interval) else (item,))
    ]
    return ", ".join(text for bound in bounds if (text := _limit(bound)))


def _limit(bound: object) -> str:
    match bound:
        case Ge(limit):
            return f"≥ {limit}"
        case Gt(limit):
            return f"> {limit}"
        case Le(limit):
            return f"≤ {limit}"
        case Lt(limit):
            return f"< {limit}"
        case MaxLen(length):
            return f"≤ {length} long"
        case _:
            return ""


def models_in(annotation: object) -> tuple[type[BaseModel], ...]:
    """Return the models inside an optional, a list, a mapping or a union of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(found for arg in get_args(annotation) for found in models_in(arg))


def model_in(annotation: object) -> type[BaseModel] | None:
    """Return the model inside an optional, a list or a mapping of it; None without one."""
    return next(iter(models_in(annotation)), None)


def model_tagged(field: FieldInfo, tag: object) -> type[BaseModel] | None:
    """Return the model of a union that ``tag`` picks; None if the field is no such union, or the tag is
    unknown.
    """
    name = field.discriminator
    if not isinstance(name, str):
        return None
    for model in models_in(field.annotation):
        if tag in choices_of(model.model_fields[name].annotation):
            return model
    return None


Whole = Annotated[int, Strict()]
Count = Annotated[Whole, Ge(0)]
PositiveCount = Annotated[Whole, Ge(1)]
Finite = Annotated[float, Strict(), AllowInfNan(False)]
NonNegative = Annotated[Finite, Ge(0)]
Positive = Annotated[Finite, Gt(0)]
Fraction = Annotated[Finite, Interval(ge=0, le=1)]
Switch = Annotated[bool, Strict()]


HIDDEN_VALUE = "hidden_value"
"""The type of an error with a value that no message shows."""


def _secret(value: object) -> str:
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    secret = trimmed(text) if isinstance(text, str) else None
    mistake = "must be text" if secret is None else secret_mistake(secret)
    if mistake is not None:
        raise PydanticCustomError(HIDDEN_VALUE, mistake)
    return str(secret)


def _check_host(host: str) -> str:
    if not is_resolvable(host):
        raise PydanticCustomError(
            "host", "must be a host's name or address, with 1 to 63 characters between dots"
        )
    return host


HostName = Annotated[str, AfterValidator(_check_host)]
"""The name or address of a host; it need not exist."""

Secret = Annotated[SecretStr, BeforeValidator(_secret)]
"""A key, a token or a password: one line of text, without the white space behind it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The properties of a field besides its name and type.

    The flag of ``retries_max`` is ``--retries-max`` and its variable ``KVROUTER_RETRIES_MAX``, unless others
    are given. A secret has no flag, since a process list would show it.
    """

    group: SettingGroup
    _: KW_ONLY
    flag: str | None = None
    variable: str | None = None
    has_flag: bool = True
    unit: str | None = None
    aliases: Aliases = field(default_factory=Aliases)


class Section(BaseModel):
    """A group of settings: frozen, without unknown keys, each field documented by its docstring."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _under_own_names(cls, values: object) -> object:
        """Take each setting under any of its names; under two of them only where they agree. A path is taken
        as its text.
        """
        if not isinstance(values, Mapping):
            return values
        given = {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in values.items()
        }
        for alias, name in _aliases_of(cls).items():
            if alias not in given:
                continue
            value = given.pop(alias)
            if name in given and not _is_same(given[name], value):
                raise PydanticCustomError(
                    "set_twice",
                    "{name} and {key} are one setting, and differ: leave one of them out",
                    {"name": name, "key": alias},
                )
            given[name] = value
        return given


def _is_same(one: object, other: object) -> bool:
    """Whether two values are one: 1 is no switch, and 5 is 5.0."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


@cache
def _aliases_of(model: type[Section]) -> Mapping[str, str]:
    """Each further name of a field, with the field's own."""
    return {
        alias: name
        for name, field in model.model_fields.items()
        for item in field.metadata
        if isinstance(item, Setting)
        for alias in item.aliases.names
    }


def settings_of(section: str, model: type[Section]) -> tuple[SettingSpec, ...]:
    """Return the settings of ``model`` in the order in which they are written."""
    return tuple(_spec(section, name, field) for name, field in model.model_fields.items())


def _spec(section: str, name: str, field: FieldInfo) -> SettingSpec:
    setting = next((item for item in field.metadata if isinstance(item, Setting)), None)
    if setting is None or field.description is None:
        raise TypeError(f"{section}.{name}: a setting needs its Setting(...) and a docstring")
    plain, _ = plain_type(field.annotation)
    choices = choices_of(plain)
    return SettingSpec(
        section=section,
        name=name,
        flag=(setting.flag or f"--{name.replace('_', '-')}") if setting.has_flag else None,
        variable=setting.variable or f"KVROUTER_{name.upper()}",
        group=setting.group,
        unit=setting.unit,
        kind=SettingKind.CHOICE if choices else _kind(plain),
        choices=choices,
        default=field.default.value if isinstance(field.default, StrEnum) else field.default,
        limits=limits_of(field),
        meaning=" ".join(field.description.split()),
        aliases=setting.aliases,
    )


_KINDS: tuple[tuple[type, SettingKind], ...] = (
    (bool, SettingKind.SWITCH),
    (int, SettingKind.WHOLE),
    (float, SettingKind.NUMBER),
    (str, SettingKind.TEXT),
    (SecretStr, SettingKind.HIDDEN),
)


def _kind(plain: object) -> SettingKind:
    for known, kind in _KINDS:
        if plain is known:
            return kind
    raise TypeError(f"a setting cannot be of the type {plain!r}")


def refusing(foreign: Mapping[str, str]) -> BeforeValidator:
    """Return a validator that refuses each of these values with its reason."""

    def check(value: object) -> object:
        why = foreign.get(value) if isinstance(value, str) else None
        if why is not None:
            context = {"value": value, "why": why}
            raise PydanticCustomError("foreign", "'{value}' is not supported: {why}", context)
        return value

    return BeforeValidator(check)


class FleetPart(BaseModel):
    """A part of the fleet file: frozen, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


@cache
def installed_version() -> str:
    """Return the version of the installed package; ``source`` when it runs without being installed."""
    try:
        return version("kvrouter")
    except PackageNotFoundError:
        return "source"
