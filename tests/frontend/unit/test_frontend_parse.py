"""Bodies that are wrong, each with the field that the error names; and what good ones mean."""

import json
from array import array

import msgspec
import pytest

from kvrouter.core.constraints import Pin, RouterMode
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import WorkerId
from kvrouter.core.json_bounds import BLANKS_IN_ROW_MAX, BLANKS_MAX
from kvrouter.core.requests import CallRoute
from kvrouter.frontend.openai.body import (
    DEPTH_MAX,
    ITEMS_MAX,
    NUMBERS_MIN,
    SHORT_BYTES_MAX,
    SHOWN_CHARS_MAX,
    TEXT_BYTES_MAX,
    BodyBounds,
    BodyOverBounds,
    scanned,
)
from kvrouter.frontend.openai.parse import TAINT_CHARS_MAX, TAINTS_MAX, ChatCall, CompletionCall
from tests.testing.body_parsers import parse_chat, parse_completion, parse_either, parse_passthrough

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}
ZONE = "dynamo.topology/zone"


def chat(**fields: object) -> bytes:
    return msgspec.json.encode({**CHAT, **fields})


def completion(**fields: object) -> bytes:
    return msgspec.json.encode({**COMPLETION, **fields})


def routing(**constraints: object) -> bytes:
    return completion(nvext={"routing_constraints": constraints})


BOTH = [
    ({"model": 5}, "model"),
    ({"model": 3}, "model"),
    ({"model": "m" * 300}, "model"),
    ({"n": 2}, "n"),
    ({"n": 0}, "n"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"1": 2.0}}, "logit_bias"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "!"}, "suffix"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"guided_choice": ["yes", "no"]}, "guided_choice"),
    ({"guided_grammar": "root ::= 'a'"}, "guided_grammar"),
    ({"guided_json": {}}, "guided_json"),
    ({"guided_regex": "a+"}, "guided_regex"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"response_format": {"type": "nonsense"}}, "response_format.type"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"cache_salt": "s" * 2000}, "cache_salt"),
    ({"nvext": []}, "nvext"),
    ({"nvext": {"worker": 1}}, "nvext.worker"),
    ({"nvext": {"worker_id": -1}}, "nvext.worker_id"),
    ({"nvext": {"worker_id": "1"}}, "nvext.worker_id"),
    ({"nvext": {"worker_id": 2**63}}, "nvext.worker_id"),
    ({"nvext": {"dp_rank": 1}}, "nvext.dp_rank"),
    ({"nvext": {"prefill_dp_rank": 1}}, "nvext.prefill_dp_rank"),
    ({"nvext": {"extra_fields": ["worker_id", "colour"]}}, "nvext.extra_fields[1]"),
    (
        {"nvext": {"router_config_override": {"router_mode": "best"}}},
        "nvext.router_config_override.router_mode",
    ),
    (
        {"nvext": {"router_config_override": {"overlap_score_weight": -1}}},
        "nvext.router_config_override.overlap_score_weight",
    ),
    (
        {"nvext": {"router_config_override": {"router_temperature": -0.5}}},
        "nvext.router_config_override.router_temperature",
    ),
    (
        {"nvext": {"router_config_override": {"temperature": 1}}},
        "nvext.router_config_override.temperature",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BOTH, ids=[str(fields)[:60] for fields, _ in BOTH])
