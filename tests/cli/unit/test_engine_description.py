"""What a live engine says of itself before it is measured, and what files add."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvrouter.cli.calibrate.engine_description import EngineDescription, describe_engine
from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.engines.openai.server import EngineServer
from tests.testing.measured_runs import HARDWARE, META
from tests.testing.scripted_engine import SGLANG_PAGES, VLLM_PAGES, ScriptedEngine, scripted_engine

MODELS_ALONE = {"/v1/models": VLLM_PAGES["/v1/models"]}


async def described(
    engine: ScriptedEngine, *, model: str | None = None, folder: Path | None = None
) -> EngineDescription:
    server = EngineServer(engine.url)
    await server.open()
    try:
        return await describe_engine(server, model=model, folder=folder)
    finally:
        await server.close()


async def test_vllm_description_has_model_cache_size_and_context() -> None:
    async with scripted_engine() as engine:
        found = await described(engine)
        assert "/server_info" not in engine.asked  # in its developers' mode it takes long for that
    assert (found.served_model, found.meta.model, found.context_tokens) == ("tiny", "tiny-model", 2_048)
    flags = found.meta.engine_kwargs
    assert (flags.block_size, flags.num_gpu_blocks_override, flags.data_parallel_size) == (32, 200, 1)
    assert found.kv_tokens == 6_400
    assert found.meta.plans_ahead
    assert found.hardware is None
    assert [note.partition(":")[0] for note in found.notes] == [
        "max_num_seqs 256, max_num_batched_tokens 8192 and async_scheduling true"
    ]


async def test_sglang_description_has_pages_and_batch_limits() -> None:
    async with scripted_engine(SGLANG_PAGES) as engine:
        info = {**engine.json("/server_info"), "chunked_prefill_size": 2_048, "max_running_requests": 48}
        engine.set_json("/server_info", info)
        found = await described(engine)
        flags = found.meta.engine_kwargs
        assert (flags.block_size, found.kv_tokens) == (16, 1_024)
        assert (flags.max_num_batched_tokens, flags.max_num_seqs) == (2_048, 48)
        assert found.notes == ()
        engine.set_json("/server_info", {**info, "chunked_prefill_size": -1, "max_running_requests": None})
        unlimited = await described(engine)
    assert unlimited.meta.engine_kwargs.max_num_batched_tokens == 8_192
    assert not unlimited.meta.plans_ahead


async def test_sglang_without_a_request_limit_gives_its_schedulers_limit() -> None:
    async with scripted_engine(SGLANG_PAGES) as engine:
        states = [{"effective_max_running_requests_per_dp": 4_096}]
        info = {**engine.json("/server_info"), "max_running_requests": None, "internal_states": states}
        engine.set_json("/server_info", info)
        found = await described(engine)
    assert found.meta.engine_kwargs.max_num_seqs == 4_096
    assert found.states_flags
    assert found.notes == ()


async def test_frontend_of_several_workers_is_refused_as_an_engine() -> None:
    async with scripted_engine(MODELS_ALONE) as engine:
        one = 'kvrouter_worker_up{worker="1",model="tiny"} 1\n'
        engine.set_page("/metrics", one)
        assert not (await described(engine)).states_flags
        engine.set_page("/metrics", one + one.replace('"1"', '"2"'))
        with pytest.raises(ConfigError, match="is a frontend of kvrouter with 2 workers") as caught:
            await described(engine)
        assert engine.url in caught.value.message
        assert caught.value.param == "url"


async def test_engine_files_fill_values_the_engine_does_not_state(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(json.dumps(META))
    (tmp_path / "config.json").write_text(json.dumps(HARDWARE))
    async with scripted_engine() as engine:
        found = await described(engine, folder=tmp_path)
        assert (found.served_model, found.meta.model) == ("tiny", META["model"])
        flags = found.meta.engine_kwargs
        assert (flags.max_num_seqs, flags.max_num_batched_tokens) == (12, 1_024)
        assert (flags.block_size, flags.num_gpu_blocks_override) == (32, 200), "what the engine says wins"
        assert found.hardware is not None
        assert found.hardware.gpu.hardware == "RTXPRO6000"
        assert found.notes == ()
        (tmp_path / "meta.json").write_text("{")
        with pytest.raises(ConfigError, match=r"meta\.json"):
            await described(engine, folder=tmp_path)
        with pytest.raises(ConfigError, match="nowhere is no folder"):
            await described(engine, folder=tmp_path / "nowhere")


async def test_server_that_lists_models_alone_leaves_other_values_unknown() -> None:
    async with scripted_engine(MODELS_ALONE) as engine:
        engine.set_json("/v1/models", {"data": [{"id": "some"}, {"id": "adapter", "parent": "some"}]})
        found = await described(engine)
    assert (found.served_model, found.kv_tokens, found.context_tokens) == ("some", None, 2_048)
    assert any("max_model_len 2048: the engine does not say" in note for note in found.notes)


@pytest.mark.parametrize(
    ("models", "model", "why"),
    [
        ([], None, "--model: is required: .* serves none"),
        ([{"id": "a"}, {"id": "b"}], None, "--model: is required: .* serves a, b"),
        ([{"id": "a"}], "c", "--model: .* serves a, not 'c'"),
    ],
)
async def test_the_model_must_be_one_that_is_served(
    models: list[Mapping[str, object]], model: str | None, why: str
) -> None:
    async with scripted_engine(MODELS_ALONE) as engine:
        engine.set_json("/v1/models", {"data": models})
        with pytest.raises(ConfigError, match=why) as caught:
            await described(engine, model=model)
        assert caught.value.param == "model"
        assert engine.url in caught.value.message


async def test_one_model_of_several_is_chosen_by_its_name() -> None:
    async with scripted_engine(MODELS_ALONE) as engine:
        engine.set_json("/v1/models", {"data": [{"id": "a"}, {"id": "b", "max_model_len": 512}]})
        found = await described(engine, model="b")
    assert (found.served_model, found.context_tokens) == ("b", 512)


async def test_other_program_at_the_url_is_refused_with_its_url() -> None:
    async with scripted_engine({}) as engine:
        with pytest.raises(ConfigError, match="is it an OpenAI-compatible engine") as caught:
            await described(engine)
        assert engine.url in caught.value.message
        engine.set_page("/v1/models", "<html>hello</html>")
        with pytest.raises(ProtocolError, match=r"/v1/models: .*is it an OpenAI-compatible engine") as broken:
            await described(engine)
        assert engine.url in broken.value.message
