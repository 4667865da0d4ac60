"""A request's trace, from its client's header through the router's spans to what the engine is given."""

import json
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvrouter.app import trace_export
from kvrouter.core.errors import ConfigError
from kvrouter.telemetry.log_events import FIELD_NAMES
from kvrouter.telemetry.metrics import Telemetry
from kvrouter.text.source import MOCK_FOLDER
from tests.testing.constants import SetConstants
from tests.testing.log_events import event_of, events_of
from tests.testing.mock_fleet import PATIENT_S, fleet_file, zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server, user, words
from tests.testing.otlp_collector import OtlpCollector, otlp_collector, span_attributes
from tests.testing.scripted_engine import ScriptedAnswer, ScriptedEngine, scripted_engine, sse

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{CLIENT_SPAN}-01"
SENT = {"traceparent": PARENT, "tracestate": "rojo=1", "baggage": "team=a"}


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        trace_export.EXPORTER,
        *trace_export.ENDPOINTS,
        *trace_export.PROTOCOLS,
        "OTEL_SDK_DISABLED",
    ):
        monkeypatch.delenv(name, raising=False)


pytestmark = pytest.mark.usefixtures("no_variables")


@asynccontextmanager
async def collecting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OtlpCollector]:
    """A collector that the router sends its spans to."""
    async with otlp_collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        yield found


async def ask(
    here: MockServer, headers: Mapping[str, str] | None = None, *, n: int = 40, max_tokens: int = 4
) -> httpx.Response:
    body = {"model": MODEL, "messages": user(words(n=n)), "max_tokens": max_tokens}
    response = await here.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def answered() -> ScriptedAnswer:
    event = {
        "id": "a", "object": "text_completion", "created": 1, "model": "tiny",
        "choices": [{"index": 0, "text": " a", "token_ids": [5], "finish_reason": "stop"}],
    }  # fmt: skip
    return ScriptedAnswer((sse(event),))


@asynccontextmanager
async def before(engine: ScriptedEngine) -> AsyncIterator[MockServer]:
    """The router before an engine that takes calls as they are written."""
    text = f"""
version: 1
models: [{{name: tiny, tokenizer: '{MOCK_FOLDER}'}}]
workers: [{{name: w, engine: {{kind: vllm, url: '{engine.url}', kv_events: false}}}}]
"""
    async with mock_server(fleet_file(text)) as here:
        yield here


async def stream(here: MockServer, **headers: str) -> str:
    body = {"model": "tiny", "prompt": words(), "max_tokens": 4, "stream": True}
    response = await here.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.text


async def test_an_engine_receives_the_clients_trace_headers() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.extend((answered(), answered()))
        await stream(here, **SENT)
        given = (await engine.called()).headers
        assert {name: given.get(name) for name in SENT} == SENT
        await stream(here, traceparent="nonsense", tracestate="a=1", baggage="team=b")
        given = (await engine.called(2)).headers
        assert {name: given.get(name) for name in SENT} == {**dict.fromkeys(SENT), "baggage": "team=b"}


