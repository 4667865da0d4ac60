"""What a field's type says to people: its plain type, its limits, the model inside it."""

from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Lt, MaxLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo


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
    """Return the values that an enumeration or a literal allows; none for another type."""
    if isinstance(plain, type) and issubclass(plain, StrEnum):
        return tuple(member.value for member in plain)
    return tuple(map(str, get_args(plain))) if get_origin(plain) is Literal else ()


def limits_of(field: FieldInfo) -> str:
    """Return what a value must be, as in ``≥ 0, ≤ 1`` or ``kv | random``; empty when anything goes."""
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
    """Return the model inside an optional, a list or a mapping of it; None when there is none."""
    return next(iter(models_in(annotation)), None)


def model_tagged(field: FieldInfo, tag: object) -> type[BaseModel] | None:
    """Return the model of a union that ``tag`` picks; None when the field is no such union, or knows no such
    tag.
    """
    name = field.discriminator
    if not isinstance(name, str):
        return None
    for model in models_in(field.annotation):
        if tag in choices_of(model.model_fields[name].annotation):
            return model
    return None
