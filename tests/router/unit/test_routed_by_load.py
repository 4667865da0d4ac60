"""A model whose prompts cannot be read here: its engines' calls are served, and routed by load."""

import json
import logging
import sys
from pathlib import Path
from shutil import copytree

import pytest

from kvrouter.app import text_models
from kvrouter.core.ids import ModelName
from kvrouter.text.source import MOCK_FOLDER
from tests.app.unit.test_fleet_engines import Up, up
from tests.testing.constants import SetConstants
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
from tests.testing.tokenizer_files import FORMATS, TEMPLATE
from tests.testing.trtllm_server import TRTLLM_PAGES
from tests.testing.waits import until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 400}]}
COMPLETION = {"model": "tiny", "prompt": "x" * 400, "max_tokens": 3}
WHOLE = ScriptedAnswer((page("vllm-0.32.0-completion.json"),), content_type=JSON)
STREAM = ScriptedAnswer((page("vllm-0.32.0-chat.sse"),))


def before(*engines: ScriptedEngine, tokenizer: str | Path | None = None, roles: tuple[str, ...] = ()) -> str:
    said = "" if tokenizer is None else f", tokenizer: '{tokenizer}'"
    groups = "".join(
        f"  - {{name: w{at}, role: {roles[at] if roles else 'both'}, "
        f"engine: {{kind: vllm, url: '{engine.url}', kv_events: false}}}}\n"
        for at, engine in enumerate(engines)
    )
    return f"models: [{{name: tiny{said}}}]\nworkers:\n{groups}"


async def routing_of(here: Up) -> tuple[str, str | None]:
    (model,) = (await here.http.get("/v1/fleet")).json()["models"]
    return model["routing"], model["routing_reason"]


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [line for line in caplog.records if event_of(line) == "routed_by_load"]
    return [vars(line)["kvrouter_fields"]["reason"] for line in lines]


async def test_a_model_without_a_tokenizer_is_served_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scripted_engine() as engine, up(before(engine)) as here:
        assert await here.ready() == (200, '{"status":"ready"}')
        (listed,) = (await here.http.get("/v1/models")).json()["data"]
        assert (listed["id"], listed["max_model_len"]) == ("tiny", 2048)
        engine.answers += [STREAM, WHOLE, WHOLE, WHOLE]
        streamed = await here.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert (streamed.status_code, streamed.content) == (200, page("vllm-0.32.0-chat.sse"))
        for path, call in {
            "/v1/completions": COMPLETION,
            "/v1/responses": {"model": "tiny", "input": "hi"},
            "/v1/embeddings": {"model": "tiny", "input": ["hi"]},
        }.items():
            answer = await here.http.post(path, json=call)
            assert (answer.status_code, answer.content) == (200, page("vllm-0.32.0-completion.json"))
            assert engine.calls[-1].body == call
        routing, reason = await routing_of(here)
        assert (routing, reason) == ("load", "tiny-model is no folder here")
        metrics = Metrics((await here.http.get("/metrics")).text)
        assert metrics.total("model_routed_by_load", model="tiny") == 1
    assert reasons(caplog) == ["tiny-model is no folder here"]


async def explained(here: Up, call: object) -> tuple[int, int, list[int]]:
    found = (await here.http.post("/v1/route/explain", json=call)).json()
    rows = found["decode"]["candidates"]
    return found["isl_tokens"], found["blocks"], [row["overlap_blocks"] for row in rows]


