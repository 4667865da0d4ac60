"""``kvrouter doctor`` names what workers and their engines, or engines and the router, disagree about."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from msgspec.structs import replace

from kvrouter.cli.doctor.diagnosis import PROBE, reached_at
from kvrouter.cli.doctor.findings import Severity
from kvrouter.cli.doctor.flags import DoctorOptions
from kvrouter.core.events import KvBatch
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.transports.requests.port import WorkerUnreachable
from tests.testing.doctor import (
    failed_checks,
    findings_of,
    only_finding,
    run_doctor,
    skipped_checks,
    without_data,
)
from tests.testing.frontend_harness import running_frontend
from tests.testing.mock_fleet import fleet_file
from tests.testing.mock_server import MockServer, mock_server
from tests.testing.router_harness import card
from tests.testing.scripted_engine import AnswerEnd, ScriptedAnswer, ScriptedEngine, scripted_engine


@asynccontextmanager
async def before(
    *engines: ScriptedEngine, prefill: ScriptedEngine | None = None
) -> AsyncIterator[MockServer]:
    """The router before vLLM servers of one model, which make the same tokens as the router does."""
    role = "both" if prefill is None else "decode"
    line = "  - {{name: w{}, role: {}, engine: {{kind: vllm, url: '{}', kv_events: false}}}}\n"
    groups = [line.format(number, role, engine.url) for number, engine in enumerate(engines)]
    if prefill is not None:
        groups.append(line.format("p", "prefill", prefill.url))
    text = f"version: 1\nmodels: [{{name: tiny, tokenizer: '{MOCK_FOLDER}'}}]\nworkers:\n{''.join(groups)}"
    async with mock_server(fleet_file(text), router=KvRouterConfig(kv_events=False)) as here:
        text_ids = await router_tokens(here, is_chat=False)
        chat_ids = await router_tokens(here, is_chat=True)
        for engine in (*engines, *([] if prefill is None else [prefill])):
            engine.tokens_of = lambda body: text_ids if "prompt" in body else chat_ids
        yield here


async def router_tokens(here: MockServer, *, is_chat: bool) -> Sequence[int]:
    """What the router makes of the text that doctor asks for."""
    content: dict[str, Any] = (
        {"messages": [{"role": "user", "content": PROBE}]} if is_chat else {"prompt": PROBE}
    )
    body = {"model": "tiny", **content, "nvext": {"annotations": ["query_instance_id:"]}}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return list((await here.http.post(path, json=body)).json()["nvext"]["token_ids"])


async def test_consistent_engines_have_no_findings() -> None:
    async with scripted_engine() as one, scripted_engine() as two, before(one, two) as here:
        report = await run_doctor(here)
        assert [each.path for each in (*one.calls, *two.calls)] == ["/tokenize"] * 4
    assert report.findings == []
    assert {each.check for each in report.not_made} == {"replicas", "predictions", "slow-ranks"}


async def test_doctor_reports_a_model_routed_by_load_without_a_tokenizer() -> None:
    async with scripted_engine() as engine:
        text = f"""
version: 1
models: [{{name: tiny}}]
workers: [{{name: w, engine: {{kind: vllm, url: '{engine.url}', kv_events: false}}}}]
"""
        async with mock_server(fleet_file(text), router=KvRouterConfig(kv_events=False)) as here:
            report = await run_doctor(here)
    finding = only_finding(report, "tokenizers", Severity.WARNING)
    assert finding.subject == "model tiny"
    assert finding.seen == "its calls are routed by load and text: tiny-model is no folder here"
    assert "tokenizer in the fleet file" in finding.remedy


async def test_doctor_reports_a_template_failing_on_some_chats(tmp_path: Path) -> None:
    folder = copytree(MOCK_FOLDER, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content + m.name }}{% endfor %}")
    async with scripted_engine() as engine:
        text = f"""