def test_a_wrong_field_is_named_on_both_routes(fields: dict[str, object], param: str) -> None:
    for parse, body in ((parse_chat, chat(**fields)), (parse_completion, completion(**fields))):
        with pytest.raises(InvalidRequest) as caught:
            parse(body)
        assert caught.value.param == param
        assert caught.value.message.startswith(param)
        assert caught.value.status_hint == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "hi"}}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt[1]"),
        ({"prompt": [2**32]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.0]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[1, -2]]}, "prompt[0][1]"),
        ({"prompt": [["a"]]}, "prompt[0]"),
        ({"prompt": 7}, "prompt"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(completion(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("constraints", "field"),
    [
        ({"required_taints": [""]}, "required_taints"),
        ({"required_taints": ["  "]}, "required_taints"),
        ({"required_taints": "gpu=h100"}, "required_taints"),
        ({"required_taints": [f"t{n}" for n in range(TAINTS_MAX + 1)]}, "required_taints"),
        ({"required_taints": ["t" * (TAINT_CHARS_MAX + 1)]}, "required_taints"),
        ({"required_taints": [f"{ZONE}=a", f"{ZONE}=b"]}, "required_taints"),
        ({"required_taints": [ZONE]}, "required_taints"),
        ({"required_taints": [f"{ZONE}="]}, "required_taints"),
        ({"preferred_taints": {"": 1.0}}, "preferred_taints"),
        ({"preferred_taints": {"dynamo.topology/=a": 1.0}}, "preferred_taints"),
        ({"required": ["a"]}, "required"),
    ],
)
def test_invalid_constraints_are_named(constraints: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(routing(**constraints))
    assert caught.value.param == f"nvext.routing_constraints.{field}"


@pytest.mark.parametrize(
    "constraints",
    [
        {"required_taints": [f"{ZONE}=a", "dynamo.topology/rack=r1"]},
        {"required_taints": [f"{ZONE}=a"], "preferred_taints": {f"{ZONE}=a": -1.0}},
        {"required_taints": [f"{ZONE}=a", f"{ZONE}= a"]},
        {"preferred_taints": {f"{ZONE}=a": 1.0, f"{ZONE}=b": -1.0}},
    ],
)
def test_constraints_that_do_not_contradict_pass(constraints: dict[str, object]) -> None:
    call = parse_completion(routing(**constraints)).call
    assert call.constraints.required_taints or call.constraints.preferred_taints


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize(
    ("where", "param"),
    [
        (b'"temperature":%s', "temperature"),
        (
            b'"nvext":{"router_config_override":{"overlap_score_weight":%s}}',
            "nvext.router_config_override.overlap_score_weight",
        ),
    ],
)
def test_a_non_finite_number_is_named(number: bytes, where: bytes, param: str) -> None:
    body = b'{"model":"m","prompt":"hi",' + where % number + b"}"
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(body)
    assert caught.value.param == param


@pytest.mark.parametrize("number", [b"NaN", b"1" + 400 * b"0"])
def test_a_non_numeric_taint_weight_is_named(number: bytes) -> None:
    body = b'{"model":"m","prompt":"hi","nvext":{"routing_constraints":{"preferred_taints":{"a":%s}}}}'
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(body % number)
    assert caught.value.param is not None
    assert caught.value.param.startswith("nvext.routing_constraints.preferred_taints")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model":"m",}',
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
    ],
)
def test_invalid_json_is_refused_without_a_field(body: bytes) -> None:
    for parse in (parse_chat, parse_completion, parse_either):
        with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
            parse(body)
        assert caught.value.param is None


def test_quotes_in_errors_are_short() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(completion(nvext={"x" * 100_000: 1}))
    assert len(caught.value.message) < 2 * SHOWN_CHARS_MAX
    assert len(caught.value.param or "") < 2 * SHOWN_CHARS_MAX


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(b'{"model":"m"}')
    assert caught.value.param == "prompt"


def test_unknown_body_fields_are_accepted() -> None:
    assert parse_chat(chat(user="u1", metadata={"a": 1}, store=True)).call.model == "m"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("routing_constraints", {"required_taints": ["gpu=h100"]}),
        ("router_config_override", {"router_mode": "random"}),
        ("worker_id", 0),
        ("dp_rank", 0),
        ("prefill_worker_id", 1),
        ("prefill_dp_rank", 1),
        ("extra_fields", []),
    ],
)
def test_a_misplaced_nvext_field_is_refused_with_its_place(field: str, value: object) -> None:
    for parse, body in (
        (parse_chat, chat(**{field: value})),
        (parse_completion, completion(**{field: value})),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field}: belongs into nvext, as nvext.{field}") as caught:
            parse(body)
        assert caught.value.param == field


def test_unsupported_fields_with_neutral_values_pass_on_both_routes() -> None:
    nothing: dict[str, object] = {
        "audio": None,
        "best_of": 1,
        "echo": False,
        "function_call": "none",
        "functions": [],
        "guided_json": None,
        "logit_bias": {},
        "modalities": ["text"],
        "suffix": None,
        "tool_choice": "auto",
        "tools": [],
        "worker_id": None,
    }
    assert parse_completion(completion(**nothing, logprobs=None)).call.model == "m"
    assert parse_chat(chat(**nothing, logprobs=False, top_logprobs=0)).call.model == "m"


def test_max_tokens_defaults() -> None:
    assert parse_chat(chat()).call.max_tokens is None
    assert parse_chat(chat(max_completion_tokens=7)).call.max_tokens == 7
    assert parse_completion(completion()).call.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "meant"),
    [("hi", "hi"), (["hi"], "hi"), ("[1]", "[1]"), (["[1]"], "[1]"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])],
)
def test_a_prompt_is_read_in_each_of_its_forms(prompt: object, meant: str | list[int]) -> None:
    read = parse_completion(completion(prompt=prompt)).prompt
    assert read == (meant if isinstance(meant, str) else array("I", meant))


def test_routing_hints_are_read() -> None:
    call = parse_chat(
        chat(
            nvext={
                "worker_id": 3,
                "prefill_worker_id": 4,
                "prefill_dp_rank": 1,
                "cache_salt": "tenant",
                "router_config_override": {"router_mode": "random", "router_temperature": 0.5},
                "routing_constraints": {"required_taints": ["a"], "preferred_taints": {"b": 0.5}},
            }
        )
    ).call
    assert call.pin == Pin(WorkerId(3))
    assert call.prefill_pin is not None
    assert call.prefill_pin.dp_rank == 1
    assert call.cache_namespace == "tenant"
    assert call.override.router_mode is RouterMode.RANDOM
    assert call.constraints.required_taints == frozenset({"a"})
    assert call.constraints.preferred_taints == {"b": 0.5}