async def test_a_prompt_without_a_tokenizer_has_an_estimated_length_and_a_guess() -> None:
    async with scripted_engine() as engine, up(before(engine)) as here:
        assert await explained(here, COMPLETION) == (100, 4, [0])
        engine.answers.append(WHOLE)
        assert (await here.http.post("/v1/completions", json=COMPLETION)).is_success
        assert await explained(here, COMPLETION) == (100, 4, [3])
        assert await explained(here, {**COMPLETION, "cache_salt": "another"}) == (100, 4, [0])
        assert await explained(here, {**COMPLETION, "prompt": "y" * 400}) == (100, 4, [0])
        assert await explained(here, {**COMPLETION, "prompt": "x" * 256 + "y" * 400}) == (164, 6, [2])
        engine.answers.append(WHOLE)
        ids = {**COMPLETION, "prompt": [1, 2, 3]}
        assert (await here.http.post("/v1/completions", json=ids)).is_success
        assert (await here.http.post("/v1/route/explain", json=ids)).json()["isl_tokens"] == 3
        looks_like_the_text = {**COMPLETION, "prompt": [int.from_bytes(b"xxxx")] * 100}
        assert await explained(here, looks_like_the_text) == (100, 4, [0])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_turns_of_chats_that_cannot_be_read_go_where_the_chat_began(path: str) -> None:
    field = "input" if path == "/v1/responses" else "messages"
    async with scripted_engine() as one, scripted_engine() as other, up(before(one, other)) as here:
        chats = [[{"role": "user", "content": name * 4000}] for name in "abcdef"]
        served: list[list[int]] = [[] for _ in chats]
        for _ in range(3):
            for at, chat in enumerate(chats):
                n_calls = len(one.calls)
                one.answers.append(WHOLE)
                other.answers.append(WHOLE)
                call = {"model": "tiny", field: chat, "tools": [{"type": "function", "name": "f"}]}
                assert (await here.http.post(path, json=call)).is_success
                served[at].append(len(one.calls) - n_calls)
                chat += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]
        assert all(len(set(places)) == 1 for places in served)
        assert {places[0] for places in served} == {0, 1}


