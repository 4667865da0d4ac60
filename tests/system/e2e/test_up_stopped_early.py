"""``kvrouter up --replicas`` that is asked to end before it is ready."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

from tests.testing.processes import ENDS_WITHIN_S, free_ports


async def test_up_with_replicas_stopped_before_ready_ends_cleanly(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "KVROUTER_"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli", "up", "--replicas", "2", "--http-port", str(free_ports(2))),
        env={**kept, "KVROUTER_DISCOVERY_DIR": str(tmp_path / "discovery")},
        stdout=PIPE,
        stderr=STDOUT,
    )
    assert process.stdout is not None
    lines = ""
    async with asyncio.timeout(ENDS_WITHIN_S):
        async for line in process.stdout:
            lines += line.decode()
            if b"ready worker" in line:
                process.send_signal(signal.SIGTERM)
                break
        lines += (await process.stdout.read()).decode()
        assert await process.wait() == 0, lines
    assert "Traceback" not in lines
    assert "never retrieved" not in lines
