"""An option of one command. It is declared once, as a field of a frozen dataclass:

    rows: int | None = option("Only the first requests.", metavar="N", at_least=1)

The field's name is the flag's, its type is what the flag takes. The command line makes its flags of such a
class, and gives the command an object of it.
"""

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """The properties of a field besides its name and its type.

    ``flag`` is given if it is not the field's name; an ``is_`` before a name is left out. ``choices`` are the
    allowed texts, if the type does not list them. A default is shown unless it is None, False or empty.
    """

    help: str
    metavar: str | None = None
    flag: str | None = None
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    variable: str | None = None
    alone: str | None = None
    """The value of the flag without a following value; None: it needs one."""

    hides_default: bool = False
    path: tuple[str | int, ...] = ()
    """The path of the value in a fleet file, if the command writes it as one."""


def option(text: str, *, default: object = None, is_required: bool = False, **others: Any) -> Any:
    """Return a field of a dataclass; ``others`` are fields of its :class:`Option`. As ``dataclasses.field``,
    it is of any type for a checker.
    """
    found = Option(text, **others)
    return field(default=MISSING if is_required else default, metadata={"option": found})


def option_of(field: Field[Any]) -> Option:
    """Return the option that a field declares."""
    found: Option = field.metadata["option"]
    return found


def given_of(options: Any) -> dict[str, object]:
    """Return the values of an options object that are not its defaults, by name; tuples are lists."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    given = {each.name: values[each.name] for each in fields(options) if values[each.name] != each.default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