async def test_the_engine_counts_a_prompt_that_the_router_cannot_read() -> None:
    usage = {"prompt_tokens": 40, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 32}}
    counted = json.dumps({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": usage}).encode()
    async with scripted_engine() as engine, up(before(engine)) as here:
        for path, call in {
            "/v1/completions": COMPLETION,
            "/v1/embeddings": {"model": "tiny", "input": ["hi"]},
        }.items():
            engine.answers.append(ScriptedAnswer((counted,), content_type=JSON))
            assert (await here.http.post(path, json=call)).is_success
        engine.answers.append(ScriptedAnswer((counted,), content_type=JSON))
        assert (await here.http.post("/v1/completions", json={**COMPLETION, "prompt": ""})).is_success
        figures = (await here.http.get("/v1/fleet")).json()["request_stats"]["since_start"]
    assert figures["requests"] == 2
    assert figures["predicted"]["requests"] == 0
    assert figures["reported"]["cached_tokens"] == 64
    assert figures["prompt_tokens"] == 40


async def test_a_pair_serves_a_model_without_a_tokenizer() -> None:
    kept = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "e"}
    prefilled = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": kept}
    async with scripted_engine() as prefill, scripted_engine() as decode:
        prefill.answers.append(ScriptedAnswer((json.dumps(prefilled).encode(),), content_type=JSON))
        decode.answers.append(STREAM)
        async with up(before(prefill, decode, roles=("prefill", "decode"))) as here:
            answer = await here.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
            assert answer.content == page("vllm-0.32.0-chat.sse")
        assert prefill.calls[0].body["messages"] == decode.calls[0].body["messages"] == CHAT["messages"]
        assert decode.calls[0].body["kv_transfer_params"] == kept
        assert "prompt" not in decode.calls[0].body


UNREADABLE = {
    "an empty folder": {},
    "a broken tokenizer.json": {"tokenizer.json": "{"},
    "tiktoken": {
        "tiktoken.model": "no base64",
        "tokenizer_config.json": '{"tokenizer_class":"TikTokenTokenizer"}',
    },
    "a tokenizer.json of another world": {"tokenizer.json": '{"model":{"type":"Quantum"}}'},
}


@pytest.mark.parametrize("what", sorted(UNREADABLE))
async def test_a_model_with_an_unreadable_tokenizer_is_routed_by_load(what: str, tmp_path: Path) -> None:
    for name, content in UNREADABLE[what].items():
        (tmp_path / name).write_text(content)
    async with scripted_engine() as engine:
        engine.replace("/v1/models", VLLM_ROOT, str(tmp_path))
        for tokenizer in (None, tmp_path):
            engine.answers.append(WHOLE)
            async with up(before(engine, tokenizer=tokenizer)) as here:
                assert (await here.http.post("/v1/completions", json=COMPLETION)).is_success
                routing, reason = await routing_of(here)
                assert routing == "load"
                assert str(tmp_path) in str(reason)


VLLM_ROOT = "tiny-model"
assert f'"{VLLM_ROOT}"' in page(VLLM_PAGES["/v1/models"]).decode()


async def test_a_tokenizer_model_file_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    async with scripted_engine() as engine, up(before(engine, tokenizer=tmp_path)) as here:
        engine.answers.append(WHOLE)
        assert (await here.http.post("/v1/completions", json=COMPLETION)).is_success
        assert await routing_of(here) == (
            "load",
            f"{tmp_path} has no tokenizer.json, but tokenizer.model, which pip install "
            "'kvrouter[tokenizers]' makes readable",
        )


@pytest.mark.parametrize("of", sorted(FORMATS))
async def test_other_tokenizer_formats_are_routed_by_cache(of: str, tmp_path: Path) -> None:
    written = FORMATS[of](tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    prompt = "the router's naïve user 🙂 " * 9
    async with scripted_engine() as engine, up(before(engine, tokenizer=tmp_path)) as here:

        async def by_cache() -> bool:
            return await routing_of(here) == ("cache", None)

        await eventually(by_cache)
        call = {**COMPLETION, "prompt": prompt}
        explained = (await here.http.post("/v1/route/explain", json=call)).json()
        assert explained["isl_tokens"] == len([*written.begin, *written.reference(prompt)])


async def test_the_mock_tokenizer_with_a_real_engine_is_routed_by_load() -> None:
    async with scripted_engine() as engine, up(before(engine, tokenizer="mock")) as here:
        engine.answers.append(WHOLE)
        assert (await here.http.post("/v1/completions", json=COMPLETION)).is_success
        assert await routing_of(here) == ("load", "the token ids of tokenizer mock are not the engine's")


TEMPLATES = {
    "that does not compile": "{% if %}",
    "that never ends": "{% for a in range(10**9) %}a{% endfor %}",
}


@pytest.mark.parametrize("what", sorted(TEMPLATES))
async def test_a_model_with_an_unusable_chat_template_is_routed_by_load(what: str, tmp_path: Path) -> None:
    folder = copytree(MOCK_FOLDER, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATES[what])
    async with scripted_engine() as engine, up(before(engine, tokenizer=folder)) as here:
        engine.answers += [STREAM, WHOLE]
        assert (await here.http.post("/v1/chat/completions", json={**CHAT, "stream": True})).is_success
        assert (await here.http.post("/v1/completions", json=COMPLETION)).is_success
        routing, reason = await routing_of(here)
        assert routing == "load"
        assert "chats cannot be read here: " in str(reason)


FAULTS = {
    "an error of its own": ("{{ messages[0].nowhere.at_all }}", "template_failed", "UndefinedError"),
    "what the sandbox forbids": ("{{ messages.__class__.__mro__ }}", "template_failed", "SecurityError"),
    "too much": (
        "{% if messages[0].content != 'a' %}{% for a in range(10**9) %}a{% endfor %}{% endif %}",
        "over_bounds",
        "goes over its bounds",
    ),
}


async def unrendered(here: Up) -> list[dict[str, object]]:
    (model,) = (await here.http.get("/v1/fleet")).json()["models"]
    found: list[dict[str, object]] = model["unrendered_chats"]
    return found


@pytest.mark.parametrize("what", sorted(FAULTS))
async def test_a_chat_template_failing_to_render_is_counted_and_logged_once(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, reason, said = FAULTS[what]
    folder = copytree(MOCK_FOLDER, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(source)
    async with scripted_engine() as engine, up(before(engine, tokenizer=folder)) as here:
        for _ in range(3):
            engine.answers.append(STREAM)
            answer = await here.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
            assert (answer.status_code, answer.content) == (200, page("vllm-0.32.0-chat.sse"))
        routing, why = await routing_of(here)
        assert routing == "load"
        assert "chats cannot be read here (3 of the last 3): " in str(why)
        assert said in str(why)
        (counted,) = await unrendered(here)
        assert (counted["reason"], counted["chats"]) == (reason, 3)
        metrics = Metrics((await here.http.get("/metrics")).text)
        assert metrics.total("chats_unrendered_total", model="tiny", reason=reason) == 3
        assert metrics.total("model_routed_by_load", model="tiny") == 1
    assert [event_of(line) for line in caplog.records].count("chat_template_failed") == 1


async def test_an_always_failing_chat_template_is_logged_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copytree(MOCK_FOLDER, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ nowhere.at_all }}")
    async with scripted_engine() as engine, up(before(engine, tokenizer=folder)) as here:
        routing, why = await routing_of(here)
        assert routing == "load"
        assert "UndefinedError" in str(why)
        assert [event_of(line) for line in caplog.records].count("chat_template_failed") == 1


async def test_a_chat_refused_by_its_template_goes_to_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copytree(MOCK_FOLDER, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}hello"
    )
    async with scripted_engine() as engine, up(before(engine, tokenizer=folder)) as here:
        engine.answers.append(
            ScriptedAnswer((b'{"error": {"message": "no"}}',), status=400, content_type=JSON)
        )
        answer = await here.http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.text) == (400, '{"error": {"message": "no"}}')
        assert await routing_of(here) == ("cache", None)
        assert await unrendered(here) == []
        metrics = Metrics((await here.http.get("/metrics")).text)
        assert metrics.total("chats_unrendered_total", model="tiny", reason="refused") == 1
    assert "chat_template_failed" not in caplog.text


async def test_a_failing_chat_among_others_keeps_routing_by_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copytree(MOCK_FOLDER, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content + m.name }}{% endfor %}")
    async with scripted_engine() as engine, up(before(engine, tokenizer=folder)) as here:
        assert (await routing_of(here))[0] == "load"  # a first message has no name
        for said in ({"name": "n"}, {"name": "n"}, {}):
            engine.answers.append(STREAM)
            messages = [{"role": "user", "content": "hello", **said}]
            body = {"model": "tiny", "messages": messages, "stream": True}
            assert (await here.http.post("/v1/chat/completions", json=body)).is_success
        assert await routing_of(here) == ("cache", None)
        (counted,) = await unrendered(here)
        assert counted["chats"] == 1


