"""Without KV events nothing needs a broker: the router predicts caches from its own decisions."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.testing.mock_server import words
from tests.testing.processes import CLI, SETTINGS, eventually, fleet

NOBODY = "nats://127.0.0.1:1"
BODY = {"model": "mock", "prompt": words(n=200), "max_tokens": 4}


@pytest.mark.parametrize("event_plane", ["auto", "jetstream"])
async def test_a_fleet_without_kv_events_needs_no_nats_server(event_plane: str) -> None:
    async with fleet({"NATS_SERVER": NOBODY, "DYN_EVENT_PLANE": event_plane}) as processes:
        await processes.worker("--no-kv-events", "--speedup", "20")
        frontend = await processes.frontend("--no-kv-events", environ={"DYN_ROUTER_TTL": "600"})

        async def overlap_blocks() -> int:
            reply = await frontend.http.post("/v1/completions", json=BODY)
            if reply.status_code != 200:
                return -1
            decision = (
                await frontend.http.get(f"/v1/decisions/{reply.json()['id'].removeprefix('cmpl-')}")
            ).raise_for_status()
            blocks: int = decision.json()["attempts"][-1]["decode"]["overlap_blocks"]
            return blocks

        async def is_predicted() -> bool:
            return await overlap_blocks() == 3

        await eventually(is_predicted)
        assert not (await frontend.metrics()).total("kv_events_missing")

        async def load_is_heard() -> bool:
            (worker,) = (await frontend.fleet())["workers"]
            return worker["ranks"][0]["report"] is not None

        await eventually(load_is_heard)


async def test_default_settings_without_kv_events_need_no_nats_server(tmp_path: Path) -> None:
    """Discovery, loads, requests: not one of them is a reason to look for a server that is not there."""
    nothing_said = {
        "DYN_DISCOVERY_BACKEND": "",
        "XDG_RUNTIME_DIR": str(tmp_path),
        "KVROUTER_DISCOVERY_DIR": "",
    }
    async with fleet(nothing_said) as processes:
        worker = await processes.worker(
            "--no-kv-events", "--request-plane", "tcp", "--speedup", "20", "--component", "blue"
        )
        frontend = await processes.frontend("--no-kv-events", "--request-plane", "tcp")

        async def is_served() -> bool:
            return (await frontend.http.post("/v1/completions", json=BODY)).status_code == 200

        await eventually(is_served)
        for process in (worker, frontend):
            reported = process.lines()
            assert f"WARNING discovery_chosen address={tmp_path}" in reported
            assert "nats" not in reported.lower().replace("needs nats", "").replace("--discovery nats", "")
        (card,) = (await frontend.fleet())["workers"]
        assert card["endpoint"].endswith(".blue.generate")


@pytest.mark.parametrize(
    "command",
    [
        ("frontend", "--http-port", "0", "--no-kv-events", "--router-replica-sync"),
        ("frontend", "--http-port", "0"),
        ("worker", "mock"),
    ],
    ids=["sync", "frontend", "worker"],
)
async def test_a_missing_required_nats_server_is_reported_at_once(command: tuple[str, ...]) -> None:
    """Not after the 10 s for which it is tried: the line is there while the process still tries."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", CLI, *command),
        env={**environ, "NATS_SERVER": NOBODY},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        lines: list[str] = []
        async with asyncio.timeout(60):
            while not any("plane_awaited" in line for line in lines):
                line = (await process.stderr.readline()).decode()
                assert line, f"it ended: {lines}"
                lines.append(line)
        assert process.returncode is None
        needs = "--router-replica-sync" if "--router-replica-sync" in command else "--discovery nats"
        assert "127.0.0.1:1" in lines[-1]
        assert needs in lines[-1]
    finally:
        process.kill()
        await process.wait()
