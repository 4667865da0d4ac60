"""The page at ``/ui`` reads fields that answers have: a field that is renamed in one place is seen."""

import re
from pathlib import Path

import msgspec
import pytest

import kvrouter
from kvrouter.api.decision_schema import Attempt, Decisions, Explanation, LastDecisions, Leg, Pick
from kvrouter.api.fleet_schema import (
    BrokenPair,
    CacheHits,
    ExpectedEngine,
    Fleet,
    Flow,
    Flows,
    Links,
    Model,
    Rank,
    Refusals,
    RefusedWorker,
    RequestStats,
    ServedRequests,
    Worker,
)
from kvrouter.frontend.openapi import TYPES

SCRIPTS = sorted((Path(kvrouter.__file__).parent / "frontend" / "ui").glob("*.js"))
READ = (Fleet, Flows, Refusals, LastDecisions, Decisions, Explanation)
"""The answers that the page asks for."""

BY_VARIABLE: dict[str, type] = {
    "fleet": Fleet,
    "worker": Worker,
    "rank": Rank,
    "model": Model,
    "flow": Flow,
    "links": Links,
    "pair": BrokenPair,
    "leg": Leg,
    "pick": Pick,
    "attempt": Attempt,
    "stats": RequestStats,
    "served": ServedRequests,
    "minute": ServedRequests,
    "total": ServedRequests,
    "hits": CacheHits,
    "refused": RefusedWorker,
    "engine": ExpectedEngine,
}
"""What the scripts call an object of each type."""

SCHEMAS = msgspec.json.schema_components(TYPES)[1]
NAMES = {field for schema in SCHEMAS.values() for field in schema.get("properties", ())}


def without_words(script: Path) -> str:
    """A script without its comments and its texts, but for what templates read."""
    source = re.sub(r"//[^\n]*|/\*.*?\*/", "", script.read_text("utf-8"), flags=re.S)
    return re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', source)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_fields_that_the_page_reads_exist_in_answers(script: Path) -> None:
    source = without_words(script)
    for variable, kind in BY_VARIABLE.items():
        for field in re.findall(rf"(?<![.\w]){variable}\??\.(\w+)", source):
            assert field in kind.__struct_fields__, f"{variable}.{field}"  # type: ignore[attr-defined]
    for field in re.findall(r"\??\.([a-z]+(?:_[a-z]+)+)\b", source):
        assert field in NAMES, field


def test_every_variable_and_schema_of_the_page_is_checked() -> None:
    sources = "".join(map(without_words, SCRIPTS))
    for variable in BY_VARIABLE:
        assert re.search(rf"(?<![.\w]){variable}\??\.[a-z]", sources), variable
    _, read = msgspec.json.schema_components(READ, ref_template="{name}")
    assert read.keys() <= SCHEMAS.keys()
