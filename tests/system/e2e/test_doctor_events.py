"""``kvrouter doctor`` names what the router cannot know of caches: events that are off, lost or wrong."""

import pytest
from msgspec.structs import replace

from kvrouter.cli.doctor.findings import Severity
from kvrouter.core.constraints import RouterMode
from kvrouter.core.events import Cleared, KvBatch
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport, Role
from kvrouter.router import event_ingest
from kvrouter.router.event_ingest import EventCacheView
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.text.source import MOCK_FOLDER
from tests.support.constants import SetConstants
from tests.support.engine_server import scripted_engine
from tests.support.examined import UNTIMED, chats, examined, found, names_of, not_made, the_finding
from tests.support.fleets import card
from tests.support.front import open_house, says
from tests.support.mock_fleets import alike, fleet_file
from tests.support.served import MODEL, Served, leave_recovery_unanswered, served, user, words
from tests.support.waits import until

RANK = WorkerRank(WorkerId(1), DpRank(0))


async def test_engines_without_kv_events() -> None:
    async with served(alike(replicas=2, engine="{kv_events: false}"), router=UNTIMED) as here:
        await chats(here, n=3)
        report = await examined(here)
    assert [each.seen for each in found(report, "kv-events", Severity.WARNING)] == [
        "it publishes no KV events"
    ] * 2
    assert names_of(report) == {"kv-events"}


async def test_an_engine_that_was_started_without_kv_events_says_how_to_start_it() -> None:
    text = (
        f"version: 1\nmodels: [{{name: tiny, tokenizer: '{MOCK_FOLDER}'}}]\n"
        "workers: [{name: w, engine: {kind: vllm, url: '%s'}}]\n"
    )
    async with scripted_engine() as engine:
        engine.set_json("/kv_event_sources", {})
        async with served(fleet_file(text % engine.url)) as here:
            report = await examined(here)
    finding = the_finding(report, "kv-events", Severity.WARNING)
    assert "tells of no KV events: start it with --kv-events-config" in finding.seen


@pytest.mark.parametrize(
    "config", [KvRouterConfig(kv_events=False), KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN)]
)
async def test_a_router_that_needs_no_events_misses_none(config: KvRouterConfig) -> None:
    async with open_house(card(1, publishes_kv_events=False), config=config) as house:
        assert found(await examined(house), "kv-events") == []


async def test_decode_workers_without_events_are_noted() -> None:
    cards = card(1, Role.PREFILL), card(2, Role.DECODE, publishes_kv_events=False)
    async with open_house(*cards) as house:
        the_finding(await examined(house), "kv-events", Severity.NOTE)


async def test_an_engine_that_never_reports_a_block_though_it_serves() -> None:
    async with served(alike(replicas=1, engine="{prefix_caching: false}")) as here:
        await chats(here, n=3)
        (model,) = here.system.service.models()
        assert isinstance(model.cache, EventCacheView)
        report = await examined(here)
    finding = the_finding(report, "kv-events", Severity.WARNING)
    assert "no block that it holds was ever reported" in finding.seen


async def test_prompts_that_fill_no_block_report_none() -> None:
    async with served(alike(replicas=1)) as here:
        for first in range(20):
            body = {"model": MODEL, "prompt": words(first=first, n=12), "max_tokens": 1}
            assert (await here.http.post("/v1/completions", json=body)).status_code == 200
        assert found(await examined(here), "kv-events") == []


async def test_ranks_whose_events_do_not_arrive(set_constants: SetConstants) -> None:
    set_constants(event_ingest, SILENT_AFTER_S=0.05)
    async with served(alike(replicas=2)) as here:
        (model,) = here.system.service.models()
        cache = model.cache
        assert isinstance(cache, EventCacheView)
        await until(lambda: all(each.is_missing for _, each in cache.ingest.feed_readings()))
        report = await examined(here)
    missing = found(report, "feeds", Severity.WARNING)
    assert len(missing) == 2
    assert all("heartbeats included" in each.seen for each in missing)


async def test_a_rank_whose_blocks_cannot_be_had_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(alike(replicas=2)) as here:
        await chats(here, n=3)
        leave_recovery_unanswered(monkeypatch, here)
        worker = here.system.fleet.workers[WorkerId(1)]
        here.system.fleet.events.publish(KvBatch(RANK, worker.card.incarnation, EventId(1_000_000), (), 0.0))
        report = await examined(here)
        recovering = [each for each in found(report, "feeds") if each.subject.startswith("worker 1 ")]
        assert [each.severity for each in recovering] == [Severity.NOTE]  # it has just begun
        (model,) = here.system.service.models()
        cache = model.cache
        assert isinstance(cache, EventCacheView)
        (ingest,) = (each for each in cache.ingest._rank_ingests.values() if each.feed.rank == RANK)
        assert ingest.stale_since_s is not None
        ingest.stale_since_s -= 60.0
        report = await examined(here)
    (finding,) = found(report, "feeds", Severity.WARNING)
    assert finding.subject.startswith("worker 1 ")
    assert finding.seen.startswith("its events are incomplete since 6")


