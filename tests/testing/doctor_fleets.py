"""Healthy and broken fleets with a live router, and what ``kvrouter doctor`` must find in each.

``python -m tests.testing.doctor_fleets`` prints the table of verdicts.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import NamedTuple

from msgspec.structs import replace

from kvrouter.cli.doctor.diagnosis import PROBE
from kvrouter.cli.doctor.findings import Report, Severity
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.events import KvSnapshot
from kvrouter.core.ids import DpRank, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import CallRoute, EngineChunk, FinishReason
from kvrouter.core.workers import WorkerCard
from kvrouter.kernel.fleet.circuit import CircuitState
from kvrouter.kernel.placement.speeds import Expected
from kvrouter.router import event_ingest
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.text.source import MOCK_FOLDER
from tests.testing.constants import SetConstants
from tests.testing.doctor import UNTIMED, run_doctor, send_chats, url_of
from tests.testing.frontend_harness import FrontendHarness, running_frontend, text_answer
from tests.testing.mock_fleet import fleet_file, uniform_fleet, zoned_fleet
from tests.testing.mock_server import MockServer, mock_server, words
from tests.testing.processes import eventually
from tests.testing.router_harness import MODEL, card
from tests.testing.scripted_engine import ScriptedEngine, scripted_engine
from tests.testing.scripted_transport import ScriptedStream, address_of
from tests.testing.tcp_proxy import TcpProxy
from tests.testing.waits import until

Examined = Callable[[SetConstants], Awaitable[Report]]
"""Starts a fleet, lets it be as it is, and returns what doctor says of it."""

EVENTS_OFF = KvRouterConfig(kv_events=False, router_cost="blocks")
ROUND_ROBIN = KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN)
OPEN_LONG = KvRouterConfig(circuit_failures=2, circuit_open_s=600.0, circuit_open_max_s=600.0)
SERVED = text_answer("ok", cached=0)

PAIR = """
version: 1
models: [{name: mock, block_size: 16, context_length: 4096}]
workers: [{name: p, role: prefill}, {name: d, role: decode}]
speedup: 1000
"""
TWO_MODELS = """
version: 1
models: [{name: mock}, {name: other, tokenizer: mock}]
workers: [{name: m, model: mock, replicas: 2}, {name: o, model: other}]
speedup: 1000
"""


class DoctorFleet(NamedTuple):
    """A fleet, and the check that must find its fault, with words of the finding; empty if it is well."""

    name: str
    examined: Examined
    check: str = ""
    words: str = ""

    def verdict(self, report: Report) -> str:
        """The checks that found a problem, as ``check: subject``; ``no finding`` without one."""
        found = [each for each in report.findings if each.severity is not Severity.NOTE]
        return "; ".join(f"{each.check}: {each.subject}: {each.seen}" for each in found) or "no finding"


async def served(here: FrontendHarness, *, n: int = 20, tokens: int = 5) -> None:
    """Requests that are answered, of prompts that differ."""
    for number in range(n):
        assert (await here.complete([5 + number] * tokens)).status_code == 200


# Healthy


async def _mocks(text: str, *, n: int = 12, router: KvRouterConfig = UNTIMED) -> Report:
    async with mock_server(fleet_file(text), router=router) as here:
        assert set(await send_chats(here, n=n)) <= {200}
        return await run_doctor(here)


async def one_worker(_: SetConstants) -> Report:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        await send_chats(here, n=12)
        return await run_doctor(here)


async def two_equal_workers(_: SetConstants) -> Report:
    async with mock_server(uniform_fleet(replicas=2)) as here:
        await send_chats(here, n=24)
        return await run_doctor(here)


async def two_zones(_: SetConstants) -> Report:
    async with mock_server(zoned_fleet(), router=UNTIMED) as here:
        await send_chats(here, n=24)
        return await run_doctor(here)


async def a_pair(_: SetConstants) -> Report:
    return await _mocks(PAIR)


async def prompts_of_whole_blocks(_: SetConstants) -> Report:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        for _n in range(60):
            body = {"model": MODEL, "prompt": words(n=48), "max_tokens": 1}
            assert (await here.http.post("/v1/completions", json=body)).status_code == 200
        return await run_doctor(here)


async def first_burst(_: SetConstants) -> Report:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        body = {"model": MODEL, "prompt": words(n=400), "max_tokens": 1}
        sent = (here.http.post("/v1/completions", json=body) for _n in range(16))
        assert {each.status_code for each in await asyncio.gather(*sent)} == {200}
        return await run_doctor(here)


async def idle(_: SetConstants) -> Report:
    async with mock_server(uniform_fleet(replicas=2)) as here:
        return await run_doctor(here)


async def cached_tokens_on_some_routes(_: SetConstants) -> Report:
    def answer(stream: ScriptedStream) -> None:
        call = stream.request.call
        assert call is not None
        if call.route is CallRoute.TOKENIZE:
            stream.feed(InvalidRequest("no such route"))
            return
        cached = 0 if call.route is CallRoute.CHAT else None
        stream.feed(EngineChunk(raw=b"{}", text_chars=1, cached_tokens=cached, finish=FinishReason.STOP))

    async with running_frontend(replace(card(1), takes_calls=True), script=answer) as here:
        for path, fields in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
            for _n in range(3):
                body = {"model": MODEL, fields: [{"role": "user", "content": "a"}]}
                assert (await here.http.post(path, json=body)).status_code == 200
        return await run_doctor(here)


async def events_off_on_purpose(_: SetConstants) -> Report:
    fleet = uniform_fleet(replicas=2, engine="{kv_events: false}")
    async with mock_server(fleet, router=EVENTS_OFF) as here:
        await send_chats(here, n=12)
        return await run_doctor(here)


async def round_robin(_: SetConstants) -> Report:
    async with mock_server(uniform_fleet(replicas=2), router=ROUND_ROBIN) as here:
        await send_chats(here, n=24)
        return await run_doctor(here)


async def two_silent_engines(_: SetConstants) -> Report:
    by_time = KvRouterConfig(kv_events=False, router_cost="time")
    async with running_frontend(card(1), card(2), script=text_answer("ok"), config=by_time) as here:
        await served(here)
        return await run_doctor(here)


async def several_models(_: SetConstants) -> Report:
    return await _mocks(TWO_MODELS)


def _with_blocks(worker_id: int, blocks: int) -> WorkerCard:
    plain = card(worker_id)
    return replace(plain, runtime_config=replace(plain.runtime_config, total_kv_blocks=blocks))


def _take_times(here: FrontendHarness, slowness: dict[int, float]) -> None:
    """Let each worker's first tokens come so many times as late as is expected."""
    model = here.harness.model
    now_s = model.clock()
    for number in range(20):
        for worker_id, times in slowness.items():
            rank = model.fleet.card(WorkerId(worker_id))
            assert rank is not None
            (worker_rank,) = rank.ranks()
            slot = model.fleet.slot_of(worker_rank)
            assert slot is not None
            at_s = now_s + number
            leg = Expected(Slot(slot), worker_rank, at_s - 0.1 * times, 0.1, 0.0, 0.1, is_clear=True)
            model.placer.speeds.observed(leg, client=number, now_s=at_s)


