"""What a cost rule can do once it is registered; for ``-p tests.testing.toy_cost.registration``."""

import json
from pathlib import Path

from click.testing import CliRunner

from kvrouter.cli.commands import kvrouter
from kvrouter.core.workers import Role
from kvrouter.kernel.placement.placement import Draw
from kvrouter.kernel.routing import RoutingSettings
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.setting import settings_of
from tests.kernel.unit.test_placer import place, placer_of
from tests.testing.router_harness import generate_request

SAMPLE = Path("data/mooncake-conversation-sample.jsonl").absolute()


def test_its_name_is_a_value_of_the_flag_and_of_the_settings_page() -> None:
    """Both are written from this by ``make docs``."""
    (spec,) = (spec for spec in settings_of("router", KvRouterConfig) if spec.name == "router_cost")
    assert spec.choices == ("blocks", "time", "lmetric", "toy")
    assert spec.limits == "blocks | time | lmetric | toy"


def test_a_worker_is_picked_and_explained_by_it() -> None:
    placer = placer_of((1, Role.BOTH), (2, Role.BOTH), settings=RoutingSettings(cost="toy"))
    draws = [Draw(number, number, number) for number in range(3)]
    placed = [place(placer, draw).decision.decode.rank.worker_id for draw in draws]
    assert sorted(placed[:2]) == [1, 2]
    rows = placer.explain(generate_request(), draws[0], now_s=1.0).rows
    assert {row.rank.worker_id: row.cost for row in rows} == {placed[2]: 4.0, 3 - placed[2]: 1.0}


def test_a_replay_compares_it() -> None:
    compared = ["--rows", "8", "--compare", "kvrouter:router_cost=toy,lmetric", "-o", "json"]
    done = CliRunner().invoke(kvrouter, ["replay", str(SAMPLE), *compared])
    assert done.exit_code == 0, done.output
    toy, _ = json.loads(done.stdout)["variants"]
    assert (toy["name"], toy["summaries"][0]["completed"]) == ("kvrouter:router_cost=toy", 8)


def test_worth_offers_it() -> None:
    assert "[blocks|time|joint|lmetric|toy]" in CliRunner().invoke(kvrouter, ["worth", "--help"]).output
