"""The options that ``kvrouter hit-rate`` and ``kvrouter dry-run`` share."""

from dataclasses import dataclass
from pathlib import Path

from kvrouter.cli.output import TABLE, Output
from kvrouter.settings.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class PastOptions:
    """The options of every command that reads a recording as the past, without a replay."""

    recording: Path
    model: str | None = option("The model; may be left out where one is recorded.", metavar="NAME")
    output: Output = TABLE
