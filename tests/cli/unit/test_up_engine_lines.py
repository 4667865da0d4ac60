"""The lines of ``kvrouter up`` that count engines: who has joined, and why others have not."""

import asyncio

import pytest

from kvrouter.api.client import RouterClient
from kvrouter.api.fleet_schema import ExpectedEngine, ExpectedState
from kvrouter.app.attach import attachment
from kvrouter.cli.up.engine_lines import change_line, engines_line, first_screen, url_of, write_changes
from kvrouter.cli.up.multi_process import expected_engines
from kvrouter.cli.up.run import embedded
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.settings.problems import parse_document
from kvrouter.settings.tree import AdminAccess, FrontendSettings, Settings
from kvrouter.text.source import MOCK_FOLDER
from tests.testing.constants import SetConstants
from tests.testing.frontend_harness import running_frontend
from tests.testing.scripted_engine import ScriptedEngine
from tests.testing.waits import until

CLOSED = "/v1/models: connection refused, nothing listens at its host and port: is it running?"


def engine(at: int, state: ExpectedState = ExpectedState.JOINED, reason: str | None = None) -> ExpectedEngine:
    return ExpectedEngine(worker_id=at, engine_url=f"http://gpu-{at}:8000", state=state, reason=reason)


def awaited(at: int, reason: str = CLOSED) -> ExpectedEngine:
    return engine(at, ExpectedState.AWAITED, reason)


def test_engines_are_counted_and_the_missing_named_with_the_reason() -> None:
    assert engines_line([engine(1)]) == "1 of 1 engine"
    assert engines_line([engine(1), engine(2)]) == "2 of 2 engines"
    assert engines_line([awaited(1), awaited(2, "/v1/models answered 503: loading")]) == (
        "0 of 2 engines, waiting for http://gpu-1:8000 (connection refused), http://gpu-2:8000 (answered 503)"
    )
    refused = engine(2, ExpectedState.REFUSED, "models[0].name: the engine serves other, not 'tiny'")
    assert engines_line([awaited(1), refused, engine(3)]) == (
        "1 of 3 engines, refused: http://gpu-2:8000 (models[0].name: the engine serves other, not 'tiny'), "
        "waiting for http://gpu-1:8000 (connection refused)"
    )
    many = engines_line([awaited(at) for at in range(9)])
    assert many.startswith("0 of 9 engines")
    assert many.endswith("http://gpu-3:8000 (connection refused), 5 more")


def test_a_change_says_who_joined() -> None:
    before = [awaited(1), awaited(2)]
    assert change_line(before, [engine(1), awaited(2)]) == (
        "http://gpu-1:8000 joined: 1 of 2 engines, waiting for http://gpu-2:8000 (connection refused)"
    )
    assert change_line(before, [engine(1), engine(2)]) == (
        "http://gpu-1:8000, http://gpu-2:8000 joined: 2 of 2 engines"
    )
    assert change_line([engine(1), engine(2)], [engine(1), awaited(2)]).startswith("1 of 2 engines, waiting")


def test_the_first_screen_names_the_models_that_engines_have_told() -> None:
    engines = "{kind: vllm, urls: ['http://a', 'http://b']}"
    file = f"version: 1\nmodels: [{{}}]\nworkers: [{{name: w, engine: {engines}}}]\n"
    fleet = load_fleet(parse_document(file, "fleet.yaml")).fleet
    head, _, call = first_screen([url_of("0.0.0.0", 8000)], fleet, [awaited(1), awaited(2)]).splitlines()
    assert "serves the engines' own model at" in head
    assert call == "Try it: curl http://127.0.0.1:8000/v1/models"
    joined = ExpectedEngine(worker_id=1, model="tiny", state=ExpectedState.JOINED)
    head, _, call = first_screen([url_of("0.0.0.0", 8000)], fleet, [joined, awaited(2)]).splitlines()
    assert "serves tiny at" in head
    assert '{"model": "tiny", ' in call


async def test_the_first_screen_names_absent_engines_and_a_line_follows_as_each_joins(
    capsys: pytest.CaptureFixture[str], set_constants: SetConstants
) -> None:
    set_constants(attachment, PROBE_EVERY_S=0.01)
    engines = [ScriptedEngine(), ScriptedEngine()]
    for each in engines:
        await each.start()
        await each.stop()
    groups = "".join(
        f"  - {{name: w{at}, engine: {{kind: vllm, url: '{each.url}', kv_events: false}}}}\n"
        for at, each in enumerate(engines)
    )
    file = f"version: 1\nmodels: [{{name: tiny, tokenizer: '{MOCK_FOLDER}'}}]\nworkers:\n{groups}"
    fleet = load_fleet(parse_document(file, "fleet.yaml")).fleet
    settings = Settings(frontend=FrontendSettings(http_port=0))
    async with embedded(settings, fleet, environ={}) as system:
        assert system.attached is not None
        head = first_screen([url_of(*system.address)], fleet, system.expected()).splitlines()[0]
        absent = [f"{each.url} (connection refused)" for each in engines]
        assert head.endswith(f"/v1: 0 of 2 engines, waiting for {', '.join(absent)}")
        writing = asyncio.create_task(write_changes(system.expected(), system.attached.changes()))
        written = ""

        async def line_behind(prefix: str) -> str:
            nonlocal written

            def is_written() -> bool:
                nonlocal written
                written += capsys.readouterr().out
                return prefix in written and written.endswith("\n")

            await until(is_written)
            return written.splitlines()[-1]

        try:
            await engines[1].start()
            line = await line_behind(f"{engines[1].url} joined")
            assert line == f"{engines[1].url} joined: 1 of 2 engines, waiting for {absent[0]}"
            await engines[0].start()
            assert await line_behind(f"{engines[0].url} joined") == f"{engines[0].url} joined: 2 of 2 engines"
            assert len(written.splitlines()) == 2
            head = first_screen([url_of(*system.address)], fleet, system.expected()).splitlines()[0]
            assert head.endswith("/v1: 2 of 2 engines")
        finally:
            writing.cancel()
            for each in engines:
                await each.stop()


async def test_a_frontend_whose_admin_routes_are_closed_leaves_the_engines_unknown() -> None:
    closed = FrontendSettings(admin_routes=AdminAccess.CLOSED)
    async with running_frontend(settings=closed) as frontend:
        client = RouterClient(url_of(*frontend.address))
        assert [engines async for engines in expected_engines(client)] == [()]
