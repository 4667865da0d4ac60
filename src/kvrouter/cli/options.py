"""The flags of a command, made of the dataclasses that declare its options (:class:`Option`)."""

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from kvrouter.cli.output import Output
from kvrouter.cli.setting_flags import output_option
from kvrouter.settings.option import Option, option_of

Command = TypeVar("Command", bound=Callable[..., object])


def takes(*groups: type) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Give a command the options of these dataclasses, in their order. It is called with an object of each,
    and after them with its other parameters by name. A field of the type Output is ``--output``; another
    field that declares no option is an argument of the command, of that name.
    """

    def decorate(command: Callable[..., object]) -> Callable[..., object]:
        @wraps(command)
        def collect(**values: Any) -> object:
            given = [
                group(**{field.name: values.pop(field.name) for field in fields(group)}) for group in groups
            ]
            return command(*given, **values)

        decorated: Callable[..., object] = collect
        for group in reversed(groups):
            hints = get_type_hints(group)
            for field in reversed(fields(group)):
                if hints[field.name] is Output:
                    decorated = output_option(decorated)
                elif field.metadata:
                    decorated = _click_option(field, hints[field.name])(decorated)
        return decorated

    return decorate


def _click_option(field: Field[Any], hint: object) -> Callable[[Command], Command]:
    option = option_of(field)
    flag = option.flag or f"--{field.name.removeprefix('is_').replace('_', '-')}"
    kind, is_list = _kind(hint)
    attributes: dict[str, Any] = {"help": option.help, "metavar": option.metavar, "envvar": option.variable}
    if field.default is MISSING:
        attributes["required"] = True
    elif field.default is not None:
        attributes["default"] = field.default
        attributes["show_default"] = not (
            option.hides_default or field.default is False or field.default in ("", ())
        )
    if kind is bool and field.default is not False:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
        attributes["default"] = field.default
    elif kind is bool:
        attributes["is_flag"] = True
    else:
        attributes |= {"type": _click_type(kind, option), "multiple": is_list}
    if option.alone is not None:
        attributes |= {"is_flag": False, "flag_value": option.alone}
    return click.option(flag, field.name, **attributes)


def _kind(plain: object) -> tuple[object, bool]:
    """Return the type of one value, and whether the flag may be repeated."""
    if get_origin(plain) in (Union, UnionType):
        (plain,) = (each for each in get_args(plain) if each is not NoneType)
    if get_origin(plain) is tuple:
        return get_args(plain)[0], True
    return plain, False


def _click_type(kind: object, option: Option) -> click.ParamType[Any]:
    choices = get_args(kind) if get_origin(kind) is Literal else option.choices
    lowest = option.at_least if option.above is None else option.above
    has_limits = lowest is not None or option.at_most is not None
    if choices:
        return click.Choice(choices)
    if kind is Path:
        return click.Path(path_type=Path)
    if kind is int and has_limits:
        return click.IntRange(lowest, option.at_most)  # type: ignore[arg-type]  # whole numbers, as written
    if kind is float and has_limits:
        return click.FloatRange(lowest, option.at_most, min_open=option.above is not None)
    return {int: click.INT, float: click.FLOAT}.get(kind, click.STRING)  # type: ignore[call-overload, no-any-return]
