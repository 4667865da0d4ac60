"""The page of the live run: what each phase was like, and how soon traffic left the link that fell."""

from collections.abc import Iterator, Sequence
from statistics import mean

import msgspec

from benchmarks.http_replay.machine import Commit, Machine
from benchmarks.measure import quantile
from benchmarks.replay.table import joined

PHASES = ("all links well", "KV within zone a at a tenth", "well again")
FALLEN = "a to a"
WINDOW_S = 2.0
STEP_S = 0.25
LEFT = 0.2
"""Traffic has left a link once its share of a window's transfers is less than this of what it was before."""


class SaidOfLink(msgspec.Struct, frozen=True):
    """A line of the log: when it was read, since the server was ready, its event, and its fields."""

    at_s: float
    event: str
    fields: str


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a request that was due at ``at_s``."""

    at_s: float
    late_s: float
    """So many seconds after it was due it was sent."""
    prompt_tokens: int
    route: str = ""
    """The zones that its KV went between, "" where it stayed."""
    ttft_s: float | None = None
    failed: str = ""
    """Why it failed, "" where it did not."""


class LiveRun(msgspec.Struct, frozen=True, kw_only=True):
    """All that was seen under one policy. ``load_before`` is the machine's load average when it began."""

    policy: str
    flags: str
    load_before: float
    said: tuple[SaidOfLink, ...]
    requests: tuple[LiveRequest, ...]


class PhaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One phase; times are in milliseconds, shares are of all transfers of the phase."""

    requests: int
    failed: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    transfers: int
    fallen_share: float
    fallen_token_share: float


class LiveSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures; seconds count from the change of the link, None is never within the phase."""

    policy: str
    phases: tuple[PhaseFigures, ...]
    left_after_s: float | None
    """Until the share of transfers over the link fell below a fifth of what it was before,"""
    left_for_good_after_s: float | None
    """and stayed there, over the rest of the phase."""
    slow_after_s: float | None
    """Until the log said that the link is slow,"""
    well_after_s: float | None
    """and, after it had recovered, that it is well."""
    slow_lines: int
    late_p99_ms: float


