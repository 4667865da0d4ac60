"""``nvext`` under the names of Dynamo's clients, in bodies and headers, and what is not known of it."""

import json
from array import array
from functools import reduce
from operator import attrgetter
from pathlib import Path

import pytest

from kvrouter.core.constraints import Pin
from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.core.requests import DEFAULT_LEVEL, CallRoute, ServiceLevel
from kvrouter.frontend.instrumentation import HINTS_LOGGED_MAX, FrontendInstrumentation
from kvrouter.frontend.openai.body import AgentHints
from kvrouter.frontend.openai.parse import FIELDS_MAX, FIELDS_WITHOUT_EFFECT, HEADERS, Call, NvextReader
from kvrouter.frontend.tenant_priorities import read_tenants
from kvrouter.telemetry import Telemetry
from tests.testing.body_parsers import parse_completion, parse_passthrough


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", **fields}).encode()


def call(reader: NvextReader | None = None, /, **nvext: object) -> Call:
    return parse_completion(body(nvext=nvext), reader or NvextReader()).call


def under(*headers: tuple[str, str]) -> NvextReader:
    return NvextReader([(name.encode(), value.encode()) for name, value in headers])


def at(path: str, value: object) -> dict[str, object]:
    """Fields with this value at a dotted path."""
    *outer, inner = path.split(".")
    return reduce(lambda found, name: {name: found}, reversed(outer), {inner: value})


