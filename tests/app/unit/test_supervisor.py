"""The processes of one command: tried again after pauses that grow, run in standby when replaced, stopped."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrouter.app import supervisor as room
from kvrouter.app.lifetime import LOST_PLACE
from kvrouter.app.supervisor import Supervisor, pause_after
from kvrouter.core.backoff import Backoff, Failures
from tests.testing.constants import SetConstants
from tests.testing.log_events import event_of, events_of
from tests.testing.processes import eventually

WITHIN_S = 60.0
LIVES = "import signal, sys; print('lives', *sys.argv[1:], file=sys.stderr, flush=True); signal.pause()"
IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + LIVES
GIVES_WAY = f"import sys; sys.exit({LOST_PLACE}) if '--standby' not in sys.argv else None; {LIVES}"


@pytest.fixture(autouse=True)
def _short(set_constants: SetConstants) -> None:
    set_constants(room, RESTART_AFTER_S=0.01)


@pytest.fixture
async def family() -> AsyncIterator[Supervisor]:
    ours = Supervisor(prefix_lines=True)
    yield ours
    await ours.stop("", 0.0)


async def said(capture: pytest.CaptureFixture[str], what: str, *, times: int = 1) -> str:
    """Everything that was said once ``what`` was said so often."""
    text = ""
    async with asyncio.timeout(WITHIN_S):
        while text.count(what) < times:
            await asyncio.sleep(0.005)
            text += capture.readouterr().err
    return text


def reported(log: pytest.LogCaptureFixture, event: str) -> list[str]:
    """The reasons that were logged."""
    records = [vars(record) for record in log.records if event_of(record) == event]
    return [record["kvrouter_fields"]["reason"] for record in records]


def test_restart_pauses_grow_to_a_limit_and_reset_after_a_good_run() -> None:
    failures = Failures(Backoff(1.0, room.RESTART_MAX_S))
    assert [pause_after(failures, 0.5) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert [pause_after(failures, room.RUNS_WELL_S), pause_after(failures, 0.5)] == [1, 2]


async def test_process_that_cannot_be_started_is_retried(
    family: Supervisor, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvrouter")
    program = tmp_path / "python"
    child = await family.start("worker a/0", (str(program), "-c", LIVES), os.environ)
    assert not child.is_running

    async def is_reported_twice() -> bool:
        return len(reported(caplog, "process_not_started")) >= 2

    await eventually(is_reported_twice)
    program.symlink_to(sys.executable)
    assert "worker a/0 | lives" in await said(capsys, "lives")
    first, second = reported(caplog, "process_not_started")[:2]
    assert "No such file" in first
    assert first.endswith("tried again in 0.01 s")
    assert second.endswith("tried again in 0.02 s")


async def test_killed_process_is_restarted(
    family: Supervisor, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    child = await family.start("worker a/0", (sys.executable, "-c", LIVES), os.environ)
    await said(capsys, "lives")
    assert child.process is not None
    child.process.kill()
    await said(capsys, "lives")
    assert reported(caplog, "process_ended") == ["killed by SIGKILL: started again in 0.01 s"]


async def test_process_whose_place_is_taken_is_restarted_in_standby(
    family: Supervisor, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    command = (sys.executable, "-c", GIVES_WAY, "--index", "0")
    child = await family.start("worker a/0", command, os.environ, standby=("--standby",))
    assert "lives --index 0 --standby\n" in await said(capsys, "lives")
    assert "to wait until its place is free" in reported(caplog, "process_ended")[0]
    assert child.process is not None
    child.process.kill()
    assert "lives --index 0 --standby\n" in await said(capsys, "lives")


async def test_process_that_ignores_stop_is_killed_and_none_is_restarted(
    family: Supervisor, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvrouter")
    stays = await family.start("worker a/0", (sys.executable, "-c", IGNORES), os.environ)
    goes = await family.start("frontend :1", (sys.executable, "-c", LIVES), os.environ)
    await said(capsys, "lives", times=2)
    await family.stop("frontend", WITHIN_S)
    assert [stays.is_running, goes.is_running] == [True, False]
    await family.stop("worker", 0.05)
    assert [stays.is_running, goes.is_running] == [False, False]
    assert events_of(caplog.records) == ["process_started"] * 2
