"""Which shapes of calls are not found where their engine has them cached."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.ids import DpRank, ModelName, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import CallRoute
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.router.engine_instrumentation import EngineInstrumentation
from kvrouter.router.engine_reports import EngineReports
from kvrouter.router.index_check import WINDOW_ANSWERS, IndexCheck
from kvrouter.router.prompt_shapes import (
    ANSWERS_MIN,
    OTHER_SHAPES,
    SHAPES_MAX,
    SPAN_S,
    NotedShape,
    PromptShapes,
)
from kvrouter.telemetry import Telemetry
from kvrouter.text.prompts.fields import PromptFields
from kvrouter.text.prompts.shape import shape_of
from tests.testing.prompt_shapes import SHAPES

BLOCK = 16


def noted(
    shapes: PromptShapes,
    now_s: float,
    *,
    predicted: int = 0,
    cached: int = 10,
    shape: str = "s",
    other: bool = False,
) -> NotedShape | None:
    """What is said of an answer; ``predicted`` and ``cached`` in blocks."""
    return shapes.note(
        shape,
        predicted_tokens=predicted * BLOCK,
        cached_tokens=cached * BLOCK,
        isl_tokens=100 * BLOCK,
        prompt_tokens=100 * BLOCK + other,
        now_s=now_s,
    )


def blind(shapes: PromptShapes) -> list[str]:
    return [reading.shape for reading in shapes.readings() if reading.is_blind]


@pytest.mark.parametrize("how", [{"predicted": 0}, {"predicted": 8}, {"predicted": 10, "other": True}])
def test_a_repeatedly_missed_shape_turns_blind_once(how: dict[str, Any]) -> None:
    shapes = PromptShapes(block_size=BLOCK)
    said = [noted(shapes, now_s, **how) for now_s in range(ANSWERS_MIN + 3)]
    turned = [each is not None and each.turned_blind is not None for each in said]
    assert turned == [False] * (ANSWERS_MIN - 1) + [True] + [False] * 3
    assert blind(shapes) == ["s"]
    for now_s in range(100, 110):
        noted(shapes, now_s, predicted=10)
    assert blind(shapes) == []


def test_a_blind_shape_does_not_change_other_shapes() -> None:
    shapes = PromptShapes(block_size=BLOCK)
    for now_s in range(20):
        noted(shapes, now_s, shape="missed")
        noted(shapes, now_s, predicted=10, shape="found")
    assert blind(shapes) == ["missed"]


@pytest.mark.parametrize(("predicted", "cached"), [(0, 0), (0, 1), (9, 10), (11, 10), (30, 10)], ids=str)
def test_answers_without_a_clear_miss_blind_no_shape(predicted: int, cached: int) -> None:
    shapes = PromptShapes(block_size=BLOCK)
    for now_s in range(40):
        noted(shapes, now_s, predicted=predicted, cached=cached)
    assert blind(shapes) == []


def test_a_burst_of_misses_blinds_no_shape() -> None:
    shapes = PromptShapes(block_size=BLOCK)
    for number in range(16):
        noted(shapes, number * SPAN_S / 17)
    assert blind(shapes) == []


def test_kept_shapes_are_limited() -> None:
    shapes = PromptShapes(block_size=BLOCK)
    for number in range(10 * SHAPES_MAX):
        noted(shapes, number, shape=f"s{number}")
    found = [reading.shape for reading in shapes.readings()]
    assert len(found) == SHAPES_MAX + 1
    assert OTHER_SHAPES in found


def test_a_blind_shape_gives_one_wrong_verdict_until_a_right_window() -> None:
    check = IndexCheck(block_size=BLOCK)

    def asked(n_answers: int, *, predicted: int, is_blind: bool) -> int:
        verdicts = [
            check.note(
                Slot(0),
                predicted_tokens=predicted * BLOCK,
                cached_tokens=10 * BLOCK,
                isl_tokens=100 * BLOCK,
                prompt_tokens=None,
                now_s=number,
                is_blind=is_blind,
            )
            for number in range(n_answers)
        ]
        return sum(each is not None and each.wrong is not None for each in verdicts)

    assert asked(10 * WINDOW_ANSWERS, predicted=0, is_blind=True) == 1
    assert asked(WINDOW_ANSWERS, predicted=10, is_blind=False) == 0
    assert asked(10 * WINDOW_ANSWERS, predicted=0, is_blind=True) == 1


def test_a_blind_shape_is_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    telemetry, times_s = Telemetry(), iter(range(0, 1000, 2))
    reports = EngineReports(
        Fleet(ModelName("m"), BLOCK),
        EngineInstrumentation(telemetry, "m"),
        clock=lambda: float(next(times_s)),
    )
    for _ in range(2 * ANSWERS_MIN):
        reports.answered(
            Slot(0),
            WorkerRank(WorkerId(1), DpRank(0)),
            predicted_tokens=0,
            cached_tokens=10 * BLOCK,
            isl_tokens=100 * BLOCK,
            prompt_tokens=None,
            shape="chat user tools",
        )
    page = telemetry.render().decode()
    line = 'kvrouter_prompt_shape_answers_total{model="m",prediction="missed",shape="chat user tools"} 12.0'
    assert line in page
    logged = [text for record in caplog.records if "prompt_shape_blind" in (text := record.getMessage())]
    assert len(logged) == 1


SHAPES_BY_NAME = {shape.name: shape for shape in SHAPES}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chat-developer", "chat developer+user"),
        ("tool-pydantic", "chat user tools"),
        ("called", "chat user+assistant+tool tools"),
        ("responses-instructions", "responses system+user"),
        ("responses-called", "responses user+assistant+tool"),
        ("messages-tool", "messages user tools"),
    ],
)
def test_a_shape_consists_of_route_roles_and_features(name: str, expected: str) -> None:
    shape = SHAPES_BY_NAME[name]
    assert shape_of(PromptFields(route=shape.route, **shape.body)) == expected


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "kwargs"),
        ({"reasoning_effort": "low"}, "reasoning"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"continue_final_message": True}, "continued"),
        ({"add_generation_prompt": False}, "continued"),
        ({"tools": [{}], "chat_template_kwargs": {"a": 1}}, "tools kwargs"),
    ],
)
def test_a_shape_names_what_else_changes_the_prompt(fields: dict[str, Any], feature: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert shape_of(PromptFields(messages=messages, **fields)) == f"chat user {feature}"


JSON = st.recursive(
    st.none() | st.booleans() | st.text(max_size=9) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["role", "type", "a"]), inner)
    ),
    max_leaves=9,
)


@given(messages=JSON, instructions=JSON, tools=JSON)
def test_any_client_input_maps_to_a_few_shapes(messages: Any, instructions: Any, tools: Any) -> None:
    fields = PromptFields(route=CallRoute.CHAT, messages=messages, instructions=instructions, tools=tools)
    words = shape_of(fields).split()
    assert words[0] == "chat"
    assert set("+".join(words[1:2]).split("+")) <= {
        "system",
        "developer",
        "user",
        "assistant",
        "tool",
        "other",
        "nobody",
    }
