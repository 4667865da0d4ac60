"""An option is declared once, as a field: the flag, its limits, its default and the value follow from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import pytest
from click.testing import CliRunner

from kvrouter.cli.options import takes
from kvrouter.settings.option import given_of, option


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    trace: Path
    name: str = option("Its name.", is_required=True, metavar="NAME")
    ports: tuple[int, ...] = option("Its ports.", default=(1, 2), flag="--port", at_least=1, at_most=9)
    share: float | None = option("A share.", above=0)
    form: Literal["a", "b"] = option("Its form.", default="a")
    is_static: bool = option("It stays.", default=False)
    events: bool | None = option("It tells.")
    from_zero: int = option("A number.", default=0)
    asks: bool = option("It asks.", default=True, hides_default=True)
    pods: str | None = option("Whose.", alone="")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@takes(Toy)
@click.option("--other")
def toy(given: Toy, *, other: str | None) -> None:
    click.echo(repr((given, other)))
    click.echo(repr(given_of(given)))


def ran(*arguments: str) -> str:
    found = CliRunner().invoke(toy, arguments)
    assert found.exit_code in (0, 2), found.exception
    return found.output


def test_a_command_gets_an_object_of_its_options() -> None:
    shown, given = ran("t", "--name", "x").splitlines()
    assert shown == repr((Toy(trace=Path("t"), name="x"), None))
    assert given == repr({"trace": Path("t"), "name": "x"})


def test_given_options_are_those_that_differ_from_the_default() -> None:
    given = ran(
        "t", "--name", "x", "--port", "3", "--static", "--no-events", "--share", "0.5", "--other", "o"
    )
    assert repr({"ports": [3], "share": 0.5, "is_static": True, "events": False})[1:-1] in given


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ((), {}),
        (("--pods",), {"pods": ""}),
        (("--pods", "a=b", "--asks"), {"pods": "a=b"}),
        (("--no-asks",), {"asks": False}),
    ],
)
def test_flag_may_stand_without_a_value_and_a_switch_may_be_turned_off(
    arguments: tuple[str, ...], given: dict[str, object]
) -> None:
    expected = {"trace": Path("t"), "name": "x", **given}
    found = ran("t", "--name", "x", *arguments).splitlines()[1]
    assert found == repr(
        {name: expected[name] for name in ("trace", "name", "asks", "pods") if name in expected}
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option '--name'"),
        (("--name", "x", "--port", "10"), "10 is not in the range 1<=x<=9"),
        (("--name", "x", "--share", "0"), "0.0 is not in the range x>0"),
        (("--name", "x", "--form", "c"), "'c' is not one of 'a', 'b'"),
    ],
)
def test_a_mistake_names_the_flag(arguments: tuple[str, ...], message: str) -> None:
    assert message in ran("t", *arguments)


def test_help_shows_only_meaningful_defaults() -> None:
    text = ran("--help")
    assert "Its ports.  [default: 1, 2; 1<=x<=9]" in text
    assert "A number.  [default: 0]" in text
    assert "It stays.\n" in text
    assert "--events / --no-events" in text
    assert "It asks.\n" in text
