"""Nothing of a control plane outlives the run that started it, however that ends."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.together import Together
from tests.testing.processes import eventually

pytestmark = pytest.mark.api_server

STARTS_TWO = """
import pathlib, sys, time
from tests.system.cluster.together import Together
together = Together()
for name in ("one", "two"):
    log = pathlib.Path(sys.argv[1], f"{name}.log")
    print(together.start(["sleep", "600"], log=log, environ={}), flush=True)
time.sleep(600)
"""


def _runs(pid: int) -> bool:
    """Whether the process is there, and more than an entry that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_processes_started_by_a_killed_run_end_with_it(tmp_path: Path) -> None:
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTS_TWO, tmp_path, stdout=asyncio.subprocess.PIPE
    )
    assert run.stdout is not None
    pids = [int(await run.stdout.readline()) for _ in range(2)]
    assert all(map(_runs, pids))
    run.kill()
    await run.wait()

    async def all_ended() -> bool:
        return not any(map(_runs, pids))

    await eventually(all_ended)


def test_killing_ends_all_processes_and_may_be_repeated(tmp_path: Path) -> None:
    together = Together()
    pids = [together.start(["sleep", "600"], log=tmp_path / f"{i}.log", environ={}) for i in range(2)]
    assert together.ended() == {}
    together.kill()
    assert not any(map(_runs, pids))
    assert together.ended() == {"0": -signal.SIGKILL, "1": -signal.SIGKILL}
    together.kill()


def test_a_control_plane_that_fails_to_start_reports_why(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, flags=["--no-such-flag"])
    with pytest.raises(ChildProcessError, match="unknown flag: --no-such-flag"):
        plane.start()
    assert plane.rss_bytes() == {}
    plane.keep_only_logs()
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
