"""Workers that prefill prompts of some lengths alone."""

import pytest

from kvrouter.core.errors import ConfigError, NoEligibleWorker, Reason
from kvrouter.core.ids import RequestId
from kvrouter.core.workers import ModelRuntimeConfig
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.one_worker import fleet_of_one
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import RouteRequest, route
from kvrouter.settings.problems import parse_document
from tests.testing.plain_fleets import fleet_of, idle_view, worker_card

FILE = """version: 1
models: [{name: m}]
workers:
- {name: w, prompt_tokens: {min: 10, max: 9}}
"""


def ranged(*ranges: tuple[int | None, int | None]) -> Fleet:
    configs = [ModelRuntimeConfig(prompt_tokens_min=least, prompt_tokens_max=most) for least, most in ranges]
    return fleet_of(*(worker_card(number, config=config) for number, config in enumerate(configs, start=1)))


def picked(fleet: Fleet, isl_tokens: int) -> int:
    request = RouteRequest(RequestId("r"), isl_tokens, -(-isl_tokens // 4))
    return route(request, idle_view(fleet)).decode.rank.worker_id


def test_a_prompt_goes_to_a_worker_whose_range_includes_its_length() -> None:
    fleet = ranged((None, 100), (101, 200), (150, None))
    assert [picked(fleet, tokens) for tokens in (1, 100, 101, 149, 201)] == [1, 1, 2, 2, 3]
    assert picked(fleet, 160) in (2, 3)
    assert picked(fleet, 0) in (1, 2, 3), "nobody knows how long it is"


def test_a_prompt_outside_all_ranges_is_refused_and_counted() -> None:
    with pytest.raises(NoEligibleWorker) as refused:
        picked(ranged((None, 100), (200, None)), 150)
    assert refused.value.refusals == {Reason.PROMPT_OUT_OF_RANGE: 2}


def test_an_empty_range_of_prompt_lengths_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt_tokens_max: 9 is less than prompt_tokens_min, 10"):
        ranged((10, 9))
    with pytest.raises(ConfigError, match=r"workers\[0\].prompt_tokens.max: must be at least min"):
        load_fleet(parse_document(FILE, "fleet.yaml"))
    with pytest.raises(ConfigError, match="--prompt-tokens-max"):
        fleet_of_one({"prompt_tokens_min": 10, "prompt_tokens_max": 9})


def test_worker_flags_set_its_range_of_prompt_lengths() -> None:
    (group,) = fleet_of_one({"prompt_tokens_min": 10, "prompt_tokens_max": 90}).workers
    assert group.prompt_tokens is not None
    assert (group.prompt_tokens.min, group.prompt_tokens.max) == (10, 90)