async def test_chats_without_a_template_are_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copytree(MOCK_FOLDER, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{}")
    async with scripted_engine() as engine, up(before(engine, tokenizer=folder)) as here:
        for _ in range(2):
            engine.answers.append(STREAM)
            assert (await here.http.post("/v1/chat/completions", json={**CHAT, "stream": True})).is_success
        (counted,) = await unrendered(here)
        assert (counted["reason"], counted["chats"]) == ("no_template", 2)
    assert [event_of(line) for line in caplog.records].count("chat_template_failed") == 1


async def test_a_model_is_routed_by_load_until_its_tokenizer_is_loaded(
    set_constants: SetConstants, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    set_constants(text_models, RETRY_S=0.01)
    async with scripted_engine() as engine, up(before(engine, tokenizer=tmp_path)) as here:
        engine.answers.append(WHOLE)
        assert (await here.http.post("/v1/completions", json=COMPLETION)).is_success
        assert (await routing_of(here))[0] == "load"
        copytree(MOCK_FOLDER, tmp_path, dirs_exist_ok=True)

        async def by_cache() -> bool:
            return await routing_of(here) == ("cache", None)

        await eventually(by_cache)
        assert here.system.service.find(ModelName("tiny")) is not None
    assert len(reasons(caplog)) == 1
    assert [event_of(line) for line in caplog.records].count("routed_by_cache") == 1


KINDS = {"vllm": VLLM_PAGES, "sglang": SGLANG_PAGES, "trtllm": TRTLLM_PAGES}
ODD = {"absent": None, "ill": ("no", 500), "no JSON": ("<html>", 200), "of another shape": ("[1]", 200)}


@pytest.mark.parametrize("odd", sorted(ODD))
@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_an_engine_with_only_a_readable_model_name_serves(
    kind: str, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_engine(KINDS[kind]) as engine:
        answer = ODD[odd]
        for path in set(engine.pages) - {"/v1/models", "/health"}:
            if answer is None:
                del engine.pages[path]
            else:
                engine.set_page(path, *answer)
        engine.set_json("/v1/models", {"data": [{"id": "tiny"}]})
        engine.answers += [WHOLE, WHOLE]
        file = before(engine, tokenizer=MOCK_FOLDER).replace("kind: vllm", f"kind: {kind}")
        async with up(file) as here:
            assert (await here.http.post("/v1/completions", json=COMPLETION)).is_success
            (worker,) = (await here.http.get("/v1/fleet")).json()["workers"]
            assert (worker["block_size"], worker["context_length"]) == (None, None)
            assert worker["ranks"][0]["total_blocks"] is None
            (listed,) = (await here.http.get("/v1/models")).json()["data"]
            assert listed["max_model_len"] is None
            probed = [path for path in engine.pages if path != "/server_info"]
            asked = sum(engine.asked[path] for path in probed)
            await until(lambda: sum(engine.asked[path] for path in probed) >= asked + 5)
            assert (await here.http.post("/v1/completions", json=COMPLETION)).is_success
    warnings = [line for line in caplog.records if event_of(line) == "config_warning"]
    said = " ".join(vars(line)["kvrouter_fields"]["detail"] for line in warnings)
    assert "context" in said
    assert ("--disable-log-stats" in said) is (kind == "vllm")
