"""``kvrouter doctor`` names what the router cannot know of caches: events that are off, lost or wrong."""

import dataclasses

import pytest
from msgspec.structs import replace

from kvrouter.api.client import RouterClient
from kvrouter.cli.doctor import kv_event_checks
from kvrouter.cli.doctor.diagnosis import examine, gather
from kvrouter.cli.doctor.findings import Severity
from kvrouter.cli.doctor.flags import DoctorOptions
from kvrouter.cli.doctor.reading import TokenProbe
from kvrouter.core.constraints import RouterMode
from kvrouter.core.events import Cleared, KvBatch
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport, Role
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.text.source import MOCK_FOLDER
from tests.testing.constants import SetConstants
from tests.testing.doctor import (
    UNTIMED,
    failed_checks,
    findings_of,
    only_finding,
    run_doctor,
    send_chats,
    skipped_checks,
    url_of,
    without_data,
)
from tests.testing.doctor_fleets import caching_off, events_do_not_arrive
from tests.testing.frontend_harness import running_frontend, text_answer
from tests.testing.mock_fleet import fleet_file, uniform_fleet
from tests.testing.mock_server import MODEL, MockServer, leave_recovery_unanswered, mock_server, user, words
from tests.testing.router_harness import card
from tests.testing.scripted_engine import scripted_engine
from tests.testing.waits import until

RANK = WorkerRank(WorkerId(1), DpRank(0))


async def test_doctor_reports_engines_without_kv_events() -> None:
    async with mock_server(uniform_fleet(replicas=2, engine="{kv_events: false}"), router=UNTIMED) as here:
        await send_chats(here, n=3)
        report = await run_doctor(here)
    assert [each.seen for each in findings_of(report, "kv-events", Severity.WARNING)] == [
        "it publishes no KV events"
    ] * 2
    assert failed_checks(report) == {"kv-events"}


async def test_doctor_shows_how_to_enable_an_engines_kv_events() -> None:
    text = (
        f"version: 1\nmodels: [{{name: tiny, tokenizer: '{MOCK_FOLDER}'}}]\n"
        "workers: [{name: w, engine: {kind: vllm, url: '%s'}}]\n"
    )
    async with scripted_engine() as engine:
        engine.set_json("/kv_event_sources", {})
        async with mock_server(fleet_file(text % engine.url)) as here:
            report = await run_doctor(here)
    finding = only_finding(report, "kv-events", Severity.WARNING)
    assert "tells of no KV events: start it with --kv-events-config" in finding.seen


@pytest.mark.parametrize(
    "config", [KvRouterConfig(kv_events=False), KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN)]
)
async def test_a_router_without_need_for_events_reports_none_missing(config: KvRouterConfig) -> None:
    async with running_frontend(card(1, publishes_kv_events=False), config=config) as frontend:
        assert findings_of(await run_doctor(frontend), "kv-events") == []


async def test_doctor_notes_decode_workers_without_events() -> None:
    cards = card(1, Role.PREFILL), card(2, Role.DECODE, publishes_kv_events=False)
    async with running_frontend(*cards) as frontend:
        only_finding(await run_doctor(frontend), "kv-events", Severity.NOTE)


async def test_doctor_reports_a_serving_engine_that_never_reports_a_block(
    set_constants: SetConstants,
) -> None:
    finding = only_finding(await caching_off(set_constants), "kv-events", Severity.WARNING)
    assert "no block that it holds was ever reported" in finding.seen


async def test_doctor_ignores_missing_blocks_of_prompts_shorter_than_a_block() -> None:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        for first in range(20):
            body = {"model": MODEL, "prompt": words(first=first, n=12), "max_tokens": 1}
            assert (await here.http.post("/v1/completions", json=body)).status_code == 200
        assert findings_of(await run_doctor(here), "kv-events") == []


async def test_doctor_reports_ranks_whose_events_do_not_arrive(set_constants: SetConstants) -> None:
    missing = findings_of(await events_do_not_arrive(set_constants), "feeds", Severity.WARNING)
    assert len(missing) == 2
    assert all("heartbeats included" in each.seen for each in missing)


async def test_doctor_reports_a_rank_whose_blocks_cannot_be_recovered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with mock_server(uniform_fleet(replicas=2)) as here:
        await send_chats(here, n=3)
        leave_recovery_unanswered(monkeypatch, here)
        worker = here.system.fleet.workers[WorkerId(1)]
        here.system.fleet.events.publish(KvBatch(RANK, worker.card.incarnation, EventId(1_000_000), (), 0.0))
        report = await run_doctor(here)
        recovering = [each for each in findings_of(report, "feeds") if each.subject.startswith("worker 1 ")]
        assert [each.severity for each in recovering] == [Severity.NOTE]  # it has just begun
        (model,) = here.system.service.models()
        cache = model.cache
        assert isinstance(cache, EventCacheView)
        (ingest,) = (each for each in cache.ingest._rank_ingests.values() if each.feed.rank == RANK)
        assert ingest.stale_since_s is not None
        ingest.stale_since_s -= 60.0
        report = await run_doctor(here)
    (finding,) = findings_of(report, "feeds", Severity.WARNING)
    assert finding.subject.startswith("worker 1 ")
    assert finding.seen.startswith("its events are incomplete since 6")