def refused(reader: NvextReader | None = None, /, **nvext: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call(reader, **nvext)
    return caught.value


@pytest.mark.parametrize("name", ["worker_id", "decode_worker_id", "backend_instance_id"])
def test_the_worker_field_has_two_aliases(name: str) -> None:
    assert call(**{name: 7, "dp_rank": 1}).pin == Pin(WorkerId(7), DpRank(1))
    assert call(**{name: 7, "worker_id": 7}).pin == Pin(WorkerId(7), None)
    if name != "worker_id":
        error = refused(**{name: 7, "worker_id": 8})
        assert error.param == f"nvext.{name}"
        assert "nvext.worker_id says the same, and differs" in error.message


@pytest.mark.parametrize("header", [header.decode() for header in HEADERS])
def test_each_header_sets_its_field_and_wins_over_the_body(header: str) -> None:
    field = HEADERS[header.encode()]
    with_worker = {"dp_rank": "worker_id", "prefill_dp_rank": "prefill_worker_id"}.get(field)
    nvext: dict[str, object] = {} if with_worker is None else {with_worker: 5}
    stated = attrgetter(field)
    wished = call(under((header, " 7 ")), **nvext).nvext
    assert str(stated(wished)) == "7"
    same = at(field, "7" if field == "cache_salt" else 7)
    assert call(under((header, "7")), **nvext, **same).nvext == wished
    assert str(stated(call(under((header, "8")), **nvext, **same).nvext)) == "8"
    if field != "cache_salt":
        below_least = "-2147483649" if field == "agent_hints.priority" else "-1"
        for text in ("", below_least, "1.0", "seven", str(2**63), "١", "--1", "+1"):
            with pytest.raises(InvalidRequest, match="must be a whole number") as caught:
                call(NvextReader([(header.encode(), text.encode())]), **nvext)
            assert caught.value.param == header


def test_a_header_wins_over_each_name_of_its_field() -> None:
    for name in ("worker_id", "decode_worker_id", "backend_instance_id"):
        pinned = call(under(("x-worker-instance-id", "8")), **{name: 7, "dp_rank": 1})
        assert pinned.pin == Pin(WorkerId(8), DpRank(1))


def test_dynamos_own_header_wins_over_the_short_one() -> None:
    for headers in (
        (("x-worker-instance-id", "1"), ("x-dynamo-worker-instance-id", "2")),
        (("x-dynamo-worker-instance-id", "2"), ("x-worker-instance-id", "1")),
    ):
        assert call(under(*headers)).pin == Pin(WorkerId(2), None)
    with pytest.raises(InvalidRequest, match=r"^x-worker-instance-id: must be a whole number"):
        call(under(("x-worker-instance-id", "a"), ("x-dynamo-worker-instance-id", "2")))


def test_an_unset_prefill_rank_of_the_gateway_is_ignored() -> None:
    unset = ("x-dynamo-prefill-dp-rank", str(2**32 - 1))
    opened = call(under(unset, ("x-dynamo-prefill-instance-id", "3")))
    assert opened.prefill_pin == Pin(WorkerId(3), None)
    with pytest.raises(InvalidRequest, match="must be a whole number"):
        call(under(("x-dynamo-dp-rank", str(2**32 - 1))), worker_id=3)


@pytest.mark.parametrize("header", [header.decode() for header in HEADERS])
def test_a_repeated_header_with_different_values_is_refused(header: str) -> None:
    with pytest.raises(InvalidRequest, match="is there twice") as caught:
        call(under((header, "7"), (header, "8")))
    assert caught.value.param == header


def test_a_repeated_header_with_equal_values_counts_once() -> None:
    assert call(under(("x-worker-instance-id", "7"), ("x-worker-instance-id", " 7"))).pin == Pin(
        WorkerId(7), None
    )


def test_headers_for_other_fields_leave_body_fields_unchanged() -> None:
    assert call(under(("x-prefill-instance-id", "3"), ("x-dp-rank", "1")), worker_id=2).prefill_pin == Pin(
        WorkerId(3), None
    )


def test_every_name_of_the_salt_sets_the_cache_namespace() -> None:
    assert call(cache_salt="a").cache_namespace == "a"
    assert call(under(("x-tenant-id", "a"))).cache_namespace == "a"
    assert call(cache_salt="").cache_namespace is None
    assert parse_completion(body(cache_salt="b")).call.cache_namespace == "b"
    assert parse_completion(body(cache_salt="b"), under(("x-tenant-id", "a"))).call.cache_namespace == "a"
    assert parse_completion(body(cache_salt="b"), under(("x-tenant-id", ""))).call.cache_namespace == "b"
    with pytest.raises(InvalidRequest, match=r"^cache_salt: nvext.cache_salt says the same, and differs"):
        parse_completion(body(cache_salt="b", nvext={"cache_salt": "a"}))
    with pytest.raises(InvalidRequest, match="at most 1024"):
        call(under(("x-tenant-id", "a" * 1025)))


def test_hints_and_headers_set_the_service_level_of_every_route() -> None:
    hints = {"priority": -30, "strict_priority": 2}
    level = ServiceLevel(strict_priority=2, priority_s=-30.0, ttft_slo_s=0.25)
    assert call(agent_hints=hints, slo_ttft_ms=250).service_level == level
    passed = parse_passthrough(
        CallRoute.COMPLETION,
        body(nvext={"agent_hints": hints}, priority=9, service_tier="flex"),
        under(("x-slo-ttft-ms", "250")),
    )
    assert passed.call.service_level == level
    assert json.loads(passed.client_call.body) == json.loads(body(priority=9, service_tier="flex"))
    assert call().service_level is DEFAULT_LEVEL
    assert call(agent_hints={"priority": None}).service_level == DEFAULT_LEVEL


def test_a_header_replaces_one_hint_and_keeps_the_others_of_the_body() -> None:
    hints = {"priority": 5, "strict_priority": 1}
    headers = under(("x-dynamo-request-priority", "-7"), ("x-request-priority", "8"))
    assert call(headers, agent_hints=hints).nvext.agent_hints == AgentHints(-7, 1)
    assert call(headers).nvext.agent_hints == AgentHints(-7, None)
    strict = under(("x-request-strict-priority", "0"))
    assert call(strict, agent_hints=hints).nvext.agent_hints == AgentHints(5, 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("agent_hints", 5),
        ("agent_hints.priority", 2**31),
        ("agent_hints.priority", "high"),
        ("agent_hints.priority", 0.5),
        ("agent_hints.strict_priority", -1),
        ("agent_hints.strict_priority", 2**32),
        ("agent_hints.urgency", 1),
        ("slo_ttft_ms", 0),
        ("slo_ttft_ms", 0.5),
    ],
)
def test_a_bad_hint_of_urgency_is_refused_by_its_path(path: str, value: object) -> None:
    error = refused(**at(path, value))
    assert error.param == f"nvext.{path}"
    assert error.message.startswith(f"nvext.{path}: ")


def test_priorities_of_a_tenant_replace_those_that_its_requests_state() -> None:
    tenants = read_tenants('{"gold": {"strict_priority": 1}, "*": {"priority": -60}}')
    headers = [(b"x-dynamo-request-strict-priority", b"9")]
    for nvext in ({"cache_salt": "gold"}, {"cache_salt": "gold", "agent_hints": {"priority": 3}}):
        assert call(NvextReader(headers, tenants=tenants), **nvext).nvext.agent_hints == AgentHints(None, 1)
    for nvext in ({}, {"cache_salt": "else"}):
        assert call(NvextReader(headers, tenants=tenants), **nvext).nvext.agent_hints == AgentHints(-60)
    del tenants["*"]
    assert call(NvextReader(headers, tenants=tenants)).nvext.agent_hints == AgentHints(None, 9)


