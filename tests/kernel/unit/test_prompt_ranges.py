"""Workers that prefill prompts of some lengths alone."""

import pytest

from kvrouter.core.errors import ConfigError, NoEligibleWorker, Reason
from kvrouter.core.ids import Epoch, ModelName, RequestId, WorkerId
from kvrouter.core.workers import ModelRuntimeConfig, Role, WorkerCard
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.one_worker import fleet_of_one
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import RouteRequest, RoutingSettings, View, route
from kvrouter.settings.problems import parse_document

FILE = """version: 1
models: [{name: m}]
workers:
- {name: w, prompt_tokens: {min: 10, max: 9}}
"""


def fleet_of(*ranges: tuple[int | None, int | None]) -> Fleet:
    fleet = Fleet(ModelName("m"), 16)
    for number, (least, most) in enumerate(ranges, start=1):
        config = ModelRuntimeConfig(prompt_tokens_min=least, prompt_tokens_max=most)
        fleet.join(
            WorkerCard(
                WorkerId(number), Epoch(1), fleet.model, Role.BOTH, 16, 100_000, "a", runtime_config=config
            )
        )
    return fleet


def picked(fleet: Fleet, isl_tokens: int) -> int:
    nothing = fleet.columns.context_length * 0
    view = View(fleet, RoutingSettings(), None, nothing, nothing, None)
    request = RouteRequest(RequestId("r"), isl_tokens, -(-isl_tokens // 16))
    return route(request, view).decode.rank.worker_id


def test_a_prompt_goes_to_a_worker_whose_range_includes_its_length() -> None:
    fleet = fleet_of((None, 100), (101, 200), (150, None))
    assert [picked(fleet, tokens) for tokens in (1, 100, 101, 149, 201)] == [1, 1, 2, 2, 3]
    assert picked(fleet, 160) in (2, 3)
    assert picked(fleet, 0) in (1, 2, 3), "nobody knows how long it is"


def test_a_prompt_outside_all_ranges_is_refused_and_counted() -> None:
    with pytest.raises(NoEligibleWorker) as refused:
        picked(fleet_of((None, 100), (200, None)), 150)
    assert refused.value.refusals == {Reason.PROMPT_OUT_OF_RANGE: 2}


def test_an_empty_range_of_prompt_lengths_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt_tokens_max: 9 is less than prompt_tokens_min, 10"):
        fleet_of((10, 9))
    with pytest.raises(ConfigError, match=r"workers\[0\].prompt_tokens.max: must be at least min"):
        load_fleet(parse_document(FILE, "fleet.yaml"))
    with pytest.raises(ConfigError, match="--prompt-tokens-max"):
        fleet_of_one({"prompt_tokens_min": 10, "prompt_tokens_max": 9})


def test_worker_flags_set_its_range_of_prompt_lengths() -> None:
    (group,) = fleet_of_one({"prompt_tokens_min": 10, "prompt_tokens_max": 90}).workers
    assert group.prompt_tokens is not None
    assert (group.prompt_tokens.min, group.prompt_tokens.max) == (10, 90)