async def mixed_hardware(_: SetConstants) -> Report:
    cards = [_with_blocks(n, 1024 if n < 4 else 4096) for n in range(1, 7)]
    async with running_frontend(*cards, script=SERVED, config=KvRouterConfig(router_cost="time")) as here:
        await served(here)
        _take_times(here, {1: 3.0, 2: 3.1, 3: 2.9, 4: 1.0, 5: 1.1, 6: 0.9})
        return await run_doctor(here)


async def restarted_worker(_: SetConstants) -> Report:
    async with running_frontend(card(1), card(2), script=SERVED) as here:
        await served(here)
        here.harness.discovery.drop(1)
        rank = WorkerRank(WorkerId(1), DpRank(0))
        here.harness.events.snapshots = {rank: KvSnapshot(rank, Epoch(2), EventId(0), ())}
        here.harness.discovery.put(card(1, incarnation=2))
        await served(here, n=4)
        return await run_doctor(here)


# Broken


async def events_do_not_arrive(set_constants: SetConstants) -> Report:
    set_constants(event_ingest, SILENT_AFTER_S=0.05)
    async with mock_server(uniform_fleet(replicas=2)) as here:
        (model,) = here.system.service.models()
        cache = model.cache
        assert isinstance(cache, EventCacheView)
        await until(lambda: all(each.is_missing for _, each in cache.ingest.feed_readings()))
        return await run_doctor(here)


