"""A fleet records its traffic, and ``kvrouter hit-rate`` names the loss that its settings cause."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvrouter.cli import main
from kvrouter.cli.commands import kvrouter
from kvrouter.core.constraints import RouterMode
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.recording_settings import RecordingSettings
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.mock_fleet import BLOCK, fleet_file, uniform_fleet
from tests.testing.mock_server import MODEL, mock_server, word_ids

ALIKE = """
version: 1
models: [{name: mock, block_size: 16, context_length: 200000}]
workers:
  - {name: worker, role: both, replicas: %d, engine: {total_kv_blocks: %d}}
speedup: 1000
"""


async def ask(
    folder: Path, fleet: FleetFile, prompts: Sequence[Sequence[int]], router: KvRouterConfig | None = None
) -> int:
    """Send prompts one after the other; return how many of their tokens were cached, as clients heard."""
    cached_tokens = 0
    recording = RecordingSettings(folder=str(folder))
    async with mock_server(fleet, router=router, recording=recording) as here:
        for ids in prompts:
            answer = await here.http.post(
                "/v1/completions", json={"model": MODEL, "prompt": list(ids), "max_tokens": 4}
            )
            assert answer.status_code == 200
            cached_tokens += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            await here.until_quiet()
    return cached_tokens


def ladder(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["hit-rate", *map(str, arguments), "--output", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["ladder"]
    return found


def tokens(of: dict[str, Any], rung: str) -> int:
    (found,) = (each["tokens"] for each in of["rungs"] if each["rung"] == rung)
    return int(found)


async def test_engines_holding_everything_reach_the_endless_caches_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [word_ids(first=at % 3, n=90) for at in range(12)]
    router = KvRouterConfig(router_cost="blocks")  # times of a busy machine say nothing of caches
    heard = await ask(tmp_path, uniform_fleet(replicas=3), prompts, router)
    found = ladder(capsys, tmp_path)
    assert heard == tokens(found, "engines") == tokens(found, "endless") == 9 * 5 * BLOCK
    assert found["largest"] is None
    assert {loss["cause"] for loss in found["losses"]} == {"first_seen", "not_a_block"}
    assert found["facts"]["requests"] == 12
    assert found["facts"]["unreported"] == 0
    assert main(["hit-rate", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "ours: what the router expected there" in shown
    assert "first seen" in shown


async def test_hit_rate_names_small_caches_and_evaluates_larger_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [word_ids(first=at % 6, n=90) for at in range(24)]
    recorded = tmp_path / "recorded"
    heard = await ask(recorded, fleet_file(ALIKE % (1, 16)), prompts)
    found = ladder(capsys, recorded)
    assert found["largest"] == "cache_size"
    assert heard == tokens(found, "engines") < tokens(found, "endless") // 2
    assert found["facts"]["fleet_blocks"] == 16
    (tmp_path / "larger.yaml").write_text(ALIKE % (1, 1000))
    larger = ladder(capsys, recorded, "--fleet", tmp_path / "larger.yaml")
    assert tokens(larger, "fleet") == tokens(larger, "endless") == tokens(found, "endless")
    (tmp_path / "other.yaml").write_text(ALIKE % (2, 1000))
    assert main(["hit-rate", str(recorded), "--fleet", str(tmp_path / "other.yaml")]) == 2
    assert "has not the recorded workers" in capsys.readouterr().err


async def test_hit_rate_names_a_router_mode_that_ignores_caches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [word_ids(first=at // 4, n=90) for at in range(16)]
    router = KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN)
    heard = await ask(tmp_path, uniform_fleet(replicas=4), prompts, router)
    found = ladder(capsys, tmp_path)
    assert heard == tokens(found, "engines") == 0
    assert found["largest"] == "router_mode"
    assert tokens(found, "perfect") == tokens(found, "endless") == 12 * 5 * BLOCK


async def test_doctor_shows_the_hit_rate_ladder_of_a_recording(tmp_path: Path) -> None:
    prompts = [word_ids(n=100)] * 2
    recorded = tmp_path / "recorded"
    await ask(recorded, fleet_file(ALIKE % (1, 16)), prompts)
    async with mock_server(fleet_file(ALIKE % (1, 16))) as here:
        arguments = ["doctor", "--url", here.url, "--recording", str(recorded)]
        shown = await asyncio.to_thread(CliRunner().invoke, kvrouter, arguments)
        said = await asyncio.to_thread(CliRunner().invoke, kvrouter, [*arguments, "--output", "json"])
        wrong = await asyncio.to_thread(
            CliRunner().invoke, kvrouter, [*arguments[:-1], str(tmp_path / "none")]
        )
    assert "an endless cache, shared by all" in shown.output
    ladder = json.loads(said.output)["hit_rate"]["ladder"]
    assert [figure["rung"] for figure in ladder["rungs"]][:2] == ["prompts", "endless"]
    assert wrong.exit_code == 2
    assert "cannot be read" in wrong.output


def test_hit_rate_refuses_input_that_is_not_a_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hit-rate", str(tmp_path)]) == 2
    assert "no recording is there" in capsys.readouterr().err
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 1, "input_length": 5}\n')
    assert main(["hit-rate", str(tmp_path / "trace.jsonl")]) == 2
    assert "trace.jsonl:1" in capsys.readouterr().err
