"""Command lines of examples, read by the real command line: what each would start, without starting it."""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from unittest import mock

from kvrouter.cli import main
from kvrouter.settings.tree import Settings

SERVE = (
    "frontend.run.serve_frontend",
    "worker.mock_worker.serve_mock_worker",
    "worker.engine_worker.serve_engine_worker",
)
"""What the commands call once flags, variables and files are read."""


@dataclass(frozen=True)
class ParsedCommand:
    """A process that would be started."""

    settings: Settings
    spec: object
    drain_limit_s: float
    """How long it may take to end after SIGTERM."""


def parse_command(arguments: Sequence[str], environ: Mapping[str, str]) -> ParsedCommand:
    """Return what a command line starts in an environment. Raises ValueError with what it writes when it is
    refused, or warns.
    """
    found: list[ParsedCommand] = []

    def serve(settings: Settings, spec: object, *_: object, drain_limit_s: float | None = None) -> int:
        limit_s = settings.frontend.drain_limit_s if drain_limit_s is None else drain_limit_s
        found.append(ParsedCommand(settings, spec, limit_s))
        return 0

    written = io.StringIO()
    with _served_by(serve), mock.patch.dict(os.environ, environ, clear=True), redirect_stderr(written):
        code = main(list(arguments))
    if code or written.getvalue() or len(found) != 1:
        raise ValueError(f"{' '.join(arguments)}: exit code {code}: {written.getvalue()}")
    return found[0]


@contextmanager
def _served_by(serve: object) -> Iterator[None]:
    with mock.patch("kvrouter.telemetry.logs.configure_logging"):
        patches = [mock.patch(f"kvrouter.cli.{each}", serve) for each in SERVE]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()
