"""A fleet file's engines that run already, in one process: they join, are awaited, or contradict the file."""

import json
import logging
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from kvrouter.app.attach import attachment
from kvrouter.cli.up.run import Embedded, embedded
from kvrouter.core.errors import ConfigError, TopologyUnavailable
from kvrouter.core.ids import DpRank, Taint, WorkerId, WorkerRank
from kvrouter.core.workers import WorkerCard
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.settings.problems import parse_document
from kvrouter.settings.tree import FrontendSettings, Settings
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.worker import Worker
from tests.testing.constants import SetConstants
from tests.testing.engine_publisher import publisher, stored_event, vllm_batch
from tests.testing.log_events import event_of
from tests.testing.processes import Metrics, eventually
from tests.testing.scripted_engine import (
    JSON,
    SGLANG_PAGES,
    VLLM_PAGES,
    ScriptedAnswer,
    ScriptedEngine,
    page,
    scripted_engine,
)
from tests.testing.tcp_proxy import TcpProxy
from tests.testing.waits import until

CONNECTION_REFUSED = "connection refused"
VLLM = "{{kind: vllm, url: '{url}', kv_events: false}}"
SGLANG = "{{kind: sglang, url: '{url}', kv_events: false}}"
MODEL = f"{{name: tiny, tokenizer: '{MOCK_FOLDER}'}}"
CALL = {"model": "tiny", "prompt": "hello", "max_tokens": 3}


@pytest.fixture(autouse=True)
def _asked_at_once(set_constants: SetConstants) -> None:
    set_constants(attachment, PROBE_EVERY_S=0.01, RETRY_AFTER_S=0.01)


@dataclass
class Up:
    """One ``kvrouter up`` in this process."""

    system: Embedded
    http: httpx.AsyncClient

    @property
    def workers(self) -> Mapping[WorkerId, Worker]:
        assert self.system.attached is not None
        return self.system.attached.workers

    async def ready(self) -> tuple[int, str]:
        answer = await self.http.get("/ready")
        return answer.status_code, answer.text

    async def metric(self, name: str) -> float:
        return Metrics((await self.http.get("/metrics")).text).total(name)

    async def expected(self) -> list[dict[str, object]]:
        answer = (await self.http.get("/v1/fleet")).json()
        return [engine for engine in answer["expected_engines"] if engine["state"] != "joined"]

    async def until_joined(self, worker_id: int) -> None:
        await until(lambda: WorkerId(worker_id) in self.workers)

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            return (await self.ready())[0] == 200

        await eventually(is_ready)


@asynccontextmanager
async def up(
    file: str, *, environ: Mapping[str, str] | None = None, frontend: FrontendSettings | None = None
) -> AsyncIterator[Up]:
    fleet = load_fleet(parse_document(f"version: 1\n{file}", "fleet.yaml")).fleet
    settings = Settings(frontend=frontend or FrontendSettings(http_port=0))
    async with embedded(settings, fleet, environ=environ or {}) as system:
        host, port = system.address
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60.0) as http:
            yield Up(system, http)


def file_of(*engines: str, model: str = MODEL, more: str = "") -> str:
    groups = "".join(f"  - {{name: w{at}, engine: {engine}{more}}}\n" for at, engine in enumerate(engines))
    return f"models: [{model}]\nworkers:\n{groups}"


async def refused(file: str) -> str:
    with pytest.raises(ConfigError) as caught:
        async with up(file):
            pass
    return caught.value.message


def completion() -> ScriptedAnswer:
    return ScriptedAnswer((page("vllm-0.32.0-completion.json"),), content_type=JSON)