class LiveStudy(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured, ``rate`` requests a second."""

    measured_at: str
    commit: Commit
    machine: Machine
    rate: float
    phase_s: float
    seed: int
    fallen: str
    summaries: tuple[LiveSummary, ...]
    runs: tuple[LiveRun, ...]


def summary(run: LiveRun, phase_s: float) -> LiveSummary:
    """Reduce a run to its figures."""
    phases = [
        [request for request in run.requests if number * phase_s <= request.at_s < (number + 1) * phase_s]
        for number in range(len(PHASES))
    ]
    figures = tuple(_phase(requests) for requests in phases)
    changes_s = [said.at_s for said in run.said if said.event == "mock_link_changed"]
    fell_s, mended_s = changes_s
    left_s, left_for_good_s = (
        _left_after(phases[1], fell_s, mended_s, figures[0].fallen_share, for_good=for_good)
        for for_good in (False, True)
    )
    slow_s = [said.at_s for said in run.said if said.event == "link_slow"]
    well_s = [said.at_s for said in run.said if said.event == "link_well" and said.at_s >= mended_s]
    return LiveSummary(
        policy=run.policy,
        phases=figures,
        left_after_s=next(left_s, None),
        left_for_good_after_s=next(left_for_good_s, None),
        slow_after_s=round(slow_s[0] - fell_s, 2) if slow_s else None,
        well_after_s=round(well_s[0] - mended_s, 2) if well_s else None,
        slow_lines=len(slow_s),
        late_p99_ms=round(1e3 * quantile([request.late_s for request in run.requests], 0.99), 1),
    )


def _phase(requests: Sequence[LiveRequest]) -> PhaseFigures:
    ttft_ms = [1e3 * request.ttft_s for request in requests if request.ttft_s is not None]
    return PhaseFigures(
        requests=len(requests),
        failed=sum(request.failed != "" for request in requests),
        ttft_mean_ms=round(mean(ttft_ms), 1),
        ttft_p50_ms=round(quantile(ttft_ms, 0.5), 1),
        ttft_p99_ms=round(quantile(ttft_ms, 0.99), 1),
        transfers=sum(request.route != "" for request in requests),
        fallen_share=round(_share(requests, by_tokens=False), 3),
        fallen_token_share=round(_share(requests, by_tokens=True), 3),
    )


def _share(requests: Sequence[LiveRequest], *, by_tokens: bool) -> float:
    """The share of transfers, or of the tokens in them, that went over the link."""
    weighed = [(each.route, each.prompt_tokens if by_tokens else 1) for each in requests if each.route]
    total = sum(weight for _, weight in weighed)
    return sum(weight for route, weight in weighed if route == FALLEN) / total if total else 0.0


def _left_after(
    requests: Sequence[LiveRequest], fell_s: float, mended_s: float, before: float, *, for_good: bool
) -> Iterator[float]:
    """How long after the fall each window begins in which traffic has left the link; ``for_good``: over the
    rest of the phase too.
    """
    for step in range(int((mended_s - fell_s - WINDOW_S) / STEP_S) + 1):
        begin_s = fell_s + step * STEP_S
        rest = [each for each in requests if each.at_s >= begin_s]
        window = [each for each in rest if each.at_s < begin_s + WINDOW_S and each.route]
        looked_at = (window, rest) if for_good else (window,)
        if window and all(_share(some, by_tokens=False) < LEFT * before for some in looked_at):
            yield step * STEP_S


def markdown(study: LiveStudy) -> str:
    """Return the page."""
    loads = ", ".join(f"{run.load_before:g}" for run in study.runs)
    text = [
        "# A link that falls, live",
        "",
        f"Written by `python -m benchmarks.choice.live --rate {study.rate:g} --phase {study.phase_s:g} "
        f"--seed {study.seed}`, commit {study.commit.id}{' with changes' * study.commit.changed}, "
        f"{study.machine.cpu}, {study.machine.cores} cores, which others used too: load average before each "
        f"run {loads}. All requests are in [results](results/live.json).",
        "",
        "`kvrouter up --events` in a process of its own, over HTTP, on the real clock: two zones of 2 "
        "prefill and 2 decode mock engines, 5 GB/s within a zone and 2.5 GB/s between them, 128 KiB of KV "
        f"a token; {study.rate:g} requests a second, Poisson, of 600 to 3,000 new tokens, 60 to 140 tokens "
        "of answer, sent when they are due. Both policies had the same arrivals, one after the other. "
        + "; ".join(f"`{run.policy}` is `{run.flags}`" for run in study.runs)
        + ". Both are given the links of the fleet file, and nobody announces the change.",
        "",
        "| policy | phase | requests | failed | TTFT mean ms | p50 | p99 | transfers | of them a to a "
        "| of their tokens |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(line for each in study.summaries for line in _phase_lines(each)),
        "",
        "Traffic has left the link once less than a fifth of its share before is left, of the transfers of "
        f"{WINDOW_S:g} s of arrivals that begin so long after the change; for good: also of all to the end "
        "of the phase. The log is the router's. *Never*: not within the phase; what the router knows of a "
        "link that carries nothing is half forgotten after four minutes, and only then it is tried again.",
        "",
        "| policy | left after s | for good after s | `link_slow` after s | lines | `link_well` after the "
        "recovery, s | requests sent late, p99 ms |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *map(_link_line, study.summaries),
        "",
    ]
    return "\n".join(text)


def _phase_lines(each: LiveSummary) -> Iterator[str]:
    for name, phase in zip(PHASES, each.phases, strict=True):
        yield joined(
            [
                each.policy,
                name,
                f"{phase.requests:,}",
                f"{phase.failed:,}",
                f"{phase.ttft_mean_ms:,.0f}",
                f"{phase.ttft_p50_ms:,.0f}",
                f"{phase.ttft_p99_ms:,.0f}",
                f"{phase.transfers:,}",
                f"{phase.fallen_share:.0%}",
                f"{phase.fallen_token_share:.0%}",
            ]
        )


def _link_line(each: LiveSummary) -> str:
    cells = [each.policy, *map(_seconds, (each.left_after_s, each.left_for_good_after_s, each.slow_after_s))]
    return joined([*cells, str(each.slow_lines), _seconds(each.well_after_s), f"{each.late_p99_ms:g}"])


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f}"
