"""The file in which what was learned of links and ranks is kept over restarts."""

import logging
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import structs

from kvrouter.app import learned_file
from kvrouter.app.learned_file import VERSION, LearnedFile, keeping_learned
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import DpRank, RouterId, WorkerId, WorkerRank
from kvrouter.core.replica_messages import LinkName, LinkSample, LinkUpdate
from kvrouter.core.workers import ModelRuntimeConfig, WorkerCard
from kvrouter.kernel.placement.link_speeds import FORGET_S
from kvrouter.kernel.placement.placement import Draw
from kvrouter.kernel.placement.speeds import Expected
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.router import learned
from kvrouter.router.learned import RECALLED_S
from kvrouter.router.router_service import RouterService
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Event
from tests.kernel.unit.test_placer import place
from tests.testing.calls import MakeFail
from tests.testing.log_events import events_of
from tests.testing.router_harness import MODEL, RouterHarness, card
from tests.testing.scripted_transport import ScriptedTransport
from tests.testing.waits import until

LINK = LinkName((("zone", "a"),), "b")


def news(n: int = 8, *, slowness: float = 10.0, table: str | None = None) -> LinkUpdate:
    seen = [
        LinkSample(RouterId("x"), each, LINK, 2e-3, 3.125e9, float(n - each), 0.1, 0.1 * slowness)
        for each in range(n)
    ]
    return LinkUpdate(RouterId("x"), MODEL, table or LinkTable().digest(), tuple(seen))


async def a_bench(path: Path | None) -> tuple[RouterHarness, KvRouterConfig]:
    kept = None if path is None else str(path)
    config = KvRouterConfig(router_cost="time", router_learned_file=kept)
    harness = RouterHarness(ScriptedTransport(None), config)
    await harness.start()
    return harness, config


def slowness(service: RouterService) -> list[float]:
    """Of what is known of each kind of link, after a look at it."""
    model = service.model(MODEL)
    transfers = model.placer.transfers
    transfers.learned.refresh((), now_s=model.clock())
    return [reading.slowness for reading in transfers.learned.readings()]


async def test_learned_links_survive_a_restart_and_fade_with_its_duration(
    tmp_path: Path,
) -> None:
    path = tmp_path / "learned.json"
    now_s = [1e9]
    harness, config = await a_bench(path)
    async with keeping_learned(config, harness.service, clock=lambda: now_s[0]):
        harness.discovery.put(card(1))
        harness.model.placer.transfers.on_link_update(news(), now_s=harness.model.clock(), aged_s=0.0)
        assert slowness(harness.service)[0] > 9.0
    harness.service.stop()
    for away_s, least, most in ((1.0, 9.0, 10.0), (FORGET_S, 2.9, 3.2), (20 * FORGET_S, 1.0, 1.01)):
        later, config = await a_bench(path)
        async with keeping_learned(config, later.service, clock=lambda away_s=away_s: 1e9 + away_s):  # type: ignore[misc]
            later.discovery.put(card(1))
            assert least <= slowness(later.service)[0] <= most
            later.service.stop()
            kept = path.read_bytes()
        path.write_bytes(kept)  # as it was at the first end, for the next


