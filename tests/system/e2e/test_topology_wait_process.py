"""``kvrouter topology wait`` as a pod's init container runs it: a process, and a volume that comes late."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

LIMIT_S = 90.0
"""Far above what a busy machine needs to start a process."""


@asynccontextmanager
async def waiting(mount: Path, *options: str) -> AsyncIterator[Process]:
    """The command, after it has reported for the first time what it waits for."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli", "topology", "wait", "--levels", "zone,rack", *options),
        env={**environ, "DYN_TOPOLOGY_MOUNT_PATH": str(mount)},
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        assert line.startswith(f"waiting for {mount}/zone ".encode())
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def exchange(mount: Path, version: str, **files: str) -> None:
    """Write a volume's content as the kubelet does: one hidden folder, then the link to it."""
    (mount / version).mkdir()
    for name, content in files.items():
        (mount / version / name).write_text(content)
    (mount / "..data_tmp").symlink_to(version)
    (mount / "..data_tmp").rename(mount / "..data")


async def ended(process: Process) -> tuple[int | None, str, str]:
    out, error = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode, out.decode(), error.decode()


async def test_topology_wait_succeeds_once_late_files_arrive(tmp_path: Path) -> None:
    exchange(tmp_path, "..1", zone="", rack="")
    for name in ("zone", "rack"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    async with waiting(tmp_path, "--timeout-s", "600") as process:
        exchange(tmp_path, "..2", zone="us-east-1a", rack="r7")
        code, out, error = await ended(process)
    assert (code, error) == (0, "")
    assert out.endswith("zone=us-east-1a, rack=r7\n")


async def test_topology_wait_names_the_usual_causes_of_missing_values(tmp_path: Path) -> None:
    (tmp_path / "zone").write_text("us-east-1a")
    (tmp_path / "rack").write_text("")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli", "topology", "wait", "--mount-path", str(tmp_path)),
        *("--levels", "zone,rack", "--label", "rack=nvidia.com/rack", "--timeout-s", "0"),
        stdout=PIPE,
        stderr=PIPE,
    )
    code, _, error = await ended(process)
    assert code == 1
    assert f"kvrouter: no value for {tmp_path}/rack (pod label nvidia.com/rack) after 0 s" in error
    for cause in ("1. the pod's node", "2. nothing copied it", "3. the pod's volume"):
        assert f"\nkvrouter: {cause}" in error


async def test_topology_wait_ends_on_sigterm(tmp_path: Path) -> None:
    async with waiting(tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        code, _, _ = await ended(process)
    assert code == 128 + signal.SIGTERM