async def test_doctor_reports_a_worker_with_a_partially_known_cache() -> None:
    async with running_frontend(replace(card(1), cache_is_partial=True)) as frontend:
        report = await run_doctor(frontend)
    assert only_finding(report, "feeds", Severity.WARNING).seen == "some of its events are lost for good"
    (why,) = skipped_checks(report, "predictions")
    assert "some of its events are lost for good" in why
    assert without_data(report, "predictions") == []


@pytest.mark.parametrize("reason", ["other_block_size", "orphan", "unreadable"])
async def test_doctor_reports_kv_events_that_a_worker_could_not_pass_on(reason: str) -> None:
    async with running_frontend(card(1)) as frontend:
        frontend.harness.events.load(
            LoadReport(RANK, 1, 1000, kv_events_skipped={reason: 7, "other_group": 5})
        )
        report = await run_doctor(frontend)
    finding = only_finding(report, "feeds", Severity.WARNING)
    assert finding.seen == f"its worker could not pass on some of its KV events: {reason} 7"


async def test_doctor_ignores_expected_skipped_blocks() -> None:
    async with running_frontend(card(1)) as frontend:
        frontend.harness.events.load(LoadReport(RANK, 1, 1000, kv_events_skipped={"other_group": 5}))
        assert findings_of(await run_doctor(frontend), "feeds") == []


async def test_doctor_reports_dropped_messages_on_the_event_plane() -> None:
    async with running_frontend(card(1)) as frontend:
        frontend.harness.telemetry.events_dropped.inc("zmq", "other_worker", by=30)
        report = await run_doctor(frontend)
    assert "other_worker 30" in only_finding(report, "feeds", Severity.WARNING).seen


async def test_doctor_notes_repaired_event_gaps() -> None:
    async with running_frontend(card(1)) as frontend:
        for first in (0, 9):
            frontend.harness.events.batch(KvBatch(RANK, Epoch(1), EventId(first), (Cleared(),)))
        await until(lambda: frontend.harness.telemetry.feed_events.value(MODEL, "gaps") > 0)
        report = await run_doctor(frontend)
    assert any("gaps 1" in each.seen for each in findings_of(report, "feeds", Severity.NOTE))


@pytest.mark.parametrize(("cached", "words"), [(32, "2 blocks more"), (0, None)])
async def test_doctor_reports_engines_that_contradict_the_index(
    cached: int, words: str | None, set_constants: SetConstants
) -> None:
    set_constants(kv_event_checks, ANSWERS_SPAN_S=0.0)
    async with running_frontend(card(1), script=text_answer("ok", cached=cached)) as frontend:
        for _ in range(8):
            await frontend.complete([5] * 40)
        report = await run_doctor(frontend)
    if words is None:
        assert findings_of(report, "predictions") == []
    else:
        finding = only_finding(report, "predictions", Severity.WARNING)
        assert finding.seen == f"8 of its last 8 answers contradict the index, by {words} cached in the mean"


async def test_doctor_reports_an_index_lacking_an_engines_blocks(set_constants: SetConstants) -> None:
    set_constants(kv_event_checks, ANSWERS_SPAN_S=0.0)
    async with mock_server(uniform_fleet(replicas=1)) as here:
        (model,) = here.system.service.models()
        cache = model.cache
        assert isinstance(cache, EventCacheView)
        slot = model.fleet.slot_of(RANK)
        assert slot is not None
        for _ in range(10):
            cache.index.apply(slot, (Cleared(),))
            await same_chat(here)
        report = await run_doctor(here)
    assert "cached in the mean" in only_finding(report, "predictions", Severity.WARNING).seen


async def test_doctor_reports_engines_with_far_less_cached_than_predicted() -> None:
    config = KvRouterConfig(kv_events=False)  # predictions alone: nobody hears that the engine caches nothing
    async with mock_server(
        uniform_fleet(replicas=1, engine="{prefix_caching: false}"), router=config
    ) as here:
        for _ in range(20):
            await same_chat(here)
        report = await run_doctor(here)
    finding = only_finding(report, "hit-rate", Severity.WARNING)
    assert "engines had 0 of them" in finding.seen
    (cache,) = report.cache
    assert (cache.cached_tokens, cache.engines_say) == (0, True)
    assert cache.predicted_tokens > 2000


