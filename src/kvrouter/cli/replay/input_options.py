"""The inputs of a command that replays, as its command line has them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvrouter.cli.output import TABLE, Output
from kvrouter.core.cost_rules import cost_choices
from kvrouter.settings.option import option
from kvrouter.settings.setting_spec import written_setting


def name_shown(path: Path) -> str:
    """Return a path as reports name it: bytes of it that are no UTF-8 are written as ``\\xff``."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """The options that every command has which replays traffic; ``slo_ttft`` and ``slo_itl`` are seconds."""

    trace: Path
    model: str | None = option(
        "The model of a recording or of BurstGPT's rows; may be left out where there is one.", metavar="NAME"
    )
    trace_format: Literal["mooncake", "mooncake-delta"] | None = option(
        "What Mooncake's rows with session_id have: whole prompts, or only what a turn adds. Needed "
        "where the rows do not show it."
    )
    reuse_answers: bool = option(
        "Engines have the answers of earlier turns cached. The trace needs sessions.",
        default=False,
    )
    dispatch: Literal["timestamp", "closed"] = option(
        "When requests arrive: as the trace says, or each turn its think time after the answers "
        "that it waits for.",
        default="timestamp",
    )
    rate_per_s: float | None = option(
        "Where the trace has no times of arrival, so many requests come a second on average.",
        metavar="N",
        above=0,
    )
    speedup: float = option("By time stamp, so many times as fast.", default=1.0)
    rows: int | None = option("Only the first requests.", metavar="N", at_least=1)
    seed: int = option("What is drawn from.", default=0, at_least=0)
    seeds: int = option(
        "Replay with so many seeds, and show 95 % intervals.", default=1, at_least=1, at_most=100
    )
    timing: Path | None = option("The timing of every engine, in YAML.", metavar="FILE")
    events: Path | None = option(
        "What happens to workers, links and policies meanwhile, in YAML; or `none`, or `recorded`: "
        "what a recording says of its fleet. That is the default where the fleet has the same workers.",
        metavar="FILE",
    )
    slo_ttft: float = option("Seconds in which a good answer begins.", default=2.0)
    slo_itl: float = option("Mean seconds between its tokens, at most.", default=0.05)
    output: Output = TABLE

    @property
    def trace_name(self) -> str:
        """The trace's path as reports name it."""
        return name_shown(self.trace)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds, in turn."""
        return tuple(range(self.seed, self.seed + self.seeds))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Over which fleet a trace is replayed, and who routes."""

    fleet: Path | None = option(
        "The fleet.  [default: the recorded one, else 8 aggregated mock workers]", metavar="FILE"
    )
    policies: tuple[str, ...] = option(
        "Who routes: kvrouter, with settings as kvrouter:overlap_score_weight=4, or a published rule: "
        "round-robin, random, least-loaded, power-of-two, dynamo, lmetric, predicted-ttft, llm-d, aibrix, "
        "sglang or sticky. Give it again to compare.  [default: kvrouter]",
        default=(),
        flag="--policy",
        metavar="NAME",
    )
    compare: str = option("The same, all in one option.", default="", metavar="NAME,NAME")
    sweeps: tuple[str, ...] = option(
        "Replay with each value of a key of the fleet file, as kv_transfer.enforcement=required,preferred.",
        default=(),
        flag="--sweep",
        metavar="KEY=A,B",
    )
    tune: bool = option(
        "Give every policy the parameters that suit the first half of the trace, and show the second.",
        default=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """Which files a replay writes."""

    report: Path | None = option("Write a page with tables and plots there, in HTML.", metavar="FILE")
    write_fleet: Path | None = option(
        "Write the fleet of a recording there, as a fleet file.", metavar="FILE"
    )
    write_events: Path | None = option(
        "Write the changes of a recording's fleet there, as an events file.", metavar="FILE"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayInputOptions(InputOptions):
    """The inputs of ``kvrouter replay``, which shows critical requests apart."""

    critical_share: float = option(
        "How large a share of the requests, drawn by the seed, has a strict priority of 1.",
        default=0.0,
        at_least=0,
        at_most=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorthInputOptions(InputOptions):
    """The inputs of ``kvrouter worth``, which repeats replays with random draws."""

    seeds: int = option(
        "Replay with so many seeds, where they change anything.", default=5, at_least=1, at_most=100
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorthOptions:
    """The choices that are compared with a fleet as it is; ``threshold`` is in percent."""

    fleet: Path = option("The fleet as it is, with its links.", is_required=True, metavar="FILE")
    modes: tuple[str, ...] = option(
        "Compare this router mode; give it again for more.  [default: all of them]",
        default=(),
        flag="--mode",
        choices=written_setting("router.router_mode").choices,
    )
    costs: tuple[str, ...] = option(
        "In mode kv, compare this cost; joint is time, the pair picked together. Give it again for more.  "
        "[default: blocks, time and joint]",
        default=(),
        flag="--cost",
        choices=cost_choices(),
    )
    upgraded: tuple[str, ...] = option(
        "Show today's policy amid an upgrade too: so many percent of the prefill and of the decode workers, "
        "the first of the file, cannot hand KV to the others, or take theirs. Give it again for more.",
        default=(),
        flag="--upgraded",
        metavar="PERCENT[/PERCENT]",
    )
    threshold: float = option("No gain below it is worth a change.", default=2.0, metavar="PERCENT")