async def test_an_engine_receives_its_legs_span(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting(monkeypatch) as found, scripted_engine() as engine:
        async with before(engine) as here:
            engine.answers.append(answered())
            await stream(here, **SENT)
            given = (await engine.called()).headers
        leg = found.one("aggregated")
        assert given["traceparent"] == f"00-{TRACE_ID}-{leg.span_id.hex()}-01"
        assert (given["tracestate"], given["baggage"]) == ("rojo=1", "team=a")
        assert found.inside(leg) == ["prefill", "decode"]


async def test_a_pairs_spans_are_exported_in_the_clients_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    async with collecting(monkeypatch) as found:
        async with mock_server(zoned_fleet(handoff="synchronous")) as here:
            await ask(here, SENT)
        (resource,) = found.resources[:1]
        assert resource["service.name"] == "kvrouter"
        assert resource["deployment.environment"] == "test"
        call = found.one("POST /v1/chat/completions")
        assert call.trace_id.hex() == TRACE_ID
        assert call.parent_span_id.hex() == CLIENT_SPAN
        assert {span.trace_id for span in found.spans} == {call.trace_id}
        steps = ["receive", "tokenize", "queue", "decide", "prefill", "decode", "transfer"]
        assert sorted(found.inside(call)) == sorted(steps)
        for span in found.spans:
            assert call.start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano <= call.end_time_unix_nano
        starts = [found.one(name).start_time_unix_nano for name in steps[:5]]
        assert starts == sorted(starts)
        transfer = found.one("transfer")
        assert transfer.start_time_unix_nano == found.one("prefill").end_time_unix_nano
        (first,) = found.one("decode").events
        assert (first.name, first.time_unix_nano) == ("first_token", transfer.end_time_unix_nano)
        decided = span_attributes(list(found.one("decide").attributes))
        prefill, decode = (
            span_attributes(list(found.one(name).attributes)) for name in ("prefill", "decode")
        )
        assert decided["kvrouter.prefill.worker"] == prefill["kvrouter.worker"]
        assert decided["kvrouter.decode.worker"] == decode["kvrouter.worker"]
        assert decided["kvrouter.constraint"] == "required"
        for term in ("cost", "overlap_blocks", "prefill_blocks", "candidates", "queue_ms", "expected_ms"):
            assert f"kvrouter.prefill.{term}" in decided
        said = span_attributes(list(call.attributes))
        assert said["http.response.status_code"] == 200
        assert (said["kvrouter.attempts"], said["kvrouter.completion_tokens"]) == (1, 4)


async def test_a_call_without_a_trace_begins_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting(monkeypatch) as found:
        async with mock_server(zoned_fleet()) as here:
            await ask(here)
            await ask(here)
        calls = found.named("POST /v1/chat/completions")
        assert len({call.trace_id for call in calls}) == 2
        assert [call.parent_span_id for call in calls] == [b"", b""]


async def test_an_unsampled_client_trace_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting(monkeypatch) as found:
        async with mock_server(zoned_fleet()) as here:
            await ask(here, {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-00"})
            await ask(here)
        assert TRACE_ID not in {span.trace_id.hex() for span in found.spans}
        assert found.spans


async def test_a_refused_call_has_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting(monkeypatch) as found:
        async with mock_server(zoned_fleet()) as here:
            body = {"model": "nobody", "messages": user("a")}
            assert (await here.http.post("/v1/chat/completions", json=body)).status_code == 404
        said = span_attributes(list(found.one("POST /v1/chat/completions").attributes))
        assert (said["http.response.status_code"], said["error.type"]) == (404, "model_not_found")
        assert not found.named("decide")


RESUMED = f"""
version: 1
models: [{{name: mock, block_size: 16}}]
workers: [{{name: both, replicas: 2, engine: {{kv_wait_expiry_s: {PATIENT_S}}}}}]
speedup: 40
"""


async def test_a_retrys_leg_spans_link_to_the_earlier_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with collecting(monkeypatch) as found:
        async with mock_server(fleet_file(RESUMED)) as here:
            await here.resume(SENT)
        lost, again = sorted(found.named("aggregated"), key=lambda span: span.start_time_unix_nano)
        assert [link.span_id for link in again.links] == [lost.span_id]
        assert not lost.links
        assert lost.status.code == lost.status.STATUS_CODE_ERROR
        assert again.status.code == again.status.STATUS_CODE_UNSET
        assert len(found.named("decide")) == 2
        call = found.one("POST /v1/completions")
        assert span_attributes(list(call.attributes))["kvrouter.attempts"] == 2


async def test_log_line_decisions_and_exemplars_name_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvrouter")
    async with mock_server(zoned_fleet()) as here:
        response = await ask(here, SENT)
        await ask(here)
        decisions = await here.http.get(f"/v1/decisions/{response.headers['x-request-id']}")
        accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
        page = await here.http.get("/metrics", headers=accept)
    named = [event_of(record) for record in caplog.records if _fields(record).get("trace_id") == TRACE_ID]
    assert named == ["request_ended"]
    assert events_of(caplog.records).count("request_ended") == 2
    assert [attempt["trace_id"] for attempt in decisions.json()["attempts"]] == [TRACE_ID]
    assert page.headers["content-type"].startswith("application/openmetrics-text")
    exemplars = {
        sample.name: sample.exemplar.labels
        for family in text_string_to_metric_families(page.text)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    }
    for name in ("time_to_first_token", "time_to_first_token_by_cache_hit", "request_duration"):
        assert exemplars[f"kvrouter_{name}_seconds_bucket"] == {"trace_id": TRACE_ID}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What a line says, in known fields only: those of ``request_ended`` are checked nowhere else."""
    fields: dict[str, object] = getattr(record, "kvrouter_fields", {})
    assert FIELD_NAMES.issuperset(fields)
    return fields


async def test_each_ended_call_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvrouter")
    async with mock_server(zoned_fleet()) as here:
        first = await ask(here, n=64, max_tokens=5)
        await ask(here, n=64, max_tokens=5)
        body = {"model": MODEL, "messages": user("a"), "max_tokens": -1}
        assert (await here.http.post("/v1/chat/completions", json=body)).status_code == 400
    ended = [_fields(record) for record in caplog.records if event_of(record) == "request_ended"]
    assert [line["status"] for line in ended] == [200, 200, 400]
    whole, again, refused = ended
    assert whole["request_id"] == first.headers["x-request-id"]
    assert whole["route"] == "/v1/chat/completions"
    assert whole["model"] == MODEL
    for leg in ("prefill", "decode"):
        worker = str(whole[f"{leg}_worker"])
        assert worker.partition("/")[0] == first.headers[f"x-kvrouter-{leg}-worker"]
    assert (whole["attempts"], whole["resumes"], whole["output_tokens"]) == (1, 0, 5)
    assert whole["isl_tokens"] == first.json()["usage"]["prompt_tokens"]
    assert (whole["cached_tokens"], whole["predicted_tokens"]) == (0, 0)
    assert again["cached_tokens"] == again["predicted_tokens"] != 0
    ttft_s, duration_s = whole["ttft_s"], whole["duration_s"]
    assert isinstance(ttft_s, float)
    assert isinstance(duration_s, float)
    assert 0 < ttft_s <= duration_s
    assert refused["code"] == "invalid_request"
    assert "attempts" not in refused
    for line in ended:
        assert words(n=1).strip() not in json.dumps(line)


async def test_line_of_an_ended_call_has_all_of_its_last_decision(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kvrouter")
    async with mock_server(fleet_file(RESUMED)) as here:
        body = await here.resume()
        assert (await here.http.post("/v1/completions", json={**body, "max_tokens": -1})).status_code == 400
        assert (await here.http.post("/v1/completions", json={**body, "model": "none"})).status_code == 404
    first, last = (_fields(record) for record in caplog.records if event_of(record) == "decision")
    ended, *refused = (_fields(record) for record in caplog.records if event_of(record) == "request_ended")
    assert first["decode_worker"] != last["decode_worker"]
    decided = {name: value for name, value in last.items() if name not in ("attempt", "isl_tokens")}
    assert {name: ended.get(name) for name in decided} == decided
    assert (last["attempt"], ended["attempts"], ended["resumes"]) == (1, 2, 1)
    assert "attempt" not in ended, "it would say again what attempts says"
    assert ended["isl_tokens"] == first["isl_tokens"] != last["isl_tokens"], "a resumed prompt has its answer"
    assert [decided.keys() & line.keys() for line in refused] == 2 * [{"request_id", "model"}]


async def test_a_lost_collector_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants, caplog: pytest.LogCaptureFixture
) -> None:
    async with otlp_collector() as gone:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", gone.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    set_constants(trace_export, FLUSH_LIMIT_S=2.0)
    async with mock_server(zoned_fleet()) as here:
        for _ in range(3):
            await ask(here)
    assert "spans_not_sent" in events_of(caplog.records)


async def test_tracing_without_the_otel_extra_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    async with mock_server(zoned_fleet()) as here:
        await ask(here, SENT)
    (warned,) = [record for record in caplog.records if event_of(record) == "config_warning"]
    assert "kvrouter[otel]" in str(_fields(warned)["detail"])


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SERVICE_NAME": "a"}, False),
    ],
)
def test_environment_variables_decide_whether_traces_are_sent(variables: dict[str, str], asked: bool) -> None:
    assert trace_export.asks_for_traces(variables) is asked


async def test_gen_ai_metric_names_need_their_opt_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert b"gen_ai" not in Telemetry().render()
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "http, gen_ai_latest_experimental")
    async with mock_server(zoned_fleet()) as here:
        await ask(here, max_tokens=3)
        page = (await here.http.get("/metrics")).text
    labels = 'gen_ai_operation_name="chat",gen_ai_provider_name="kvrouter",gen_ai_request_model="mock"'
    for name in ("time_to_first_token", "time_per_output_token"):
        assert f"gen_ai_server_{name}_seconds_count{{{labels}}} 1.0" in page
    assert f'gen_ai_server_request_duration_seconds_count{{error_type="",{labels}}} 1.0' in page
    tokens = "gen_ai_client_inference"
    assert f"{tokens}_operation_output_tokens_sum{{{labels}}} 3.0" in page
    assert f'{tokens}_usage_output_tokens_total{{{labels},gen_ai_token_modality="text"}} 3.0' in page
    assert (
        f'{tokens}_usage_cache_read_input_tokens_total{{{labels},gen_ai_token_modality="text"}} 0.0' in page
    )
    assert "gen_ai_client_token_usage" not in page


async def test_a_secret_in_a_malformed_header_variable_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with collecting(monkeypatch):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Bearer s3cr3t")
        async with mock_server(zoned_fleet()) as here:
            await ask(here)
    ours = [record for record in caplog.records if record.name.startswith("kvrouter")]
    assert "spans_not_sent" in events_of(ours)
    assert not [record for record in ours if "s3cr3t" in json.dumps(_fields(record))]


async def test_a_hanging_exporter_shutdown_is_abandoned_at_its_limit() -> None:
    hangs = threading.Event()

    def hang() -> None:
        hangs.wait()

    assert not await trace_export._ended(hang, 0.01)
    hangs.set()
    assert await trace_export._ended(hang, 30.0)


async def test_an_invalid_otel_variable_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting(monkeypatch):
        for name, value in (("OTEL_BSP_MAX_QUEUE_SIZE", "-1"), ("OTEL_TRACES_EXPORTER", "zipkin")):
            with monkeypatch.context() as one:
                one.setenv(name, value)
                with pytest.raises(ConfigError, match="OTEL_"):
                    async with mock_server(zoned_fleet()):
                        pass
