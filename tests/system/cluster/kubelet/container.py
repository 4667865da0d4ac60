"""One container of a pod: a process, what its status tells of it, and its end."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MESSAGE_BYTES = 2048
"""How much of a failed process's log becomes its termination message."""

OURS = "kvrouter"


@dataclass(frozen=True)
class Launch:
    """What is started: the program with its arguments, all its variables, and its process group."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    group: int


def argv_of(words: list[str]) -> tuple[str, ...]:
    """Return the program for a container's ``command`` and ``args``; kvrouter's is the one under test."""
    if words[:1] == [OURS]:
        return (sys.executable, "-m", "kvrouter.cli", *words[1:])
    return tuple(words)


class Container:
    """``on_change`` is called whenever its status becomes another one."""

    def __init__(self, spec: Mapping[str, Any], log: Path, on_change: Callable[[], None]) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.starts = 0
        self.is_started = False
        self.is_ready = False
        self.process: Process | None = None
        self.probes: Counter[str] = Counter()
        """How often each of its probes was asked."""
        self._log = log
        self._on_change = on_change
        self._state: dict[str, Any] = {"waiting": {"reason": "PodInitializing"}}
        self._last: dict[str, Any] = {}

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def has_succeeded(self) -> bool:
        """Whether it ended well."""
        return bool(self._state.get("terminated", {}).get("exitCode") == 0)

    @property
    def log(self) -> str:
        """What it wrote, over all its starts."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    async def run(self, launch: Launch) -> int:
        """Start it and wait for its end; answers with its exit code."""
        begins_at = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(launch.environ),
                process_group=launch.group,
            )
        self.process = process
        self.starts += 1
        began = now()
        self._become({"running": {"startedAt": began}})
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        self.is_started = self.is_ready = False
        self._become({"terminated": self._terminated(code, began, begins_at)})
        return code

    def wait_for(self, reason: str) -> None:
        """Tell that it waits to be started again; how it ended last is kept."""
        self._last, state = self._state, {"waiting": {"reason": reason}}
        self._become(state)

    def reported(self, *, is_started: bool | None = None, is_ready: bool | None = None) -> None:
        """Take over what its probes found."""
        if is_started is not None:
            self.is_started = is_started
        if is_ready is not None:
            self.is_ready = is_ready
        self._on_change()

    async def stop(self, grace_s: float) -> None:
        """End its process as a deleted pod's: what stands before SIGTERM, SIGTERM, and SIGKILL in the end."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        leaving_s = self.spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.sleep(leaving_s)
                with suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End its process at once."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()

    def status(self) -> dict[str, Any]:
        """Return what the pod's status tells of it."""
        return {
            "name": self.name,
            "image": self.spec.get("image", ""),
            "imageID": "",
            "ready": self.is_ready or self.has_succeeded,
            "started": self.is_started,
            "restartCount": max(self.starts - 1, 0),
            "state": self._state,
            "lastState": self._last,
        }

    def _become(self, state: dict[str, Any]) -> None:
        self._state = state
        self._on_change()

    def _terminated(self, code: int, began: str, begins_at: int) -> dict[str, Any]:
        """A process that a signal ended tells it as shells do; a failed one's last words are its message."""
        reported: dict[str, Any] = {"startedAt": began, "finishedAt": now()}
        reported["exitCode"] = code if code >= 0 else 128 - code
        reported["reason"] = "Error" if code else "Completed"
        if code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            written = self._log.read_bytes()[begins_at:]
            reported["message"] = written[-MESSAGE_BYTES:].decode(errors="replace")
        return reported


def now() -> str:
    """Return the time as manifests have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
