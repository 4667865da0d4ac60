"""The runner's end of a side: starts its process and asks it things, one at a time."""

import json
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parent.parent
ANSWER_TIMEOUT_S = 900.0
_QUIET = {"DYN_LOG": "off"}


class SideFailed(Exception):
    """A side could not do what it was asked; the message is its own."""


@dataclass(frozen=True, slots=True)
class SideCommand:
    """How a side is started: an interpreter, and the module that it runs."""

    name: str
    python: Path
    module: str


class Side:
    """A side's process, from ``with`` to its end."""

    def __init__(self, command: SideCommand) -> None:
        self.command = command
        self._wire, theirs = socket.socketpair()
        self._wire.settimeout(ANSWER_TIMEOUT_S)
        with theirs:
            self._process = subprocess.Popen(
                [str(command.python), "-m", command.module, str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **_QUIET},
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
            )
        self._lines = self._wire.makefile("rwb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        self._wire.close()
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that are measured."""
        answer = self._ask({"do": "versions"})
        return {str(name): str(version) for name, version in dict(_mapping(answer)).items()}

    def prepare(self, bench: str, params: dict[str, int]) -> dict[str, object]:
        """Let the side build what it measures on; return what it says about it."""
        return _mapping(self._ask({"do": "prepare", "bench": bench, "params": params}))

    def round(self, variant: str, n_calls: int) -> list[float]:
        """Return ``n_calls`` samples of the prepared bench."""
        samples = self._ask({"do": "round", "variant": variant, "calls": n_calls})
        if not isinstance(samples, list):
            raise SideFailed(f"{self.command.name}: samples that are no list: {samples!r}")
        return [float(sample) for sample in samples]

    def _ask(self, message: dict[str, object]) -> object:
        try:
            self._lines.write(json.dumps(message).encode() + b"\n")
            self._lines.flush()
            line = self._lines.readline()
        except OSError as error:
            raise SideFailed(f"{self.command.name}: {message['do']}: {error}") from error
        if not line:
            raise SideFailed(f"{self.command.name}: its process ended with {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise SideFailed(f"{self.command.name}: {message['do']}: {reply['error']}")
        answer: object = reply["answer"]
        return answer


def _mapping(answer: object) -> dict[str, object]:
    if not isinstance(answer, dict):
        raise SideFailed(f"an answer that is no object: {answer!r}")
    return answer