async def test_doctor_skips_what_engines_report_no_cached_tokens_for() -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        await frontend.complete([5] * 40)
        report = await run_doctor(frontend)
    for check in ("hit-rate", "predictions"):
        (why,) = skipped_checks(report, check)
        assert "--enable-prompt-tokens-details" in why
        assert without_data(report, check) == []
    assert [cache.engines_say for cache in report.cache] == [False]


async def test_doctor_counts_the_answers_that_say_what_was_cached_by_route() -> None:
    async with running_frontend(card(1), script=text_answer("ok", cached=0)) as frontend:
        for _ in range(3):
            await frontend.complete([5] * 40)
        reports = frontend.harness.telemetry.cache_reports
        reports.inc(MODEL, "chat", "yes", by=27)
        reports.inc(MODEL, "responses", "no", by=10)
        report = await run_doctor(frontend)
    (cache,) = report.cache
    assert cache.reported_by_route == "30 of 40 answers (chat 27 of 27, responses 0 of 10, tokens 3 of 3)"
    assert (cache.prompt_tokens, cache.reported_prompt_tokens) == (120, 120)
    assert findings_of(report, "hit-rate") == []
    assert skipped_checks(report, "hit-rate") == []
    (why,) = without_data(report, "hit-rate")
    assert "of 30 of 40 answers" in why


@pytest.mark.parametrize(("silent", "is_made"), [(3, True), (10, False)])
async def test_what_engines_that_may_report_hits_alone_find_is_unknown(silent: int, is_made: bool) -> None:
    async with running_frontend(card(1)) as frontend:
        telemetry = frontend.harness.telemetry
        telemetry.prompt_tokens.inc(MODEL, by=9000)
        for tokens in (telemetry.overlap_tokens, telemetry.cached_tokens):
            tokens.inc(MODEL, by=3000)
        telemetry.cache_reports.inc(MODEL, "chat", "yes", by=30)
        telemetry.cache_reports.inc(MODEL, "chat", "no", by=silent)
        telemetry.cache_reports.inc(MODEL, "responses", "no", by=20)
        report = await run_doctor(frontend)
    assert ("hit-rate" in {each.check for each in report.passed}) is is_made
    for check in ("hit-rate", "predictions"):
        assert any("vLLM 0.22 and older" in why for why in skipped_checks(report, check)) is not is_made


async def test_doctor_names_shapes_and_not_the_tokenizer_where_prompts_are_equal() -> None:
    calls = replace(card(1), takes_calls=True)
    async with running_frontend(calls) as frontend:
        answers = frontend.harness.telemetry.prompt_shape_answers
        for shape, found, missed in (("chat user", 20, 0), ("chat user tools", 3, 9)):
            answers.inc(MODEL, shape, "found", by=found)
            answers.inc(MODEL, shape, "missed", by=missed)
        reading = await gather(RouterClient(url_of(frontend)), (), DoctorOptions(engines=False))
        frontend.harness.telemetry.index_predictions.inc(MODEL, "1", "0", "other_prompt", by=9)
        mixed = await gather(RouterClient(url_of(frontend)), (), DoctorOptions(engines=False))
    probes = [TokenProbe(MODEL, 1, is_chat, [1, 2], [1, 2]) for is_chat in (False, True)]
    for each in (reading, mixed):
        report = examine(dataclasses.replace(each, engines_asked=True, probes=probes))
        finding = only_finding(report, "tokenizers", Severity.WARNING)
        assert finding.subject == "calls of the shape 'chat user tools' (mock)"
        assert finding.seen.startswith("9 of 12 were not found where their engine had them cached")
        assert finding.seen.endswith("; other shapes: chat user 0 of 20")
        assert finding.remedy.startswith("the router has the engine's tokenizer (2 prompts are equal)")
        assert finding.compared.startswith("2 of 2 prompts equal at 1 engine; 23 of 32 cached answers")


async def test_doctor_reports_an_engine_counting_other_prompt_tokens() -> None:
    async with running_frontend(card(1)) as frontend:
        predictions = frontend.harness.telemetry.index_predictions
        for prediction, n in (("right", 5), ("other_prompt", 5)):
            predictions.inc(MODEL, "1", "0", prediction, by=n)
        report = await run_doctor(frontend)
    finding = only_finding(report, "tokenizers", Severity.WARNING)
    assert finding.subject == "worker 1 (mock)"
    assert "5 of 10 calls" in finding.seen


async def same_chat(here: MockServer) -> None:
    body = {"model": MODEL, "messages": user(words(n=200)), "max_tokens": 2}
    assert (await here.http.post("/v1/chat/completions", json=body)).status_code == 200