@asynccontextmanager
async def two_engines(one: ScriptedEngine, two: ScriptedEngine, *urls: str) -> AsyncIterator[MockServer]:
    """The router before two vLLM servers of a fleet file, which make the router's tokens; ``urls`` are those
    of the file, instead of their own.
    """
    line = "  - {{name: w{}, engine: {{kind: vllm, url: '{}', kv_events: false}}}}\n"
    lines = "".join(line.format(n, url) for n, url in enumerate(urls or (one.url, two.url)))
    text = f"version: 1\nmodels: [{{name: tiny, tokenizer: '{MOCK_FOLDER}'}}]\nworkers:\n{lines}"
    async with mock_server(fleet_file(text), router=EVENTS_OFF) as here:
        found = {}
        for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
            content = PROBE if field == "prompt" else [{"role": "user", "content": PROBE}]
            asked = {"model": "tiny", field: content, "nvext": {"annotations": ["query_instance_id:"]}}
            found[field] = (await here.http.post(path, json=asked)).json()["nvext"]["token_ids"]
        for engine in (one, two):
            engine.tokens_of = lambda body: found["prompt" if "prompt" in body else "messages"]
        yield here


async def other_block_size(_: SetConstants) -> Report:
    async with scripted_engine() as one, scripted_engine() as two, two_engines(one, two) as here:
        two.replace("/metrics", 'block_size="32"', 'block_size="64"')
        return await run_doctor(here)


async def other_tokenizer(_: SetConstants) -> Report:
    async with scripted_engine() as one, scripted_engine() as two, two_engines(one, two) as here:
        two.tokens_of = lambda _body: [5, 6, 7]
        return await run_doctor(here)


async def engine_down(_: SetConstants) -> Report:
    async with running_frontend(card(1), replace(card(2), engine_silent=True), script=SERVED) as here:
        await served(here)
        return await run_doctor(here)


async def engine_refused(_: SetConstants) -> Report:
    async with scripted_engine() as one, scripted_engine() as two:
        await two.stop()
        two.replace("/v1/models", '"tiny"', '"huge"')
        async with two_engines(one, two) as here:
            await two.start()

            async def is_refused() -> bool:
                engines = (await here.http.get("/v1/fleet")).json()["expected_engines"]
                return "refused" in {each["state"] for each in engines}

            await eventually(is_refused)
            return await run_doctor(here)


async def engine_awaited(_: SetConstants) -> Report:
    async with scripted_engine() as one, scripted_engine() as two:
        await two.stop()
        async with two_engines(one, two) as here:
            return await run_doctor(here)


async def address_before_two(_: SetConstants) -> Report:
    proxy = TcpProxy("127.0.0.1", 0)
    async with scripted_engine() as one, scripted_engine() as two, proxy as service:
        two.replace("/metrics", "1.79528047303e+09", "1.79528047999e+09")
        service.take_turns(*(int(engine.url.rpartition(":")[2]) for engine in (one, two)))
        async with two_engines(one, two, f"http://127.0.0.1:{service.port}") as here:

            async def is_known() -> bool:
                return '"several_engines":true' in (await here.http.get("/v1/fleet")).text

            await eventually(is_known)
            return await run_doctor(here)


async def impossible_pair(_: SetConstants) -> Report:
    async with mock_server(zoned_fleet(), router=UNTIMED) as here:
        for worker_id in (2, 3):
            await here.kill(worker_id)
        return await run_doctor(here)


async def one_slow_of_four(_: SetConstants) -> Report:
    config = KvRouterConfig(router_cost="time")
    async with running_frontend(*map(card, range(1, 5)), script=SERVED, config=config) as here:
        await served(here)
        _take_times(here, {1: 1.0, 2: 1.1, 3: 2.5, 4: 0.9})
        return await run_doctor(here)


