"""A fresh fleet for one replay: ``kvrouter up`` in a process of its own, and what it says about itself."""

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_file import FleetFile, KvTransferSpec

READY_POLL_S = 0.1
LOG_TAIL_CHARS = 2000


class FleetFailed(RuntimeError):
    """The fleet did not start, or did not stop cleanly; the message ends with the tail of its log."""


def write_fleet_file(fleet: FleetFile, target: Path) -> None:
    """Write a fleet file that reads as ``fleet``."""
    content = fleet.model_dump(mode="json", exclude_unset=True)
    target.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def transfer_policy(fleet: FleetFile) -> KvTransferSpec:
    """The fleet's transfer policy. Raises ``ConfigError`` without one: there is nothing to keep to."""
    if fleet.kv_transfer is None:
        raise ConfigError("the replay needs a fleet with a transfer policy", param="kv_transfer")
    return fleet.kv_transfer


def up_command(fleet_file: Path, *, router_mode: str, port: int) -> list[str]:
    """The command line that a user types."""
    command = [sys.executable, "-m", "kvrouter.cli", "up"]
    return [*command, "--fleet", str(fleet_file), "--router-mode", router_mode, "--http-port", str(port)]


def fetch(url: str, *, timeout_s: float = 10.0) -> bytes:
    """The body of a GET. Raises ``urllib.error.URLError``, for a status from 400 up too."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        body: bytes = response.read()
        return body


class FleetProcess:
    """Starts on entering, ready for requests; ends by SIGTERM on leaving, and must exit with 0.

    Raises ``FleetFailed`` where it does not, also in place of the connection errors that came of it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        base_url: str,
        log_file: Path,
        ready_limit_s: float = 60.0,
        stop_limit_s: float = 30.0,
    ) -> None:
        self.base_url = base_url
        self._command = command
        self._log_file = log_file
        self._ready_limit_s = ready_limit_s
        self._stop_limit_s = stop_limit_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process. Raises ``FleetFailed`` where it was not started."""
        if self._process is None:
            raise FleetFailed("the fleet was not started")
        return self._process.pid

    def __enter__(self) -> Self:
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        try:
            self._wait_ready(self._process)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(self._stop_limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            if error is None:
                raise self._failed(f"did not stop within {self._stop_limit_s:g} s of SIGTERM") from None
            return
        if status != 0 and (error is None or isinstance(error, OSError)):
            raise self._failed(f"exited with status {status}") from error

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        give_up_s = time.monotonic() + self._ready_limit_s
        while time.monotonic() < give_up_s:
            if process.poll() is not None:
                raise self._failed(f"exited with status {process.returncode} before it was ready")
            try:
                fetch(f"{self.base_url}/ready", timeout_s=self._ready_limit_s)
            except OSError:
                time.sleep(READY_POLL_S)
            else:
                return
        raise self._failed(f"was not ready within {self._ready_limit_s:g} s")

    def _failed(self, what: str) -> FleetFailed:
        tail = self._log_file.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:]
        return FleetFailed(f"the fleet {what}\n{tail}")
