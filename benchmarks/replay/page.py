"""The page of policies: one deployment over zones, and ours against tuned rules."""

from collections.abc import Sequence

from benchmarks.replay.contest import Contest
from benchmarks.replay.kept import Study
from benchmarks.replay.table import HOW, tables
from benchmarks.replay.zones import ZoneCell
from kvrouter.sim.replay.summary import interval


class PolicyStudy(Study, frozen=True, kw_only=True):
    """All that was measured in one run."""

    zones: tuple[ZoneCell, ...]
    contests: tuple[Contest, ...]


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 0) -> str:
    """A mean with its 95 % interval over seeds."""
    found = interval([value * scale for value in values])
    shown = f"{found.mean:,.{digits}f}"
    within = f"{found.within:,.{digits}f}"
    return shown if float(within.replace(",", "")) == 0.0 else f"{shown} ± {within}"


def markdown(study: PolicyStudy) -> str:
    """Return the page."""
    text = [
        "# What replays say of policies",
        "",
        f"Written by `python -m benchmarks.replay --form {study.form}`: the first {study.rows:,} requests of "
        f"each of three windows of each trace, {study.seeds} seeds, each of which delays every request a "
        f"little, {study.origin}. All figures, and what was tuned, stand in "
        f"[results](results/{study.form}.json). Mock engines answer by a formula: the page compares "
        "policies, it predicts no fleet.",
        "",
        "A fleet has 8 or 32 hosts, each with a prefill and a decode worker, in racks of 2 or 4 in two "
        "zones, and 256 KiB of KV a token. Links are in tiers (within a host, a rack, a zone, and between "
        "zones 400, 100, 50 and 20 Gbit/s) or alike (100). The load is a share of what round-robin sustains "
        "with 90 % of requests within 2 s to the first token and 50 ms between tokens; no window is as "
        "fast as to last less than 10 s. "
        "[Traces](../../data/README.md) are replayed by time stamp, but sessions of coding agents in a "
        "closed loop, with a third of their think times and so many sessions for 8 hosts as the window has. "
        "*Code service*: Azure's arrivals and prompts, answers of 28 tokens. *Short chat*: prompts of 300 "
        "tokens. *Shared passages*: each prompt has a piece of its own before six of 2,000 passages in a "
        "random order, so that contents recur and prefixes hardly do. `kvrouter, tuned` has 20 points too, "
        "and may prefer or bind.",
        "",
        HOW,
        "",
        *tables(study.contests),
        *_zones(study.zones),
    ]
    return "\n".join(text)


def _zones(cells: Sequence[ZoneCell]) -> list[str]:
    lines = [
        "## One deployment over zones, or one for each",
        "",
        "The workaround for engines that must not send KV across zones is a deployment for each zone behind "
        "a gateway that takes turns. Both have 2 prefill and 2 decode workers a zone; the conversation trace "
        "comes twice as fast. In the lower rows zone a loses its decode workers after a third of the time. "
        "good / s is by the time of arrivals. Means, ± a 95 % interval over seeds.",
        "",
        "| zones | setup | decoders of a | TTFT mean ms | p99 ms | good % | good / s | cached % | failed |",
        "|--:|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in sorted(cells, key=lambda cell: (cell.loses_decoders, cell.zones)):
        of = cell.figures
        lines.append(
            f"| {cell.zones} | {of.policy} | {'lost' if cell.loses_decoders else 'there'} "
            f"| {spread(of.ttft_ms)} | {spread(of.ttft_p99_ms)} | {spread(of.good, 100, 1)} "
            f"| {spread(of.good_per_s, 1, 2)} | {spread(of.cached, 100, 1)} "
            f"| {spread([float(each) for each in of.failed])} |"
        )
    return [*lines, ""]