async def test_engine_given_by_its_url_alone_serves_with_its_own_facts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with scripted_engine() as engine:
        engine.answers.append(completion())
        async with up(file_of(VLLM.format(url=engine.url))) as here:
            assert await here.ready() == (200, '{"status":"ready"}')
            models = (await here.http.get("/v1/models")).json()["data"]
            assert [(each["id"], each["max_model_len"]) for each in models] == [("tiny", 2048)]
            (card,) = (worker.card for worker in here.workers.values())
            assert (card.worker_id, card.block_size, card.takes_calls) == (1, 32, True)
            lines = [line for line in caplog.records if event_of(line) == "engine_attached"]
            (reported,) = (vars(line)["kvrouter_fields"] for line in lines)
            assert (reported["worker"], reported["url"], reported["version"]) == (
                "1",
                engine.url,
                "vllm 0.32.0",
            )
            answer = await here.http.post("/v1/completions", json=CALL)
            assert answer.content == page("vllm-0.32.0-completion.json")
            assert engine.calls[0].body == CALL


async def test_engines_of_a_model_without_a_name_serve_each_its_own() -> None:
    async with scripted_engine() as one, scripted_engine() as other:
        models = other.json("/v1/models")
        models["data"][0]["id"] = "large"
        other.set_json("/v1/models", models)
        async with up(file_of(VLLM.format(url=one.url), VLLM.format(url=other.url), model="{}")) as here:
            models = (await here.http.get("/v1/models")).json()["data"]
            assert sorted(each["id"] for each in models) == ["large", "tiny"]


async def test_cache_of_an_engine_without_kv_events_is_predicted_beside_one_with_events() -> None:
    token_ids = [*range(20, 20 + 4 * 32)]
    body = {"model": "tiny", "prompt": token_ids, "max_tokens": 3}
    async with scripted_engine() as silent, scripted_engine() as other, publisher() as events:
        line = f"{{kind: vllm, url: '{other.url}', kv_events_endpoint: '{events.at.events}'}}"
        async with up(file_of(VLLM.format(url=silent.url), line)) as here:
            (model,) = here.system.service.models()
            slot = model.fleet.slot_of(WorkerRank(WorkerId(1), DpRank(0)))
            assert slot is not None
            prompt = model.hash_prompt(array("I", token_ids))

            def blocks() -> list[int]:
                overlap = model.cache.overlap(prompt, model.fleet.n_slots, now_s=model.clock())
                assert overlap is not None
                return [int(n) for n in overlap]

            assert blocks() == [0, 0]
            silent.answers += [completion()] * 2
            pinned = {**body, "nvext": {"worker_id": 1}}
            assert (await here.http.post("/v1/completions", json=pinned)).status_code == 200
            assert (blocks()[slot], sum(blocks())) == (4, 4)
            assert (await here.http.post("/v1/completions", json=body)).status_code == 200
            assert (len(silent.calls), len(other.calls)) == (2, 0)


async def test_kv_events_of_an_engine_are_known_to_the_router() -> None:
    async with scripted_engine() as engine, publisher() as events:
        line = (
            f"{{kind: vllm, url: '{engine.url}', kv_events_endpoint: '{events.at.events}', "
            f"kv_events_replay_endpoint: '{events.at.replay}'}}"
        )
        async with up(file_of(line)) as here:
            await events.publish(vllm_batch(stored_event(1), stored_event(2, parent=1)))
            (model,) = here.system.service.models()

            async def are_known() -> bool:
                workers = (await here.http.get("/v1/fleet")).json()["workers"]
                return [rank["index_blocks"] for worker in workers for rank in worker["ranks"]] == [2]

            await eventually(are_known)
            assert model.fleet.takes_calls


async def test_engine_key_of_the_environment_is_sent_to_the_engine() -> None:
    async with scripted_engine() as engine:
        async with up(file_of(VLLM.format(url=engine.url)), environ={"KVROUTER_ENGINE_API_KEY": "secret"}):
            pass
        assert {each["Authorization"] for each in engine.question_headers} == {"Bearer secret"}


