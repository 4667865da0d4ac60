"""``kvrouter dry-run``: which requests of a recording another transfer policy would have refused."""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from math import ceil, isfinite

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.cli.dry_run.flags import DryRunOptions
from kvrouter.cli.output import json_text
from kvrouter.cli.progress import working
from kvrouter.cli.replay.input_options import name_shown
from kvrouter.cli.replay.recorded_inputs import open_past
from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Enforcement
from kvrouter.settings.setting import installed_version
from kvrouter.sim.past.dry_run import DryRun, Lack, Minute, RefusalGroup, RefusedRequest, Verdict, dry_run
from kvrouter.sim.past.recorded_fleet import Policy
from kvrouter.sim.traces.recorded_trace import Past

MINUTES_SHOWN = 20
REQUESTS_LISTED = 10_000
"""Refused requests that the JSON lists; it counts them all."""

_FOR_EVER_S = 1e12

_WHAT = {
    Verdict.UNCHANGED: "as it was: KV stayed in one {domain}, or none moved",
    Verdict.MOVED: "another pair: KV left its {domain}, and a pair within one was there",
    Verdict.CROSSES: "KV still crosses: no pair within one {domain}, and fallback lets it",
    Verdict.REFUSED: "refused: placed then, and no pair within one {domain} was there",
    Verdict.REFUSED_THEN: "placed nowhere then either: refused by this policy too",
    Verdict.NOT_PLACED_THEN: "placed nowhere then: not for want of a pair",
}


class Patience(msgspec.Struct, frozen=True):
    """The outcome of the refused requests if each had waited for its domain without a limit."""

    refused: int
    """Requests that would have waited for ever, or found no place in the line."""
    waited: int
    longest_wait_s: float


class DryRunReport(msgspec.Struct, frozen=True):
    """All of a dry run, as JSON has it. ``refused`` lists at most 10,000 requests; ``counts`` has all."""

    version: str
    recording: str
    model: str
    domain: str
    enforcement: Enforcement
    wait_s: float
    from_s: float
    requests: int
    counts: Mapping[Verdict, int]
    groups: tuple[RefusalGroup, ...]
    lacks: tuple[Lack, ...]
    by_prefill_domain: Mapping[str, int]
    minutes: tuple[Minute, ...]
    waited: int
    longest_wait_s: float
    if_patient: Patience | None
    """None if no request was refused."""
    refused: tuple[RefusedRequest, ...]


def run_dry(options: DryRunOptions, console: Console) -> int:
    """Decide all of a recording again under a policy, and print the result. Returns the exit code: 1 if a
    refusal counts as a failure and there is one. Raises ConfigError.
    """
    if not (isfinite(options.wait_s) and options.wait_s >= 0.0):
        raise ConfigError(
            f"router-domain-wait: {options.wait_s} is not 0 or more", param="router-domain-wait"
        )
    options.output.check()
    domain = options.domain.strip()
    policy = Policy(domain, options.enforcement, None)
    patience = None
    with working(f"reading {name_shown(options.recording)}"):
        past = open_past(options.recording, options.model)
    result = _decided(past, policy, options.wait_s, "again")
    if result.refused:
        patient = _decided(past, policy, _FOR_EVER_S, "again with no limit to their wait")
        patience = Patience(len(patient.refused), patient.waited, patient.longest_wait_s)
    report = DryRunReport(
        version=installed_version(),
        recording=name_shown(options.recording),
        model=past.fleet.model,
        domain=domain,
        enforcement=Enforcement(options.enforcement),
        wait_s=options.wait_s,
        from_s=past.from_s,
        requests=len(past.requests),
        counts=_counts(result),
        groups=result.groups,
        lacks=result.lacks,
        by_prefill_domain=result.by_prefill_domain,
        minutes=result.minutes,
        waited=result.waited,
        longest_wait_s=result.longest_wait_s,
        if_patient=patience,
        refused=result.refused[:REQUESTS_LISTED],
    )
    options.output.show(lambda: json_text(report), lambda: show_dry_run(report, console))
    return 1 if options.fail_if_refused and report.counts[Verdict.REFUSED] else 0


def _decided(past: Past, policy: Policy, wait_s: float, how: str) -> DryRun:
    n_requests = len(past.requests)
    with working(f"deciding {n_requests:,} requests {how}", total=n_requests) as progress:
        return dry_run(past, policy, wait_s=wait_s, on_decided=lambda done: progress.show(done=done))


def _counts(result: DryRun) -> dict[Verdict, int]:
    found = Counter(result.verdicts)
    return {verdict: found[verdict] for verdict in Verdict}


def show_dry_run(report: DryRunReport, console: Console) -> None:
    """Print the verdicts, and of those that were refused why, for want of what, and when."""
    title = f"{report.recording}: {report.requests:,} requests under {report.enforcement} on {report.domain}"
    table = Table(title=Text(title))
    for heading in ("requests", "%"):
        table.add_column(heading, justify="right")
    table.add_column("what the policy would have changed", overflow="fold")
    for verdict, count in report.counts.items():
        if count or verdict is Verdict.REFUSED:
            share = 100.0 * count / report.requests
            change = _WHAT[verdict].format(domain=report.domain)
            table.add_row(f"{count:,}", f"{share:.1f}", Text(change))
    console.print(table)
    if report.waited:
        console.print(
            f"{report.waited:,} waited for a decode worker, {report.longest_wait_s:.1f} s at most, "
            "and are not refused",
            soft_wrap=True,
        )
    for group in report.groups:
        console.print(Text(f"{group.requests:,} refused as {group.code}: {group.message}"), soft_wrap=True)
    for lack in report.lacks:
        change = f"{lack.requests:,} refused while {report.domain} {lack.value} had no {lack.role} worker"
        console.print(Text(f"{change} that takes requests"), soft_wrap=True)
    for value, count in report.by_prefill_domain.items():
        where = f"{report.domain} {value}" if value else f"no known {report.domain}"
        console.print(Text(f"{count:,} refused were prefilled in {where} then"), soft_wrap=True)
    patience = report.if_patient
    if patience is not None and patience.waited:
        left = f"{patience.refused:,} requests" if patience.refused else "no request"
        console.print(
            f"with --router-domain-wait {ceil(patience.longest_wait_s)} {left} would have been refused: the "
            "others would have waited for a decode worker that came",
            soft_wrap=True,
        )
    if report.minutes:
        console.print(_minutes(report))
        more = len(report.minutes) - MINUTES_SHOWN
        if more > 0:
            console.print(f"and {more:,} more minutes, which --output json has")


def _minutes(report: DryRunReport) -> Table:
    table = Table(title="minutes with refusals, UTC")
    table.add_column("minute")
    table.add_column("requests", justify="right")
    table.add_column("refused", justify="right")
    for minute in islice(report.minutes, MINUTES_SHOWN):
        begins = datetime.fromtimestamp(minute.at_s, UTC).strftime("%Y-%m-%d %H:%M")
        table.add_row(begins, f"{minute.requests:,}", f"{minute.refused:,}")
    return table