def test_a_wrong_table_of_tenants_names_the_setting_and_the_tenant(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("gold: {strict_priority: 1}\nbatch: {priority: high}\n")
    with pytest.raises(ConfigError, match=rf"^tenant_priorities: {file}:2: batch: Expected `int") as caught:
        read_tenants(str(file))
    assert caught.value.param == "tenant_priorities"
    with pytest.raises(ConfigError, match=r"^tenant_priorities:1: gold: .*`urgency`"):
        read_tenants('{"gold": {"urgency": 1}}')
    with pytest.raises(ConfigError, match=r"^tenant_priorities: .*cannot be read"):
        read_tenants(str(tmp_path / "absent.yaml"))
    file.write_text("123: {strict_priority: 1}\n")
    with pytest.raises(ConfigError, match=r"^tenant_priorities: .*123 is no text: write .* in quotes"):
        read_tenants(str(file))
    file.write_text("gold: {strict_priority: 1}\n")
    assert read_tenants(str(file)) == {"gold": AgentHints(None, 1)}


def test_an_engine_that_takes_calls_gets_the_salt() -> None:
    passed = parse_passthrough(CallRoute.COMPLETION, body(), under(("x-tenant-id", "a")))
    assert json.loads(passed.client_call.body)["cache_salt"] == "a"
    other = parse_passthrough(CallRoute.COMPLETION, body(cache_salt="b"), under(("x-tenant-id", "a")))
    assert json.loads(other.client_call.body)["cache_salt"] == "a"
    own = body(cache_salt="a")
    assert parse_passthrough(CallRoute.COMPLETION, own, under(("x-tenant-id", "a"))).client_call.body == own
    with pytest.raises(InvalidRequest, match="token_data"):
        parse_passthrough(CallRoute.COMPLETION, body(nvext={"token_data": [1]}))


@pytest.mark.parametrize("name", FIELDS_WITHOUT_EFFECT)
def test_a_field_without_effect_is_refused_with_the_reason(name: str) -> None:
    error = refused(**at(name, {"priority": 5}))
    assert error.param == f"nvext.{name}"
    assert error.message == f"nvext.{name}: has no effect here: {FIELDS_WITHOUT_EFFECT[name]}"


def test_unknown_values_are_refused_with_their_index() -> None:
    assert refused(worker=1).message == "nvext.worker: unknown field (did you mean worker_id?)"
    assert refused(annotations=["query_instance_id:", "llm_metrics"]).param == "nvext.annotations[1]"
    assert refused(extra_fields=["worker_id", "engine_data"]).param == "nvext.extra_fields[1]"


def test_ignored_hints_are_dropped_and_reported() -> None:
    reported: list[str] = []
    reader = NvextReader(
        [(b"x-dynamo-meta-policy-class", b"5")],
        on_unknown=lambda at, _: reported.append(at),
        on_header=lambda at, what: reported.append(f"{at} {what}"),
    )
    wished = call(
        reader,
        agent_hints={"osl": 5, "priority": 6},
        colour="red",
        extra_fields=["worker_id", "engine_data"],
        annotations=["llm_metrics"],
        worker_id=3,
    )
    assert wished.pin == Pin(WorkerId(3), None)
    assert wished.nvext.extra_fields == ("worker_id",)
    assert wished.nvext.agent_hints == AgentHints(priority=6)
    assert not wished.nvext.is_query
    assert reported[:4] == [
        "nvext.colour",
        "nvext.agent_hints.osl",
        "nvext.extra_fields[1]",
        "nvext.annotations[0]",
    ]
    assert reported[4].startswith("x-dynamo-meta-policy-class has no effect here")
    misspelt = {"required_taint": ["a"]}
    assert refused(reader, routing_constraints=misspelt).param == "nvext.routing_constraints.required_taint"


@pytest.mark.parametrize("written", ["query_instance_id:", "query_instance_id", "query_instance_id:abc"])
def test_a_routing_query_is_recognized_in_all_forms(written: str) -> None:
    assert call(annotations=[written]).nvext.is_query
    assert not call().nvext.is_query


def test_each_ignored_hint_is_logged_once_up_to_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    observed = FrontendInstrumentation(Telemetry())
    for _ in range(3):
        for place in range(2 * HINTS_LOGGED_MAX):
            observed.routing_hint_ignored(f"nvext.made_up_{place}", "unknown field")
            observed.routing_hint_ignored(f"nvext.extra_fields[{place}]", "must be worker_id or timing")
    assert len(caplog.records) == HINTS_LOGGED_MAX


def test_too_many_nvext_fields_are_refused_unreported() -> None:
    reported: list[str] = []
    reader = NvextReader(on_unknown=lambda at, _: reported.append(at))
    many = {f"field{n}": 1 for n in range(FIELDS_MAX + 1)}
    assert (refused(reader, **many).param, reported) == ("nvext", [])
    assert (refused(reader, agent_hints=many).param, reported) == ("nvext.agent_hints", [])


def test_token_data_may_be_long_and_must_be_token_ids() -> None:
    ids = list(range(50_000))
    assert call(token_data=ids).nvext.token_data == array("I", ids)
    assert call(token_data=None).nvext.token_data is None
    assert refused(token_data=[1, "a"]).param == "nvext.token_data"
    wrongs: tuple[object, ...] = (1, "a", {}, [-1], [[1]])
    for wrong in wrongs:
        assert (refused(token_data=wrong).param or "").startswith("nvext.token_data")