async def test_a_worker_that_knows_its_cache_in_part() -> None:
    async with open_house(replace(card(1), cache_is_partial=True)) as house:
        report = await examined(house)
    assert the_finding(report, "feeds", Severity.WARNING).seen == "some of its events are lost for good"


@pytest.mark.parametrize("reason", ["other_block_size", "orphan", "unreadable"])
async def test_blocks_that_a_worker_could_not_pass_on(reason: str) -> None:
    async with open_house(card(1)) as house:
        house.bench.events.load(LoadReport(RANK, 1, 1000, kv_events_skipped={reason: 7, "other_group": 5}))
        report = await examined(house)
    finding = the_finding(report, "feeds", Severity.WARNING)
    assert finding.seen == f"its worker could not pass on some of its KV events: {reason} 7"


async def test_skipped_blocks_that_are_as_they_should_be() -> None:
    async with open_house(card(1)) as house:
        house.bench.events.load(LoadReport(RANK, 1, 1000, kv_events_skipped={"other_group": 5}))
        assert found(await examined(house), "feeds") == []


async def test_messages_of_strangers_on_the_event_plane() -> None:
    async with open_house(card(1)) as house:
        house.bench.telemetry.events_dropped.inc("zmq", "other_worker", by=30)
        report = await examined(house)
    assert "other_worker 30" in the_finding(report, "feeds", Severity.WARNING).seen


async def test_gaps_that_were_mended_are_noted() -> None:
    async with open_house(card(1)) as house:
        for first in (0, 9):
            house.bench.events.batch(KvBatch(RANK, Epoch(1), EventId(first), (Cleared(),)))
        await until(lambda: house.bench.telemetry.feed_events.value(MODEL, "gaps") > 0)
        report = await examined(house)
    assert any("gaps 1" in each.seen for each in found(report, "feeds", Severity.NOTE))


@pytest.mark.parametrize(("cached", "words"), [(32, "2 blocks more"), (0, None)])
async def test_engines_that_contradict_the_index(cached: int, words: str | None) -> None:
    async with open_house(card(1), script=says("ok", cached=cached)) as house:
        for _ in range(8):
            await house.complete([5] * 40)
        report = await examined(house)
    if words is None:
        assert found(report, "predictions") == []
    else:
        finding = the_finding(report, "predictions", Severity.WARNING)
        assert finding.seen == f"8 of its last 8 answers contradict the index, by {words} cached in the mean"


async def test_an_index_that_lacks_what_an_engine_holds() -> None:
    async with served(alike(replicas=1)) as here:
        (model,) = here.system.service.models()
        cache = model.cache
        assert isinstance(cache, EventCacheView)
        slot = model.fleet.slot_of(RANK)
        assert slot is not None
        for _ in range(10):
            cache.index.apply(slot, (Cleared(),))
            await same_chat(here)
        report = await examined(here)
    assert "cached in the mean" in the_finding(report, "predictions", Severity.WARNING).seen


async def test_engines_that_have_far_less_cached_than_was_predicted() -> None:
    config = KvRouterConfig(kv_events=False)  # predictions alone: nobody hears that the engine caches nothing
    async with served(alike(replicas=1, engine="{prefix_caching: false}"), router=config) as here:
        for _ in range(20):
            await same_chat(here)
        report = await examined(here)
    finding = the_finding(report, "hit-rate", Severity.WARNING)
    assert "engines had 0 of them" in finding.seen
    (cache,) = report.cache
    assert (cache.cached_tokens, cache.engines_say) == (0, True)
    assert cache.predicted_tokens > 2000


async def test_engines_that_do_not_say_what_they_had_cached() -> None:
    async with open_house(card(1), script=says("ok")) as house:
        await house.complete([5] * 40)
        report = await examined(house)
    (why,) = not_made(report, "hit-rate")
    assert "--enable-prompt-tokens-details" in why
    assert [cache.engines_say for cache in report.cache] == [False]


async def test_an_engine_that_counts_other_prompts_than_the_router() -> None:
    async with open_house(card(1)) as house:
        predictions = house.bench.telemetry.index_predictions
        for prediction, n in (("right", 5), ("other_prompt", 5)):
            predictions.inc(MODEL, "1", "0", prediction, by=n)
        report = await examined(house)
    finding = the_finding(report, "tokenizers", Severity.WARNING)
    assert finding.subject == "worker 1 (mock)"
    assert "5 of 10 calls" in finding.seen


async def same_chat(here: Served) -> None:
    body = {"model": MODEL, "messages": user(words(n=200)), "max_tokens": 2}
    assert (await here.http.post("/v1/chat/completions", json=body)).status_code == 200
