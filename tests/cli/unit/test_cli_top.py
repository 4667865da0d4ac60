"""``kvrouter top``: what a router knows, in a terminal."""

import asyncio
import io
import json

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from rich.console import Console

from kvrouter.api.client import AskFailed, RouterClient
from kvrouter.api.fleet_schema import ExpectedEngine, Fleet
from kvrouter.cli.commands import kvrouter
from kvrouter.cli.top.run import Frame, drawn, frames, read_frame
from tests.testing.mock_fleet import zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server, user, words


def text_of(shown: object) -> str:
    page = io.StringIO()
    Console(file=page, width=200, no_color=True).print(shown)
    return page.getvalue()


async def frame_of(here: MockServer) -> Frame:
    return await asyncio.to_thread(read_frame, RouterClient(here.url))


async def test_top_shows_workers_decisions_and_flows() -> None:
    async with mock_server(zoned_fleet(enforcement="preferred")) as here:
        body = {"model": MODEL, "messages": user(words(n=64)), "max_tokens": 3}
        answer = await here.http.post("/v1/chat/completions", json=body)
        shown = text_of(drawn(await frame_of(here), here.url))
        assert "6 of 6 workers take requests, 0 run, 0 wait" in shown
        lines = shown.splitlines()
        workers = [line.split() for line in lines if " zone=" in line and "→" not in line]
        assert sorted(line[0] for line in workers) == list("123456")
        assert {tuple(line[1:4]) for line in workers if line[0] in "14"} == {
            ("prefill", "zone=a", "ok"),
            ("prefill", "zone=b", "ok"),
        }
        assert all("live" in line and line[-1] == "mock" for line in workers)
        (decided,) = [line for line in lines if answer.headers["x-request-id"][:24] in line]
        for leg in ("prefill", "decode"):
            assert f" {answer.headers[f'x-kvrouter-{leg}-worker']}/0 " in decided
        (flow,) = [line for line in lines if "→" in line and "zone" in line]
        assert "B/s" in flow
        await here.kill(3)
        await here.until_quiet()
        assert "5 of 5 workers" in text_of(drawn(await frame_of(here), here.url))


async def test_top_marks_a_lost_router_and_recovers() -> None:
    async with mock_server(zoned_fleet()) as here:
        client, lost = RouterClient(here.url), RouterClient("http://127.0.0.1:1")
        asked = iter([client, lost, lost, client])

        class Sometimes(RouterClient):
            def fleet(self) -> bytes:
                self._port = next(asked)._port
                return super().fleet()

        shown = frames(Sometimes(here.url), here.url, "before")
        seen = [text_of(await asyncio.to_thread(next, shown)) for _ in range(4)]
        assert ["not reachable since" in each for each in seen] == [False, True, True, False]
        assert all("6 of 6 workers" in each for each in seen), "what was seen last stays"


async def test_top_shows_engines_without_a_worker_with_url_and_reason() -> None:
    waits = ExpectedEngine(
        written_at="workers[0].engine.url",
        engine_url="http://gpu-7:8000",
        role="decode",
        state="awaited",
        reason="/v1/models: refused",
        since_s=100.0,
    )
    pod = ExpectedEngine(written_at="pod vllm-0", pod="vllm-0", state="refused", reason="[/b] no label")
    joined = ExpectedEngine(engine_url="http://gpu-8:8000", state="joined")
    fleet = Fleet(time_s=112.4, models=[], workers=[], expected_engines=[waits, pod, joined])
    shown = text_of(drawn(Frame(fleet, [], []), "http://router"))
    rows = [line.split() for line in shown.splitlines() if "workers[0]" in line or "pod vllm-0" in line]
    words_of = (
        "http://gpu-7:8000 decode workers[0].engine.url awaited 12 s /v1/models: refused",
        "vllm-0 – pod vllm-0 refused – [/b] no label",
    )
    assert rows == [line.split() for line in words_of]
    assert "gpu-8" not in shown
    assert "0 wait, 2 of 3 engines not joined" in shown


async def test_top_once_prints_plain_text() -> None:
    async with mock_server(zoned_fleet()) as here:
        runner = CliRunner()
        done = await asyncio.to_thread(runner.invoke, kvrouter, ["top", "--once", "--url", here.url])
        assert done.exit_code == 0
        assert "6 of 6 workers take requests" in done.output
        assert "\x1b" not in done.output
        by_variable = await asyncio.to_thread(
            runner.invoke, kvrouter, ["top", "--once"], env={"KVROUTER_URL": here.url}
        )
        assert by_variable.output == done.output


async def test_top_once_json_is_the_routers_own_answers() -> None:
    async with mock_server(zoned_fleet()) as here:
        runner = CliRunner()
        arguments = ["top", "--once", "--url", here.url, "--output", "json"]
        answers = json.loads((await asyncio.to_thread(runner.invoke, kvrouter, arguments)).output)
        assert list(answers) == ["fleet", "decisions", "flows"]
        assert len(answers["fleet"]["workers"]) == 6
        assert answers["fleet"].keys() > {"draining", "running_requests", "models"}
    assert "--output: only with --once" in runner.invoke(kvrouter, ["top", "-o", "json"]).output


async def test_text_of_workers_is_shown_and_not_read_as_markup() -> None:
    async with mock_server(zoned_fleet()) as here:
        frame = await frame_of(here)
        odd = replace(frame.fleet.workers[0], engine="[/b] [red]x", domains={"zone": "a[/b]"})
        shown = text_of(drawn(replace(frame, fleet=replace(frame.fleet, workers=[odd])), here.url))
        assert "[/b] [red]x" in shown
        assert "zone=a[/b]" in shown


def test_unreachable_router_is_an_error_of_top() -> None:
    with pytest.raises(AskFailed, match="no answer"):
        read_frame(RouterClient("http://127.0.0.1:1"))
