"""What a command that replays was given of the traffic, as its command line has it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvrouter.commands.output import Output


def name_shown(path: Path) -> str:
    """Return a path as reports name it: bytes of it that are no UTF-8 are written as ``\\xff``."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """The options that every command has which replays traffic; ``slo_ttft`` and ``slo_itl`` are seconds."""

    trace: Path
    model: str | None
    trace_format: Literal["mooncake", "mooncake-delta"] | None
    dispatch: str
    speedup: float
    rows: int | None
    seed: int
    seeds: int
    timing: Path | None
    events: Path | None
    slo_ttft: float
    slo_itl: float
    output: Output

    @property
    def trace_name(self) -> str:
        """The trace's path as reports name it."""
        return name_shown(self.trace)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds, in turn."""
        return tuple(range(self.seed, self.seed + self.seeds))