async def test_learned_links_of_absent_models_are_kept_with_a_higher_age(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(msgspec.json.encode({"version": VERSION, "saved_at_s": 100.0, "links": (news(),)}))
    harness, config = await a_bench(path)
    async with keeping_learned(config, harness.service, clock=lambda: 150.0):
        pass
    harness.service.stop()
    kept = msgspec.json.decode(path.read_bytes())
    assert kept["saved_at_s"] == 150.0
    ages = [seen[5] for seen in kept["links"][0][4]]
    assert ages == pytest.approx([each.age_s + 50.0 for each in news().seen], abs=5.0)


async def test_present_models_recall_links_and_restarts_do_not_grow_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(msgspec.json.encode({"version": VERSION, "saved_at_s": 100.0, "links": (news(64),)}))
    for _ in range(3):
        harness, config = await a_bench(path)
        harness.discovery.put(card(1))
        async with keeping_learned(config, harness.service, clock=lambda: 101.0):
            assert slowness(harness.service)[0] > 9.0
        harness.service.stop()
        links = msgspec.json.decode(path.read_bytes())["links"]
        assert sum(len(each[4]) for each in links) == 64


async def test_a_refused_card_does_not_use_up_the_learned_links(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(msgspec.json.encode({"version": VERSION, "saved_at_s": 100.0, "links": (news(),)}))
    harness, config = await a_bench(path)
    async with keeping_learned(config, harness.service, clock=lambda: 101.0):
        wrong = structs.replace(card(1), runtime_config=ModelRuntimeConfig(kv_transfer_domain="zone "))
        harness.discovery.put(structs.replace(wrong, dp_size=0))
        harness.discovery.put(card(1))
        assert slowness(harness.service)[0] > 9.0
    harness.service.stop()


async def test_old_learned_links_of_absent_models_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(msgspec.json.encode({"version": VERSION, "saved_at_s": 100.0, "links": (news(),)}))
    harness, config = await a_bench(path)
    async with keeping_learned(config, harness.service, clock=lambda: 101.0 + RECALLED_S):
        pass
    harness.service.stop()
    assert msgspec.json.decode(path.read_bytes())["links"] == []


SLOW_RANK = WorkerRank(WorkerId(1), DpRank(0))


def teach(harness: RouterHarness, takes: tuple[float, ...] = (3.0, 1.0, 1.0)) -> None:
    """Let each worker take so many times as long as the timing says."""
    model = harness.model
    speeds, now_s = model.placer.speeds, model.clock()
    for number in range(1, 21):
        for worker_id, its in enumerate(takes, start=1):
            rank = WorkerRank(WorkerId(worker_id), DpRank(0))
            slot = model.fleet.slot_of(rank)
            assert slot is not None
            ended_s = now_s - 50.0 * (20 - number)
            expected = Expected(slot, rank, ended_s - 10.0 * its, 10.0, 0.0, 10.0, True)
            speeds.observed(expected, client=number, now_s=ended_s)


def speed(harness: RouterHarness, rank: WorkerRank = SLOW_RANK) -> float | None:
    """Return the rank's slowness relative to the median, after a look at it; None when nothing is known."""
    slot = harness.model.fleet.slot_of(rank)
    assert slot is not None
    harness.model.placer.speeds.speeds(harness.model.fleet.n_slots, now_s=harness.model.clock() + 1.5)
    reading = harness.model.placer.speeds.reading(slot)
    return None if reading is None else reading.relative


def choices(harness: RouterHarness) -> list[int]:
    """Return the workers of 24 requests, eight at a time."""
    placer = harness.model.placer
    chosen: list[int] = []
    for _ in range(3):
        placed = [place(placer, Draw(number, number, number)) for number in range(8)]
        chosen += [placement.decision.decode.rank.worker_id for placement in placed]
        for placement in placed:
            placer.release(placement, now_s=0.0)
    return chosen


async def saved_speeds(path: Path, first: WorkerCard | None = None) -> list[int]:
    """Save what a router learned of three workers, of which the first is slow; return its later choices."""
    harness, config = await a_bench(path)
    harness.discovery.put(first or card(1), card(2), card(3))
    async with keeping_learned(config, harness.service, clock=lambda: 100.0):
        teach(harness)
        assert speed(harness) == pytest.approx(3.0, rel=0.1)
    harness.service.stop()
    return choices(harness)


async def test_a_restarted_router_chooses_as_before_at_once(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    before = await saved_speeds(path)
    later, config = await a_bench(path)
    async with keeping_learned(config, later.service, clock=lambda: 101.0):
        later.discovery.put(card(1), card(2), card(3))
        assert speed(later) == pytest.approx(3.0, rel=0.1)
        assert choices(later) == before
    later.service.stop()
    unknowing, _ = await a_bench(None)
    unknowing.discovery.put(card(1), card(2), card(3))
    assert choices(unknowing).count(1) > before.count(1)
    unknowing.service.stop()


async def test_a_worker_that_started_again_inherits_no_speed(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    await saved_speeds(path)
    later, config = await a_bench(path)
    async with keeping_learned(config, later.service, clock=lambda: 101.0):
        later.discovery.put(card(1, incarnation=2), card(2))
        assert speed(later) is None
        assert speed(later, WorkerRank(WorkerId(2), DpRank(0))) is not None
    later.service.stop()
    (model,) = msgspec.json.decode(path.read_bytes())["speeds"]
    assert {kept["rank"][0]: kept["aged_s"] == 0.0 for kept in model["ranks"]} == {2: True, 3: False}


@pytest.mark.parametrize(
    ("incarnation", "url", "start", "inherits"),
    [
        (1, "http://one", "8.5", True),
        (2, "http://one", "8.5", True),
        (1, "http://one", "9.5", False),
        (2, "http://two", "8.5", False),
    ],
)
async def test_speeds_are_those_of_one_start_of_an_engine(
    tmp_path: Path, incarnation: int, url: str, start: str, inherits: bool
) -> None:
    """Its worker may have started again, as one in the router's own process does."""
    path = tmp_path / "learned.json"
    await saved_speeds(path, structs.replace(card(1), engine_url="http://one", engine_start="8.5"))
    later, config = await a_bench(path)
    async with keeping_learned(config, later.service, clock=lambda: 101.0):
        now = structs.replace(card(1, incarnation=incarnation), engine_url=url, engine_start=start)
        later.discovery.put(now, card(2), card(3))
        assert (speed(later) is not None) is inherits
    later.service.stop()


@pytest.mark.parametrize(
    ("start", "now", "forgets"), [("8.5", "9.5", True), ("8.5", "8.5", False), ("", "8.5", False)]
)
async def test_an_engine_that_starts_again_under_its_worker_loses_its_speed(
    tmp_path: Path, start: str, now: str, forgets: bool
) -> None:
    path = tmp_path / "learned.json"
    harness, config = await a_bench(path)
    first = structs.replace(card(1), engine_start=start)
    async with keeping_learned(config, harness.service, clock=lambda: 100.0):
        harness.discovery.put(first, card(2), card(3))
        teach(harness)
        harness.discovery.put(structs.replace(first, engine_start=now))
        assert speed(harness) == pytest.approx(1.0 if forgets else 3.0, rel=0.1)
    harness.service.stop()
    (model,) = msgspec.json.decode(path.read_bytes())["speeds"]
    (kept,) = (kept for kept in model["ranks"] if kept["rank"] == [1, 0])
    assert (kept["engine_start"], kept["prompts"]["times"] is None, kept["moments"] is None) == (
        now,
        forgets,
        forgets,
    )


async def test_speeds_of_workers_that_stay_away_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    await saved_speeds(path)
    for now_s, n_kept in ((100.0 + RECALLED_S / 2, 3), (101.0 + RECALLED_S, 0)):
        later, config = await a_bench(path)
        async with keeping_learned(config, later.service, clock=lambda now_s=now_s: now_s):  # type: ignore[misc]
            pass
        later.service.stop()
        speeds = msgspec.json.decode(path.read_bytes())["speeds"]
        assert sum(len(model["ranks"]) for model in speeds) == n_kept


@pytest.mark.parametrize(("away_s", "inherits"), [(RECALLED_S - 9.0, True), (RECALLED_S + 9.0, False)])
async def test_a_worker_that_joins_after_an_hour_inherits_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away_s: float, inherits: bool
) -> None:
    path = tmp_path / "learned.json"
    await saved_speeds(path)
    now_s = [0.0]
    monkeypatch.setattr(learned, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    later, config = await a_bench(path)
    async with keeping_learned(config, later.service, clock=lambda: 101.0):
        later.discovery.put(card(2))
        now_s[0] = away_s
        later.discovery.put(card(1))
        assert (speed(later) is not None) is inherits
        assert speed(later, WorkerRank(WorkerId(2), DpRank(0))) is not None
    later.service.stop()


async def test_a_worker_absent_in_the_file_for_an_hour_inherits_no_speed(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    await saved_speeds(path)
    without, config = await a_bench(path)
    async with keeping_learned(config, without.service, clock=lambda: 100.0 + RECALLED_S / 2):
        without.discovery.put(card(2))
    without.service.stop()
    later, config = await a_bench(path)
    async with keeping_learned(config, later.service, clock=lambda: 101.0 + RECALLED_S):
        later.discovery.put(card(1), card(2))
        assert speed(later) is None
        assert speed(later, WorkerRank(WorkerId(2), DpRank(0))) is not None
    later.service.stop()


async def test_speeds_saved_by_a_clock_of_1970_leave_a_file_that_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrouter.router")
    path = tmp_path / "learned.json"
    await saved_speeds(path)
    for _ in range(2):
        later, config = await a_bench(path)
        async with keeping_learned(config, later.service, clock=lambda: 1.7e9):
            later.discovery.put(card(1), card(2), card(3))
        later.service.stop()
    assert Event.LEARNED_NOT_READ not in events_of(caplog.records)


async def test_speeds_of_an_engine_that_does_not_answer_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    await saved_speeds(path)
    later, config = await a_bench(path)
    async with keeping_learned(config, later.service, clock=lambda: 101.0):
        later.discovery.put(structs.replace(card(1), engine_silent=True), card(2), card(3))
        assert speed(later) == 1.0
    later.service.stop()
    (model,) = msgspec.json.decode(path.read_bytes())["speeds"]
    (kept,) = (kept for kept in model["ranks"] if kept["rank"] == [1, 0])
    assert kept["prompts"]["times"] is None


async def test_speeds_relative_to_another_timing_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    await saved_speeds(path)
    content = msgspec.json.decode(path.read_bytes())
    content["speeds"][0]["timing"] = "another"
    path.write_bytes(msgspec.json.encode(content))
    later, config = await a_bench(path)
    async with keeping_learned(config, later.service, clock=lambda: 101.0):
        later.discovery.put(card(1))
        assert speed(later) is None
    later.service.stop()
    assert msgspec.json.decode(path.read_bytes())["speeds"] == []


async def test_the_learned_file_is_written_while_the_router_runs(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    harness, config = await a_bench(path)
    async with keeping_learned(config, harness.service, save_s=0.01):
        await until(path.exists)
    harness.service.stop()


@pytest.mark.parametrize(
    "content",
    [
        b'{"version": 2, "saved_at_s": 1, "links": [], "speeds": [{"model": "mock"}]}',
        b'{"version": 2, "saved_at_s": 1, "links": [], "speeds": [{"model": "mock", "timing": "",'
        b'"prompt_noise": {"weights": 1e99, "squares": 0}, "step_noise": {"weights": 0, "squares": 0},'
        b'"answers": 0, "answer_s": 1, "ranks": []}]}',
        b"",
        b"{",
        b"[]",
        b'{"version": "2", "saved_at_s": 1, "links": []}',
        b'{"version":2}',
        b"\xff",
    ],
)
async def test_an_invalid_learned_file_is_reported_and_ignored(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrouter.router")
    path = tmp_path / "learned.json"
    path.write_bytes(content)
    harness, config = await a_bench(path)
    async with keeping_learned(config, harness.service):
        harness.discovery.put(card(1))
        assert slowness(harness.service) == []
    harness.service.stop()
    assert events_of(caplog.records).count(Event.LEARNED_NOT_READ) == 1
    assert str(path) in caplog.text


async def test_a_learned_file_of_an_earlier_version_is_named_as_such(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(b'{"version": 1, "saved_at_s": 1, "links": []}')
    harness, config = await a_bench(path)
    async with keeping_learned(config, harness.service):
        pass
    harness.service.stop()
    assert "another version of kvrouter wrote it: version 1, 2 is read" in caplog.text
    assert msgspec.json.decode(path.read_bytes())["version"] == VERSION


def test_another_form_of_the_learned_file_is_another_version() -> None:
    def without_texts(schema: object) -> object:
        if isinstance(schema, dict):
            return {key: without_texts(each) for key, each in schema.items() if key != "description"}
        if isinstance(schema, list):
            return [without_texts(each) for each in schema]
        # Python keeps one of two equal annotations, so a limit may be another module's 0 instead of 0.0.
        return float(schema) if type(schema) is int else schema

    form = msgspec.json.encode(without_texts(msgspec.json.schema(LearnedFile)), order="deterministic")
    assert (VERSION, sha256(form).hexdigest()[:16]) == (2, "f9fe76683d55674a"), "raise VERSION with the form"


async def test_learned_links_of_another_link_table_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    other = structs.replace(news(), table="another")
    path.write_bytes(msgspec.json.encode({"version": VERSION, "saved_at_s": 100.0, "links": (other,)}))
    harness, config = await a_bench(path)
    async with keeping_learned(config, harness.service, clock=lambda: 101.0):
        harness.discovery.put(card(1))
        assert slowness(harness.service) == []
    harness.service.stop()


async def test_an_unwritable_learned_file_path_is_refused_at_the_start(tmp_path: Path) -> None:
    harness, config = await a_bench(tmp_path / "nowhere" / "learned.json")
    with pytest.raises(ConfigError, match="router_learned_file") as refused:
        async with keeping_learned(config, harness.service):
            raise AssertionError("it began")
    assert refused.value.param == "router_learned_file"
    harness.service.stop()


async def test_a_full_disk_is_reported_once_and_keeps_the_old_file(
    tmp_path: Path, make_fail: MakeFail, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrouter.router")
    path = tmp_path / "learned.json"
    path.write_bytes(msgspec.json.encode({"version": VERSION, "saved_at_s": 100.0, "links": ()}))
    before = path.read_bytes()
    full = ConfigError(f"{path}: cannot be written: No space left on device", param=str(path))
    tries = make_fail(learned_file, "write_atomic", full)
    harness, config = await a_bench(path)
    async with keeping_learned(config, harness.service, save_s=0.005):
        await until(lambda: len(tries) >= 3)
        assert events_of(caplog.records).count(Event.LEARNED_NOT_KEPT) == 1
    harness.service.stop()
    assert path.read_bytes() == before