def test_min_tokens_must_not_be_above_max_tokens() -> None:
    call = parse_completion(completion(min_tokens=20)).call
    with pytest.raises(InvalidRequest) as caught:
        call.sampling(16)
    assert caught.value.param == "min_tokens"


def test_sampling_keeps_the_sent_values() -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "seed": 7,
        "ignore_eos": True,
        "stop_token_ids": [3],
    }
    sampling = parse_completion(completion(**fields)).call.sampling(16)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 4, 7)
    assert sampling.ignore_eos
    assert sampling.stop_token_ids == (3,)
    assert sampling.max_tokens == 16


def test_parse_either_tells_the_route_by_its_field() -> None:
    assert isinstance(parse_either(chat()), ChatCall)
    assert isinstance(parse_either(completion()), CompletionCall)
    with pytest.raises(InvalidRequest) as caught:
        parse_either(chat(prompt="hi"))
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        parse_either(b'{"model":"m"}')
    assert caught.value.param == "messages"


LIST = b'{"model":"m","messages":[{"role":"user","content":"a"}],"%s":[%s]}'


@pytest.mark.parametrize(
    ("body", "param", "bound"),
    [
        (LIST % (b"tools", b",".join([b"{}"] * (ITEMS_MAX + 1))), "tools", "items"),
        (LIST % (b"stop", b",".join([b'"a"'] * (ITEMS_MAX + 1))), "stop", "items"),
        (LIST % (b"stop_token_ids", b",".join([b"1"] * (ITEMS_MAX + 1))), "stop_token_ids", "items"),
        (LIST % (b"prompt", b",".join([b"[]"] * (ITEMS_MAX + 1))), "prompt", "items"),
        (LIST % (b"prompt", b",".join([b"1"] * (NUMBERS_MIN + 1))), "prompt", "numbers"),
        (LIST % (b"tools", b",".join([b"[" + b"0," * 99 + b"0]"] * 700)), "tools", "values"),
        (LIST % (b"tools", b"[" * 100_000), "tools" + "[0]" * (DEPTH_MAX - 1), "depth"),
        (LIST % (b"tools", b'{"a":{"b":' + b"1" * 1000 + b"}}"), "tools[0].a.b", "number_bytes"),
        (LIST % (b"tools", b'"' + b"a" * 5000 + b"\\n" * TEXT_BYTES_MAX + b'"'), "tools", "text_bytes"),
        (LIST % (b"nvext", b'{"a":"' + b"a" * SHORT_BYTES_MAX + b'"}'), "nvext[0].a", "short_bytes"),
        (LIST % (b"tools", b'{"' + b"a" * 5000 + b'":1}'), "tools[0]", "key_bytes"),
        (LIST % (b"tools", b" " * (BLANKS_IN_ROW_MAX + 1)), "tools", "blanks"),
        (LIST % (b"tools", b"1," + (b" " * 60_000 + b"1,") * 69 + b" " * 60_000), "tools", "blanks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_over_its_bounds_names_the_path(body: bytes, param: str, bound: str) -> None:
    for parse in (parse_chat, parse_completion, parse_either):
        with pytest.raises(BodyOverBounds) as caught:
            parse(body)
        assert (caught.value.param, caught.value.bound) == (param, bound)
        assert caught.value.message.startswith(f"{param}: ")
        assert len(caught.value.message) < 2 * SHOWN_CHARS_MAX


def test_escaped_field_names_mean_the_same_as_plain_ones() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_either(b'{"model":"m","\\u0070rompt":"hi","m\\u0065ssages":[]}')
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        parse_passthrough(
            CallRoute.COMPLETION, b'{"model":"m","prompt":"a","kv_transfer_para\\u006ds":{"a":1}}'
        )
    assert caught.value.param == "kv_transfer_params"


@pytest.mark.parametrize(
    "body",
    [
        '{}{"model":"mock","prompt":[[1]]}',
        '{"model":"mock","prompt":[[1]]}{}',
        '{"model":"mock","prompt":{}[[1]]}',
        '{"model":"mock","prompt":[{}[1]]}',
        '{"model":"mock","prompt":[[{}1]]}',
        '{"model":"mock","prompt":[[1]{}]}',
        '{"model":"mock","prompt":[{}1]}',
        '{"model":"mock","prompt":[{}"a"]}',
        '{"model":"mock","prompt":"a","nvext":{{}}}',
    ],
)
def test_runs_of_blanks_are_bounded_anywhere_in_a_body(body: str) -> None:
    assert parse_completion(body.replace("{}", " " * BLANKS_IN_ROW_MAX, 1).encode()).prompt
    with pytest.raises(BodyOverBounds, match="more than 65536 blanks in a row") as caught:
        parse_completion(body.replace("{}", " " * (BLANKS_IN_ROW_MAX + 1), 1).encode())
    assert caught.value.bound == "blanks"


def test_an_indented_body_of_a_million_token_ids_is_read() -> None:
    ids = json.dumps({"model": "m", "prompt": [[1] * 1_000_000]}, indent=2).encode()
    assert ids.count(b" ") > BLANKS_MAX
    assert scanned(ids, BodyBounds(numbers=1_000_000)).fields
