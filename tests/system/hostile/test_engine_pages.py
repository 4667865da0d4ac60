"""``kvrouter up`` before engines whose metrics pages have 60 MB: it serves, and says what it leaves out."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from tests.system.hostile.meter import MIB, Meter
from tests.testing.processes import fleet
from tests.testing.scripted_engine import JSON, VLLM_PAGES, ScriptedAnswer, page, scripted_engine

PAGE_BYTES = 60 * MIB
MEMORY_MAX_BYTES = 50 * MIB
TURN_MAX_S = 0.1
PROBES = 3
"""How often each page is read while the event loop is watched."""

UNITS = (b'vllm:num_requests_running{engine="0",model_name="tiny"} 1.0\n', b"other_metric 1\n", b"x")
"""What the pages consist of: samples that are used, others, and a line without an end."""


async def test_huge_engine_metrics_pages_do_not_stop_serving(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in UNITS]
        workers = ""
        for number, (engine, unit) in enumerate(zip(engines, UNITS, strict=True)):
            pieces = (page(VLLM_PAGES["/metrics"]), *([unit * (MIB // len(unit))] * (PAGE_BYTES // MIB)))
            engine.pages["/metrics"] = ScriptedAnswer(pieces, content_type="text/plain")
            engine.answers.append(ScriptedAnswer((page("vllm-0.32.0-completion.json"),), content_type=JSON))
            at = f"{{kind: vllm, url: '{engine.url}', kv_events: false}}"
            workers += f"- {{name: e{number}, engine: {at}}}\n"
        file.write_text(f"version: 1\nmodels: [{{name: tiny, tokenizer: mock}}]\nworkers:\n{workers}")
        router = await (await stack.enter_async_context(fleet())).door(
            "up", "--fleet", str(file), "--no-kv-events"
        )
        for engine in engines:  # on a busy machine its page may come too late to be found long
            why = r" has a longer metrics page than is read|.*/metrics: it did not answer in time"
            await router.found_in_log(f"the engine at {engine.url}({why})")
        meter = Meter(router.pid)
        meter.forget_peak()
        before_bytes = meter.resident_bytes()
        before_probes = [engine.asked["/metrics"] for engine in engines]
        turns_s: list[float] = []
        while any(
            engine.asked["/metrics"] < before + PROBES
            for engine, before in zip(engines, before_probes, strict=True)
        ):
            before_s = meter.loop_cpu_s()
            assert (await router.http.get("/health")).status_code == 200
            turns_s.append(meter.loop_cpu_s() - before_s)
            await asyncio.sleep(0.005)
        grown_bytes = meter.peak_bytes() - before_bytes
        print(f"+{grown_bytes / MIB:.0f} MiB, loop {1e3 * max(turns_s):.0f} ms")
        assert grown_bytes < MEMORY_MAX_BYTES
        long_s = [turn_s for turn_s in turns_s if turn_s > TURN_MAX_S]
        assert len(long_s) < PROBES, "a page that takes a long turn takes one each time that it is read"
        call = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        assert (await router.http.post("/v1/completions", json=call)).status_code == 200