async def test_each_engine_gets_only_its_own_key(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("of b\n")
    keys = {"KVROUTER_ENGINE_API_KEY": "of all", "KVROUTER_ENGINE_API_KEY_A": "of a\n"}
    async with scripted_engine() as a, scripted_engine() as b, scripted_engine() as c:
        own = {a.url: "api_key_env: KVROUTER_ENGINE_API_KEY_A", b.url: f"api_key_file: {tmp_path / 'b'}"}
        lines = (
            f"{{kind: vllm, url: '{each.url}', kv_events: false, {own.get(each.url, '')}}}"
            for each in (a, b, c)
        )
        async with up(file_of(*lines), environ=keys):
            pass
        for engine, key in ((a, "of a"), (b, "of b"), (c, "of all")):
            assert {each["Authorization"] for each in engine.question_headers} == {f"Bearer {key}"}


async def test_engine_that_refuses_its_key_is_named_with_the_keys_source() -> None:
    async with scripted_engine() as engine:
        for path in engine.pages:
            engine.set_page(path, '{"error":"Unauthorized"}', status=401)
        line = f"{{kind: vllm, url: '{engine.url}', api_key_env: OURS}}"
        with pytest.raises(ConfigError, match="takes another key than that of OURS") as refused:
            async with up(file_of(line), environ={"OURS": "wrong"}):
                pass
        assert "wrong" not in refused.value.message


@pytest.mark.parametrize("key", ["api_key_env: OURS", "api_key_file: /there/is/no/such/file"])
async def test_missing_engine_key_ends_the_start_with_its_field(key: str) -> None:
    line = f"{{kind: vllm, url: 'http://127.0.0.1:1', {key}}}"
    with pytest.raises(ConfigError, match=rf"^workers\[0\].engine.{key.partition(':')[0]}: "):
        async with up(file_of(line), environ={"OURS": " "}):
            pass


async def test_cards_of_attached_engines_have_place_taints_and_policy() -> None:
    async with scripted_engine() as one, scripted_engine() as other:
        file = f"""
models: [{MODEL}]
topology: {{levels: [zone]}}
kv_transfer: {{domain: zone}}
workers:
  - {{name: p, role: prefill, domains: {{zone: a}}, taints: [gpu], engine: {VLLM.format(url=one.url)}}}
  - {{name: d, role: decode, domains: {{zone: a}}, engine: {VLLM.format(url=other.url)}}}
"""
        async with up(file) as here:
            config = here.workers[WorkerId(1)].card.runtime_config
            assert config.topology_domains == {"zone": "a"}
            assert config.taints == frozenset({Taint("gpu")})
            assert config.kv_transfer_domain == "zone"
            assert (await here.ready())[0] == 200


async def test_pair_of_attached_engines_keeps_kv_in_its_zone() -> None:
    async with scripted_engine() as prefill, scripted_engine() as near, scripted_engine() as far:
        file = f"""
models: [{MODEL}]
topology: {{levels: [zone]}}
kv_transfer: {{domain: zone}}
workers:
  - {{name: p, role: prefill, domains: {{zone: a}}, engine: {VLLM.format(url=prefill.url)}}}
  - {{name: far, role: decode, domains: {{zone: b}}, engine: {VLLM.format(url=far.url)}}}
  - {{name: near, role: decode, domains: {{zone: a}}, engine: {VLLM.format(url=near.url)}}}
"""
        waits = {
            **json.loads(page("vllm-0.32.0-completion.json")),
            "kv_transfer_params": {"remote_host": "h"},
        }
        prefill.answers.append(ScriptedAnswer((json.dumps(waits).encode(),), content_type=JSON))
        near.answers.append(completion())
        async with up(file) as here:
            answer = await here.http.post("/v1/completions", json=CALL)
            assert answer.content == page("vllm-0.32.0-completion.json")
        assert prefill.calls[0].body["max_tokens"] == 1
        assert near.calls[0].body == {**CALL, "kv_transfer_params": {"remote_host": "h"}}
        assert far.calls == []


async def test_each_url_is_a_worker_beside_mock_engines_of_another_model() -> None:
    async with scripted_engine() as one, scripted_engine() as other:
        urls = f"{{kind: vllm, urls: ['{one.url}', '{other.url}'], kv_events: false}}"
        file = (
            f"models: [{{name: mock}}, {MODEL}]\nworkers:\n"
            f"  - {{name: m, model: mock, replicas: 2}}\n  - {{name: v, model: tiny, engine: {urls}}}\n"
        )
        async with up(file) as here:
            assert sorted(here.workers) == [3, 4]
            assert sorted(here.system.fleet.workers) == [1, 2]
            answer = await here.http.post("/v1/completions", json={**CALL, "model": "mock"})
            assert answer.status_code == 200


CONTRADICTIONS: Mapping[str, tuple[str, str, str]] = {
    "model": ("{name: big, tokenizer: mock}", "", "models[0].name: the engine serves tiny, not 'big'"),
    "block_size": (
        "{name: tiny, tokenizer: mock, block_size: 64}",
        "",
        "models[0].block_size: the engine's blocks have 32 tokens, not 64",
    ),
    "context_length": (
        "{name: tiny, tokenizer: mock, context_length: 4096}",
        "",
        "models[0].context_length: the engine's context holds 2048 tokens, not 4096",
    ),
    "dp_size": (MODEL, ", dp_size: 2", "workers[0].dp_size: the engine has 1 data-parallel ranks, not 2"),
}


@pytest.mark.parametrize("field", sorted(CONTRADICTIONS))
async def test_a_contradiction_ends_the_start_and_names_engine_field_and_fix(field: str) -> None:
    model, more, says = CONTRADICTIONS[field]
    async with scripted_engine() as engine:
        message = await refused(file_of(VLLM.format(url=engine.url), model=model, more=more))
        assert message.startswith(f"workers[0].engine.url: {engine.url}: {says}")


async def test_every_contradicting_engine_is_reported_on_its_own_line() -> None:
    async with scripted_engine() as one, scripted_engine(SGLANG_PAGES) as other:
        urls = f"{{kind: vllm, urls: ['{one.url}', '{other.url}'], kv_events: false}}"
        message = await refused(file_of(urls, model="{name: big, tokenizer: mock}"))
    lines = sorted(message.splitlines())
    assert [line.split(": ")[0] for line in lines] == [f"workers[0].engine.urls[{at}]" for at in (0, 1)]
    assert "is it vLLM's server?" in lines[1]


async def test_engines_of_one_model_must_have_equal_block_sizes() -> None:
    async with scripted_engine() as one, scripted_engine(SGLANG_PAGES) as other:
        message = await refused(file_of(VLLM.format(url=one.url), SGLANG.format(url=other.url)))
        assert "models[0].block_size: the engine's blocks have" in message
        assert "engines of one model have blocks of one size" in message
        sized = "{name: tiny, tokenizer: mock, block_size: 16}"
        message = await refused(file_of(VLLM.format(url=one.url), SGLANG.format(url=other.url), model=sized))
        assert message.startswith(f"workers[0].engine.url: {one.url}: models[0].block_size: ")


async def test_mock_engine_beside_an_engine_must_have_its_block_size() -> None:
    async with scripted_engine() as engine:
        line = VLLM.format(url=engine.url)
        assert "have 32 tokens, not 64" in await refused(file_of(line, "{}"))
        sized = "{name: tiny, block_size: 32, context_length: 1024}"
        async with up(file_of(line, "{}", model=sized)) as here:
            (model,) = here.system.service.models()
            assert {card.context_length for card in model.fleet} == {1024}


async def test_missing_tokenizer_folder_is_named(tmp_path: Path) -> None:
    async with scripted_engine() as engine:
        model = f"{{name: tiny, tokenizer: '{tmp_path}/absent'}}"
        message = await refused(file_of(VLLM.format(url=engine.url), model=model))
        assert message == (
            f"models[0].tokenizer: {tmp_path}/absent is no folder here, nor the name of a repository"
        )


async def down() -> ScriptedEngine:
    """An engine that is not up, and where it will be."""
    engine = ScriptedEngine()
    await engine.start()
    await engine.stop()
    return engine


async def test_engine_that_is_not_up_is_awaited_and_delays_no_other() -> None:
    late = await down()
    file = (
        f"models: [{{name: mock}}, {MODEL}]\nworkers:\n"
        f"  - {{name: m, model: mock}}\n  - {{name: v, model: tiny, engine: {VLLM.format(url=late.url)}}}\n"
    )
    async with up(file) as here:
        status, text = await here.ready()
        assert status == 200
        assert f"the engine of workers[1].engine.url at {late.url} is awaited: /v1/models: " in text
        (problem,) = json.loads(text)["engine_problems"]
        assert (problem["worker_id"], problem["engine_url"], problem["role"]) == (2, late.url, "both")
        assert (problem["kind"], problem["model"], problem["state"]) == ("vllm", "tiny", "awaited")
        assert CONNECTION_REFUSED in problem["reason"]
        assert await here.expected() == [problem]
        assert await here.metric("engines_awaited") == 1
        assert (await here.http.post("/v1/completions", json={**CALL, "model": "mock"})).status_code == 200
        await late.start()
        try:
            await here.until_joined(2)
            assert await here.ready() == (200, '{"status":"ready"}')
            assert await here.metric("engines_awaited") == 0
        finally:
            await late.stop()


async def test_fleet_of_one_absent_engine_is_not_ready_until_it_answers() -> None:
    late = await down()
    async with up(file_of(VLLM.format(url=late.url))) as here:
        status, text = await here.ready()
        error = json.loads(text)["error"]
        assert (status, error["engine_problems"]) == (503, await here.expected())
        awaited = f"the engine of workers[0].engine.url at {late.url} is awaited: /v1/models: "
        assert awaited + CONNECTION_REFUSED in error["message"]
        await late.start()
        try:
            await here.until_ready()
        finally:
            await late.stop()


async def test_late_engine_that_contradicts_the_file_is_reported_once_and_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = await down()
    late.replace("/v1/models", '"tiny"', '"other"')
    async with up(file_of(VLLM.format(url=late.url))) as here:
        await late.start()
        try:
            await until(lambda: "worker_refused" in caplog.text)
            await until(lambda: late.asked["/v1/models"] > 3)
            assert caplog.text.count("worker_refused") == 1
            status, text = await here.ready()
            (refused,) = json.loads(text)["error"]["engine_problems"]
            assert (status, refused["state"], refused["engine_url"]) == (503, "refused", late.url)
            assert refused["reason"].startswith("models[0].name: ")
            logged = next(line for line in caplog.records if event_of(line) == "worker_refused")
            assert refused["reason"] in vars(logged)["kvrouter_fields"]["reason"]
            late.replace("/v1/models", '"other"', '"tiny"')
            await here.until_ready()
        finally:
            await late.stop()


async def test_the_reason_of_a_server_that_is_no_engine_does_not_repeat_its_url(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = await down()
    late.pages.clear()
    async with up(file_of(VLLM.format(url=late.url))) as here:
        await late.start()
        try:
            await until(lambda: "worker_refused" in caplog.text)
            (refused,) = await here.expected()
            assert str(refused["reason"]).startswith("has no /v1/models: is it vLLM's server?")
        finally:
            await late.stop()


async def test_late_engine_with_other_blocks_than_its_model_stays_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = await down()
    late.replace("/metrics", 'block_size="32"', 'block_size="16"')
    async with (
        scripted_engine() as engine,
        up(file_of(VLLM.format(url=engine.url), VLLM.format(url=late.url))) as here,
    ):
        await late.start()
        try:
            await until(lambda: "worker_refused" in caplog.text)
            (refused,) = await here.expected()
            assert refused["state"] == "refused"
            assert "engines of one model have blocks of one size" in str(refused["reason"])
            asked = late.asked["/v1/models"]
            await until(lambda: late.asked["/v1/models"] >= asked + 3)
            assert await here.expected() == [refused]
            assert caplog.text.count("worker_refused") == 1
        finally:
            await late.stop()


async def test_engine_that_restarts_changed_gets_a_new_incarnation() -> None:
    async with scripted_engine() as engine, up(file_of(VLLM.format(url=engine.url))) as here:

        def card() -> WorkerCard | None:
            worker = here.workers.get(WorkerId(1))
            return None if worker is None else worker.card

        before = card()
        assert before is not None
        await engine.stop()
        await until(lambda: (now := card()) is None or now.engine_silent)
        engine.replace("/metrics", 'block_size="32"', 'block_size="16"')
        engine.replace("/v1/models", "2048", "4096")
        await engine.start()
        await until(lambda: (now := card()) is not None and now.block_size == 16)
        now = card()
        assert now is not None
        assert (now.context_length, now.incarnation == before.incarnation) == (4096, False)
        await here.until_ready()


@pytest.mark.parametrize(
    ("line", "pages", "path", "start", "other_start"),
    [
        (VLLM, VLLM_PAGES, "/metrics", "1.79528047303e+09", "1.79528047999e+09"),
        (SGLANG, SGLANG_PAGES, "/server_info", '"load_weight": 0.03', '"load_weight": 0.04'),
    ],
    ids=["vllm", "sglang"],
)
async def test_url_before_several_engines_is_named_in_log_ready_fleet_and_metrics(
    line: str,
    pages: Mapping[str, str],
    path: str,
    start: str,
    other_start: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        scripted_engine(pages) as one,
        scripted_engine(pages) as other,
        TcpProxy("127.0.0.1", 0) as service,
    ):
        other.replace(path, start, other_start)
        service.take_turns(*(urlsplit(engine.url).port or 0 for engine in (one, other)))
        url = f"http://127.0.0.1:{service.port}"
        async with up(file_of(line.format(url=url))) as here:
            assert await here.metric("worker_several_engines") == 0
            await until(lambda: here.workers[WorkerId(1)].card.several_engines)
            why = f"{url} is an address before several engines: give kvrouter each engine's own URL"

            async def is_shown() -> bool:
                return '"several_engines":true' in (await here.http.get("/v1/fleet")).text

            await eventually(is_shown)
            status, text = await here.ready()
            (problem,) = json.loads(text)["engine_problems"]
            assert (status, problem["state"], problem["reason"]) == (200, "joined", why)
            assert "awaited" not in json.loads(text)
            assert await here.metric("worker_several_engines") == 1
            assert await here.metric("engines_awaited") == 0
            (logged,) = [each for each in caplog.records if event_of(each) == "several_engines"]
            assert vars(logged)["kvrouter_fields"] == {"worker": "1", "reason": why}


async def test_unknown_place_ends_the_start(tmp_path: Path) -> None:
    contract = (
        f", topology_env: {{DYN_TOPOLOGY_ENABLED: 'true', DYN_TOPOLOGY_MOUNT_PATH: '{tmp_path}', "
        "DYN_KV_TRANSFER_DOMAIN: zone, DYN_TOPOLOGY_TIMEOUT_S: '0.1', DYN_TOPOLOGY_POLL_S: '0.05'}"
    )
    async with scripted_engine() as engine:
        with pytest.raises(TopologyUnavailable):
            async with up(file_of(VLLM.format(url=engine.url), more=contract)):
                pass
        (tmp_path / "zone").write_text("a")
        async with up(file_of(VLLM.format(url=engine.url), more=contract)) as here:
            (worker,) = here.workers.values()
            assert worker.card.runtime_config.topology_domains == {"zone": "a"}