version: 1
models: [{{name: tiny, tokenizer: '{folder}'}}]
workers: [{{name: w, engine: {{kind: vllm, url: '{engine.url}', kv_events: false}}}}]
"""
        async with mock_server(fleet_file(text), router=KvRouterConfig(kv_events=False)) as here:
            said = {"role": "user", "content": "a"}
            for messages in [[said]] * 8 + [[{**said, "name": "n"}]] * 12:
                body = {
                    "model": "tiny",
                    "messages": messages,
                    "nvext": {"annotations": ["query_instance_id:"]},
                }
                assert (await here.http.post("/v1/chat/completions", json=body)).is_success
            report = await run_doctor(here)
    finding = only_finding(report, "tokenizers", Severity.WARNING)
    assert finding.subject == "model tiny"
    assert finding.seen.startswith("8 chats could not be made into prompts (template_failed): ")


async def test_doctor_reports_an_engines_block_size_differing_from_its_card() -> None:
    async with scripted_engine() as one, scripted_engine() as two, before(one, two) as here:
        two.replace("/metrics", 'block_size="32"', 'block_size="64"')
        report = await run_doctor(here)
    finding = only_finding(report, "block-sizes", Severity.CRITICAL)
    assert finding.subject.startswith("worker 2 ")
    assert finding.seen == "its card says blocks of 32 tokens, and its engine has blocks of 64"


async def test_doctor_reports_workers_of_one_model_with_other_block_sizes() -> None:
    async with running_frontend(card(1), card(2), replace(card(3), block_size=32)) as frontend:
        report = await run_doctor(frontend)
    finding = only_finding(report, "block-sizes", Severity.CRITICAL)
    assert finding.subject.startswith("worker 3 ")
    assert "has blocks of 32 tokens" in finding.seen
    assert failed_checks(report) == {"block-sizes"}


async def test_doctor_reports_workers_of_other_versions_than_the_router() -> None:
    async with running_frontend(
        replace(card(1), version="0.0.9"), replace(card(2), version="0.0.9")
    ) as frontend:
        report = await run_doctor(frontend)
    finding = only_finding(report, "versions", Severity.WARNING)
    assert finding.subject == "kvrouter"
    assert "0.0.9: worker 1, worker 2" in finding.seen
    assert "router http://" in finding.seen


async def test_doctor_reports_engines_of_one_kind_with_other_versions() -> None:
    cards = [
        replace(card(n), engine=engine)
        for n, engine in enumerate(("vllm 0.11.0", "vllm 0.12.0", "vllm 0.12.0", "sglang 0.5"), start=1)
    ]
    async with running_frontend(*cards) as frontend:
        report = await run_doctor(frontend)
    finding = only_finding(report, "versions", Severity.WARNING)
    assert finding.subject == "vllm (mock)"
    assert finding.seen == "0.12.0: worker 2, worker 3; 0.11.0: worker 1"


async def test_doctor_reports_an_engine_updated_under_its_worker() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.replace("/version", "0.32.0", "0.33.0")
        report = await run_doctor(here)
    finding = only_finding(report, "versions", Severity.WARNING)
    assert finding.seen == "its card says vllm 0.32.0, and its engine is vllm 0.33.0 now"


@pytest.mark.parametrize("ahead_s", [90.0, -90.0])
async def test_doctor_reports_an_engine_whose_clock_is_off(ahead_s: float) -> None:
    async with scripted_engine() as one, scripted_engine() as two, before(one, two) as here:
        two.clock_ahead_s = ahead_s
        report = await run_doctor(here)
    finding = only_finding(report, "clocks", Severity.WARNING)
    assert finding.subject == "the engine of worker 2"
    assert ("ahead of" if ahead_s > 0 else "behind") in finding.seen


@pytest.mark.parametrize("ahead_s", [90.0, -90.0])
async def test_doctor_reports_a_worker_whose_clock_is_off(
    ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_frontend(card(1), card(2)) as frontend:
        now_s = 1.7e9
        monkeypatch.setattr("kvrouter.router.event_ingest.time.time", lambda: now_s)
        for worker_id, its_s in ((1, now_s - 0.01), (2, now_s + ahead_s)):
            rank = WorkerRank(WorkerId(worker_id), DpRank(0))
            frontend.harness.events.batch(KvBatch(rank, Epoch(1), EventId(0), (), published_s=its_s))
        report = await run_doctor(frontend)
    finding = only_finding(report, "clocks", Severity.WARNING)
    assert finding.subject.startswith("worker 2 ")
    assert f"its clock is 90 s {'ahead of' if ahead_s > 0 else 'behind'} the router's" == finding.seen


async def test_the_clocks_check_does_not_pass_without_known_clocks() -> None:
    async with running_frontend(card(1)) as frontend:
        report = await run_doctor(frontend)
    assert "clocks" not in {each.check for each in report.passed}
    assert without_data(report, "clocks") != []


async def test_doctor_reports_an_engine_with_another_tokenizer() -> None:
    async with scripted_engine() as one, scripted_engine() as two, before(one, two) as here:
        two.tokens_of = lambda _body: [5, 6, 7]
        report = await run_doctor(here)
    text, chat = findings_of(report, "tokenizers")
    assert {each.subject.split(" (")[0] for each in (text, chat)} == {"worker 2"}
    assert "its engine makes 3 tokens (5 6 7)" in text.seen
    assert failed_checks(report) == {"tokenizers"}


async def test_doctor_reports_an_engine_with_another_chat_template() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        text_ids = await router_tokens(here, is_chat=False)
        engine.tokens_of = lambda body: text_ids if "prompt" in body else [9]
        report = await run_doctor(here)
    finding = only_finding(report, "tokenizers", Severity.CRITICAL)
    assert finding.seen.startswith("of a chat its engine makes ")
    assert "chat template" in finding.remedy


async def test_a_prefill_workers_engine_is_asked_directly_for_tokens() -> None:
    async with (
        scripted_engine() as decode,
        scripted_engine() as prefill,
        before(decode, prefill=prefill) as here,
    ):
        well = await run_doctor(here)
        paths = [call.path for call in prefill.calls]
        prefill.tokens_of = lambda _body: [5, 6, 7]
        report = await run_doctor(here)
    assert paths == ["/tokenize"] * 2
    assert well.findings == []
    assert [each.subject.split(" (")[0] for each in findings_of(report, "tokenizers")] == ["worker 2"] * 2


async def test_checks_of_unreachable_engines_are_reported_as_skipped() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.tokens_of = None
        engine.set_page("/v1/models", "{}", status=500)
        report = await run_doctor(here)
    (why,) = skipped_checks(report, "engines")
    assert why.startswith("the engine of worker 1: ")
    assert "answered 500" in why
    assert len(skipped_checks(report, "tokenizers")) == 2
    assert not {"engines", "tokenizers"} & {each.check for each in report.passed}


async def test_an_engine_requiring_a_key_is_asked_through_its_worker() -> None:
    async with scripted_engine() as one, scripted_engine() as two, before(one, two) as here:
        for engine in (one, two):
            engine.set_page("/v1/models", "{}", status=401)
        well = await run_doctor(here)
        two.tokens_of = lambda _body: [5, 6, 7]
        report = await run_doctor(here)
    assert len(skipped_checks(well, "engines")) == 2
    assert (well.findings, skipped_checks(well, "tokenizers")) == ([], [])
    for check in ("block-sizes", "versions"):
        assert skipped_checks(well, check) == [
            "the engines of workers 1, 2: they were not asked, or did not answer: what their workers' cards "
            "say "
            "was compared alone"
        ]
    assert {each.subject.split(" (")[0] for each in findings_of(report, "tokenizers")} == {"worker 2"}


async def test_a_hanging_engine_is_skipped_after_the_timeout() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.pages["/v1/models"] = ScriptedAnswer(ends=AnswerEnd.NO_HEADERS)
        report = await run_doctor(here, options=DoctorOptions(timeout_s=5.0))
    assert skipped_checks(report, "engines") == [f"the engine of worker 1: {engine.url}: no answer in 5 s"]


async def test_no_engine_is_asked_with_no_engines() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        asked = engine.asked.copy()
        report = await run_doctor(here, options=DoctorOptions(engines=False))
        assert engine.calls == []
        assert engine.asked["/version"] == asked["/version"]
    assert skipped_checks(report, "engines") == ["engines: --no-engines: no engine was asked"]
    assert "tokenizers" not in {each.check for each in report.passed}


@pytest.mark.parametrize(
    ("engine", "worker", "router", "reached"),
    [
        (
            "http://127.0.0.1:8100",
            "tcp://127.0.0.1:7000/1/2",
            "http://localhost:8000",
            "http://127.0.0.1:8100",
        ),
        ("http://127.0.0.1:8100", "tcp://10.0.0.7:7000/1/2", "http://router:8000", "http://10.0.0.7:8100"),
        ("http://localhost:8100/v", "tcp://[fd00::7]:7000/1/2", "http://router", "http://[fd00::7]:8100/v"),
        ("http://localhost:8100", "tcp://127.0.0.1:7000/1/2", "http://router:80", "http://router:8100"),
        ("http://localhost:8100", "memory://1/2", "http://router:8000", "http://router:8100"),
        ("http://localhost:8100", "nats://default/1/2", "http://127.0.0.1:8000", "http://localhost:8100"),
        ("http://10.0.0.9:8100/", "nats://default/1/2", "http://router:8000", "http://10.0.0.9:8100/"),
    ],
)
def test_an_engine_is_asked_at_its_workers_host(engine: str, worker: str, router: str, reached: str) -> None:
    assert reached_at(engine, worker, router).rstrip("/") == reached.rstrip("/")


def test_an_engine_on_an_unknown_host_is_not_asked() -> None:
    with pytest.raises(WorkerUnreachable, match="own host"):
        reached_at("http://localhost:8100", "nats://default/1/2", "http://router:8000")