async def caching_off(_: SetConstants) -> Report:
    async with mock_server(uniform_fleet(replicas=1, engine="{prefix_caching: false}")) as here:
        await send_chats(here, n=3)
        return await run_doctor(here)


async def circuit_open(_: SetConstants) -> Report:
    async with running_frontend(card(1), card(2), script=SERVED, config=OPEN_LONG) as here:
        here.plane.unreachable.add(address_of(1))
        while here.harness.circuit_state(WorkerId(1)) is not CircuitState.OPEN:
            await served(here)
        return await run_doctor(here)


async def replicas_apart(_: SetConstants) -> Report:
    async with running_frontend(card(1)) as one, running_frontend(card(1)) as two:
        return await run_doctor(one, url_of(two))


async def not_accepting(_: SetConstants) -> Report:
    config = KvRouterConfig(router_min_initial_workers=3)
    async with running_frontend(card(1), card(2), config=config) as here:
        return await run_doctor(here)


SERVED_ENOUGH = (
    DoctorFleet("round-robin", round_robin),
    DoctorFleet("two engines that say nothing of their caches", two_silent_engines),
)
"""Healthy fleets of which more traffic shows nothing more."""

HEALTHY = (
    *SERVED_ENOUGH,
    DoctorFleet("one worker", one_worker),
    DoctorFleet("two equal workers", two_equal_workers),
    DoctorFleet("prefill and decode in two zones", two_zones),
    DoctorFleet("one prefill and one decode worker", a_pair),
    DoctorFleet("whole prompts cached, of three blocks", prompts_of_whole_blocks),
    DoctorFleet("the first burst of one new prompt", first_burst),
    DoctorFleet("idle, no request yet", idle),
    DoctorFleet("cached tokens reported on one of two routes", cached_tokens_on_some_routes),
    DoctorFleet("--no-kv-events on purpose", events_off_on_purpose),
    DoctorFleet("two models", several_models),
    DoctorFleet("mixed hardware, three times as fast", mixed_hardware),
    DoctorFleet("a freshly restarted worker", restarted_worker),
)

BROKEN = (
    DoctorFleet("KV events do not arrive", events_do_not_arrive, "feeds", "nothing was heard of it"),
    DoctorFleet("an engine with another block size", other_block_size, "block-sizes", "worker 2 "),
    DoctorFleet("an engine with another tokenizer", other_tokenizer, "tokenizers", "worker 2 "),
    DoctorFleet("an engine that is down", engine_down, "answering", "worker 2 "),
    DoctorFleet("an engine that is refused", engine_refused, "expected-engines", "is refused"),
    DoctorFleet("an engine that does not start", engine_awaited, "expected-engines", "no worker yet"),
    DoctorFleet("an address before two engines", address_before_two, "expected-engines", "several engines"),
    DoctorFleet("a zone without decode workers", impossible_pair, "zones", "zone=a"),
    DoctorFleet("one slow worker of four equal", one_slow_of_four, "slow-ranks", "worker 3 "),
    DoctorFleet("prefix caching off in the engine", caching_off, "kv-events", "worker 1 "),
    DoctorFleet("an open circuit", circuit_open, "circuits", "worker 1 "),
    DoctorFleet("replicas without replica sync", replicas_apart, "replicas", "shares nothing"),
    DoctorFleet("/accepting is 503", not_accepting, "accepting", "GET /accepting"),
)


async def _print_verdicts() -> None:
    def set_constants(module: ModuleType, **values: object) -> None:
        for name, value in values.items():
            setattr(module, name, value)

    print("| fleet | verdict | passed | not enough |\n|---|---|---|---|")
    for each in (*HEALTHY, *reversed(BROKEN)):  # the one that sets a constant is the last
        report = await each.examined(set_constants)
        few = ", ".join(sorted({unmade.check for unmade in report.not_enough})) or "-"
        print(f"| {each.name} | {each.verdict(report)} | {len(report.passed)} | {few} |")


if __name__ == "__main__":
    asyncio.run(_print_verdicts())
