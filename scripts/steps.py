"""Steps of an installation: which one runs, for how long, and the latest line that its command wrote."""

from __future__ import annotations  # an older Python reads this file too, and gets a message

import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

OUTPUT_LINES_KEPT = 60
"""Of a command's output, printed if it fails."""

TERMINAL_INTERVAL_S = 1.0
LOG_INTERVAL_S = 30.0
"""How often a step that still runs is shown: on a terminal by rewriting its line, elsewhere by another."""


class StepFailed(Exception):
    """A command failed; its output has been printed."""


class Steps:
    """Runs commands, a step each, and shows them on standard output as steps of ``name``."""

    def __init__(self, name: str, n_steps: int) -> None:
        self._name = name
        self._n_steps = n_steps
        self._n_begun = 0
        self._is_terminal = sys.stdout.isatty()

    def run(
        self,
        title: str,
        *commands: Sequence[str | Path],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Run the commands of one step, one after the other. Raises StepFailed for the first that fails."""
        self._n_begun += 1
        head = f"{self._name}: [{self._n_begun}/{self._n_steps}] {title}"
        began_s = time.monotonic()
        if not self._is_terminal:
            self._print(head)
        for command in commands:
            self._run(head, [str(part) for part in command], began_s, cwd, env)
        self._print(f"{head}: {time.monotonic() - began_s:.0f} s")

    def _run(
        self,
        head: str,
        command: Sequence[str],
        began_s: float,
        cwd: Path | None,
        env: Mapping[str, str] | None,
    ) -> None:
        output: deque[str] = deque(maxlen=OUTPUT_LINES_KEPT)
        with subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            reader = threading.Thread(target=lambda: output.extend(process.stdout or ()), daemon=True)
            reader.start()
            try:
                code = self._wait(process, head, began_s, output)
            except KeyboardInterrupt:
                process.terminate()
                self._print(f"{head}: interrupted")
                raise
            reader.join()
        if code:
            self._print("".join(output).rstrip("\n"))
            self._print(f"{head}: failed after {time.monotonic() - began_s:.0f} s, as shown above")
            raise StepFailed(head)

    def _wait(self, process: subprocess.Popen[str], head: str, began_s: float, output: Sequence[str]) -> int:
        """Show that the command still runs until it ends; return its exit code."""
        while True:
            try:
                return process.wait(TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S)
            except subprocess.TimeoutExpired:
                latest = output[-1].strip() if output else ""
                self._show_running(f"{head}: {time.monotonic() - began_s:.0f} s  {latest}")

    def _show_running(self, line: str) -> None:
        if self._is_terminal:
            fits = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:fits]}", end="", flush=True)
        else:
            print(line, flush=True)

    def _print(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self._is_terminal else text, flush=True)
