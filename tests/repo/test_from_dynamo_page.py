"""The page for users of Dynamo: each name in its tables is one that the code knows."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest

import kvrouter as library
from kvrouter.cli.commands import kvrouter
from kvrouter.frontend.openai.body import AgentHints, NvExt
from kvrouter.frontend.openai.parse import FIELDS_WITHOUT_EFFECT, HEADERS, HEADERS_WITHOUT_EFFECT
from kvrouter.operator.api.crd import structural
from kvrouter.operator.api.deployment import DynamoGraphDeployment
from kvrouter.settings.dynamo_settings import FOREIGN_VARIABLES
from kvrouter.settings.tree import SETTINGS
from kvrouter.settings.variables import TOPOLOGY_VARIABLES
from kvrouter.telemetry import Telemetry

PAGE = (Path(__file__).parents[2] / "docs" / "from-dynamo.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def rows_of(title: str) -> list[list[str]]:
    """The cells of the first table of a section, without its head."""
    table = re.search(r"(?:^\|.*\n)+", SECTIONS[title], re.M)
    assert table is not None
    _, _, *lines = table[0].splitlines()
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_parsed(line: str) -> bool:
    """Whether the command line is one that the program takes; it is not run."""
    command: click.Command = kvrouter
    words = shlex.split(line)[1:]
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None, line
        command = found
    return bool(command.make_context(command.name, words).command)


COMMANDS = [
    each for row in rows_of("Commands") for each in names_in(row[1]) if re.match("kvrouter [a-z]", each)
]


@pytest.mark.parametrize("line", [line.replace("FOLDER", ".") for line in COMMANDS])
def test_every_command_is_taken(line: str) -> None:
    assert is_parsed(line)


def test_every_mock_flag_is_one_of_the_mock_workers() -> None:
    mock = kvrouter.get_command(click.Context(kvrouter), "worker")
    assert isinstance(mock, click.Group)
    flags = {flag for each in mock.commands["mock"].params for flag in each.opts}
    assert {flag for row in rows_of("The mocker's flags") for flag in names_in(row[1])} <= flags


def test_the_table_of_other_names_is_the_settings_aliases() -> None:
    shown = [tuple(names_in(cell) for cell in row) for row in rows_of("Flags and variables")]
    assert shown == [
        ([*spec.aliases.flags], [*spec.aliases.variables], [spec.flag])
        for spec in SETTINGS
        if spec.aliases.flags or spec.aliases.variables
    ]


def test_every_hint_is_read_or_left_out_as_the_page_says() -> None:
    for theirs, here in rows_of("Requests"):
        headers = re.findall(r"header `([^`]+)`", theirs)
        fields = [name for name in names_in(theirs) if name not in headers]
        is_read = names_in(here) == [here.strip("`")]
        assert {HEADERS.get(name.encode()) for name in headers} <= {here.strip("`") if is_read else None}
        if is_read:
            hints = (f"agent_hints.{name}" for name in AgentHints.__struct_fields__)
            assert {*fields, here.strip("`")} <= {*NvExt.__struct_fields__, *hints}
        else:
            assert {*fields} <= {*FIELDS_WITHOUT_EFFECT}
            assert {name.encode() for name in headers} <= {*HEADERS_WITHOUT_EFFECT}


def test_the_anthropic_variable_asks_for_what_is_so_either_way() -> None:
    foreign = FOREIGN_VARIABLES["DYN_ENABLE_ANTHROPIC_API"]
    assert foreign.is_met_by_text("true")
    assert foreign.is_met_by_text("false")


def test_every_name_in_a_program_is_the_librarys() -> None:
    names = {name for row in rows_of("In a program") for name in names_in(row[1])}
    assert names <= {*library.__all__}
    (methods,) = re.findall(r"same methods: (.+?)\. ", SECTIONS["In a program"].replace("\n", " "))
    assert all(callable(getattr(library.KvRouter, name)) for name in names_in(methods))


def test_every_variable_of_a_worker_is_read() -> None:
    assert {name for row in rows_of("A worker's environment") for name in names_in(row[0])} <= {
        *TOPOLOGY_VARIABLES
    }


def test_every_field_of_a_manifest_is_in_the_definition() -> None:
    definition = json.dumps(structural(DynamoGraphDeployment))
    paths = [path for row in rows_of("Manifests") for path in names_in(row[1])]
    assert [name for path in paths for name in path.split(".") if f'"{name}": ' not in definition] == []


def test_every_metric_is_counted_here() -> None:
    counted = {spec.name for spec in Telemetry.SPECS}
    assert {name for row in rows_of("Metrics") for name in names_in(row[1])} <= counted
