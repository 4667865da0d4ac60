"""The filters and tests of chat templates, which charge the budget."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import cast

from kvrouter.text.template_budget import (
    ITEM_BYTES,
    STEP_BYTES,
    Budget,
    TemplateOverBounds,
    check_percent,
    counted,
    current,
)

NUMBER_ARGUMENT_MAX = 10_000
"""The largest number that a filter takes as a width, a count or a number of digits."""

ROUND_DIGITS_MAX = 100
SEPARATOR_CHARS_MAX = 16
JSON_INDENT_MAX = 16

FILTERS = frozenset(
    {
        "abs",
        "attr",
        "batch",
        "capitalize",
        "center",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "filesizeformat",
        "first",
        "float",
        "forceescape",
        "format",
        "groupby",
        "indent",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "round",
        "safe",
        "select",
        "selectattr",
        "slice",
        "sort",
        "string",
        "sum",
        "title",
        "tojson",
        "trim",
        "truncate",
        "unique",
        "upper",
        "urlencode",
        "wordcount",
    }
)
"""The bounded filters. The others are removed: a template that names one does not compile."""

PLAIN_TESTS = frozenset(
    {
        "boolean",
        "callable",
        "defined",
        "even",
        "false",
        "filter",
        "float",
        "integer",
        "iterable",
        "mapping",
        "none",
        "number",
        "odd",
        "sameas",
        "sequence",
        "string",
        "test",
        "true",
        "undefined",
    }
)
PLAIN_FILTERS = frozenset({"count", "d", "default", "length"})
"""Tests and filters that read only a type or a length, and are not charged."""


def bounded_filter(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Return a filter or test that charges for its arguments and its result."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: object, **kwargs: object) -> object:
        budget = current.budget
        budget.charge(STEP_BYTES)
        values = [_listed(name, arg) for arg in args[first:]]
        for arg in (*values, *kwargs.values()):
            budget.charge_for(arg)
        for arg in (*values[1:], *kwargs.values()):
            if isinstance(arg, int) and abs(arg) > NUMBER_ARGUMENT_MAX:
                raise TemplateOverBounds(f"it calls {name} with a number above {NUMBER_ARGUMENT_MAX}")
        check = _CHECKS.get(name)
        if check is not None:
            check(budget, values, kwargs)
        result = function(*args[:first], *values, **kwargs)
        if isinstance(result, Iterator):
            return counted(result)
        charge_result(budget, result)
        return result

    return bounded


def _listed(name: str, value: object) -> object:
    """Return ``value``; an iterator becomes a list if the filter reads it twice; its items are charged."""
    if not isinstance(value, Iterator):
        return value
    return list(counted(value)) if name in {"join", "list", "sort", "unique", "groupby"} else counted(value)


def _argument(at: int, name: str, args: list[object], kwargs: dict[str, object], default: object) -> object:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _check_center(budget: Budget, args: list[object], kwargs: dict[str, object]) -> None:
    width = _argument(1, "width", args, kwargs, 80)
    budget.charge(4 * width if isinstance(width, int) and width > 0 else 0)


def _check_indent(budget: Budget, args: list[object], kwargs: dict[str, object]) -> None:
    width = _argument(1, "width", args, kwargs, 4)
    each = (
        str.__sizeof__(width) if isinstance(width, str) else 4 * abs(width) if isinstance(width, int) else 0
    )
    lines = len(args[0].splitlines()) if args and isinstance(args[0], str) else 1
    budget.charge((1 + lines) * each)


def _check_format(_: Budget, args: list[object], __: dict[str, object]) -> None:
    if args and isinstance(args[0], str):
        check_percent(args[0])


def _check_join(budget: Budget, args: list[object], kwargs: dict[str, object]) -> None:
    separator = _argument(1, "d", args, kwargs, "")
    budget.charge_for(separator)
    if isinstance(separator, str):
        budget.charge(joints(args[0] if args else ()) * str.__sizeof__(separator))


def _check_pieces(budget: Budget, args: list[object], kwargs: dict[str, object]) -> None:
    for arg in (*args[1:], *kwargs.values()):
        budget.charge(ITEM_BYTES * arg if isinstance(arg, int) and arg > 0 else 0)


def _check_replace(budget: Budget, args: list[object], _: dict[str, object]) -> None:
    if args and isinstance(args[0], str):
        charge_replace(budget, args[0], tuple(args[1:]))


def _check_round(_: Budget, args: list[object], kwargs: dict[str, object]) -> None:
    digits = _argument(1, "precision", args, kwargs, 0)
    if isinstance(digits, int) and abs(digits) > ROUND_DIGITS_MAX:
        raise TemplateOverBounds(f"it rounds to more than {ROUND_DIGITS_MAX} digits")


def _check_sum(_: Budget, args: list[object], kwargs: dict[str, object]) -> None:
    if not isinstance(_argument(2, "start", args, kwargs, 0), int | float):
        raise TemplateOverBounds("it sums up what are no numbers")


def _check_json(budget: Budget, args: list[object], kwargs: dict[str, object]) -> None:
    indent = _argument(2, "indent", args, kwargs, None)
    separators = _argument(3, "separators", args, kwargs, ())
    wide = isinstance(indent, str) and len(indent) > JSON_INDENT_MAX
    if wide or (isinstance(indent, int) and indent > JSON_INDENT_MAX):
        raise TemplateOverBounds(f"it indents JSON by more than {JSON_INDENT_MAX}")
    texts = separators if isinstance(separators, list | tuple) else ()
    if any(isinstance(text, str) and len(text) > SEPARATOR_CHARS_MAX for text in texts):
        raise TemplateOverBounds(f"it separates JSON by more than {SEPARATOR_CHARS_MAX} characters")
    if indent is not None and args:
        for _ in range(len(indent) if isinstance(indent, str) else max(1, cast("int", indent))):
            budget.charge_for(args[0])


def charge_result(budget: Budget, result: object) -> None:
    """Charge for a produced text or container."""
    if isinstance(result, str):
        budget.charge(str.__sizeof__(result))
    elif isinstance(result, list | tuple | dict):
        budget.charge(ITEM_BYTES * (2 + len(result)))


def charge_replace(budget: Budget, text: str, args: tuple[object, ...]) -> None:
    """Charge for the text that replacing the first argument by the second adds."""
    old, new = (*args, "", "")[:2]
    if isinstance(old, str) and isinstance(new, str):
        budget.charge((text.count(old) + 1) * str.__sizeof__(new))


def joints(items: object) -> int:
    """Return the most separators that joining ``items`` takes."""
    return len(items) if isinstance(items, list | tuple | dict | range | str) else 0


_CHECKS: dict[str, Callable[[Budget, list[object], dict[str, object]], None]] = {
    "batch": _check_pieces,
    "center": _check_center,
    "format": _check_format,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "round": _check_round,
    "slice": _check_pieces,
    "sum": _check_sum,
    "tojson": _check_json,
}
