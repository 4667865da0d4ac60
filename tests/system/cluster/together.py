"""Processes that end together, even when whoever started them is killed."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

KILLED_WITHIN_S = 60.0
# Its group is its own number. It waits until nobody holds the other end of its input, and kills the group.
GUARD = ("/bin/sh", "-c", "read -r _; kill -KILL 0")


class Together:
    """A process group with a guard in it, which kills the group once this process is gone."""

    def __init__(self) -> None:
        self._guard = subprocess.Popen(GUARD, stdin=subprocess.PIPE, process_group=0)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def group(self) -> int:
        """The process group: whoever is started in it ends with it."""
        return self._guard.pid

    def start(self, argv: Sequence[str | Path], *, log: Path, environ: Mapping[str, str]) -> int:
        """Start a program of the group that writes to ``log``; answers with its process id."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                process_group=self.group,
            )
        self._processes[log.stem] = process
        return process.pid

    def ended(self) -> dict[str, int]:
        """The exit status of each program that has ended, by the stem of its log's name."""
        return {name: status for name, p in self._processes.items() if (status := p.poll()) is not None}

    def kill_one(self, name: str) -> None:
        """End the program whose log has this stem at once; it may be started again."""
        process = self._processes[name]
        process.kill()
        process.wait(KILLED_WITHIN_S)

    def kill(self) -> None:
        """End all of them at once; idempotent."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        for process in (self._guard, *self._processes.values()):
            process.wait(KILLED_WITHIN_S)
