"""The report of ``kvrouter doctor``, for a terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvrouter.cli.doctor.findings import CacheShares, Finding, Report, Unmade

ALSO_SHOWN = 8
"""So many subjects of one problem, or of one check that was not made, are named; --output json has them all.
"""

STYLES = {"critical": "bold red", "warning": "yellow", "note": "cyan"}


def drawn(report: Report) -> RenderableType:
    """Return the report for a terminal. What comes from the fleet is text, and never markup."""
    parts: list[RenderableType] = [_head(report), Text()]
    parts += [_findings(alike) for alike in _grouped(report.findings)]
    for title, unmade in (("not enough to tell", report.not_enough), ("not made", report.not_made)):
        if unmade:
            parts.append(Text(title, "bold"))
            parts.append(_rows(_without_verdict(unmade)))
            parts.append(Text())
    if report.passed:
        parts.append(Text("passed", "bold"))
        parts.append(_rows((each.check, f"{each.holds} ({each.compared})") for each in report.passed))
        parts.append(Text())
    parts += [_cache(shares) for shares in report.cache]
    parts.append(
        Text(
            "--recording shows, from a recording, where cache hits are lost: by the size of the caches, by "
            "routing, or by what the router does not see.",
            "dim",
        )
    )
    return Group(*parts)


def _head(report: Report) -> Text:
    counts = {name: sum(each.severity == name for each in report.findings) for name in STYLES}
    found = [
        (f"{n} {name}{'s' if n > 1 and name != 'critical' else ''}", STYLES[name])
        for name, n in counts.items()
        if n
    ]
    head = Text.assemble(("kvrouter doctor ", "bold"), f"{_plain(report.url)}  ")
    head.append_text(
        Text(", ").join(Text(*each) for each in found) if found else Text("nothing is wrong", "green")
    )
    head.append(
        f"; {len(report.passed)} checks passed, {len({each.check for each in report.not_enough})} had not "
        f"enough to tell, {len({each.check for each in report.not_made})} not made"
    )
    return head


def _grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Return findings that have one cause and one remedy together, in their order."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        key = finding.check, finding.severity.value, finding.why, finding.remedy
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _findings(alike: Sequence[Finding]) -> RenderableType:
    first, *others = alike
    severity = first.severity.value
    head = Text.assemble(
        (f"{severity:<8}", STYLES[severity]), "  ", (first.check, "bold"), "  ", _plain(first.subject)
    )
    rows = [
        ("seen", first.seen),
        ("compared", first.compared),
        ("why", first.why),
        ("remedy", first.remedy),
    ]
    if others:
        more = f" and {len(others) - ALSO_SHOWN} more" if len(others) > ALSO_SHOWN else ""
        rows.append(("also", ", ".join(each.subject for each in others[:ALSO_SHOWN]) + more))
    return Group(head, _rows(rows), Text())


def _without_verdict(unmade: Sequence[Unmade]) -> Iterator[tuple[str, str]]:
    """Yield a row for each, and for a check with very many the number of further ones."""
    for name in dict.fromkeys(each.check for each in unmade):
        of_check = [each for each in unmade if each.check == name]
        for each in of_check[:ALSO_SHOWN]:
            yield f"{name}: {each.subject}", each.why
        if len(of_check) > ALSO_SHOWN:
            yield name, f"and {len(of_check) - ALSO_SHOWN} more"


def _rows(rows: Iterable[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, text in rows:
        table.add_row(Text(_plain(name)), Text(_plain(text)))
    return Padding(table, (0, 0, 0, 2))


def _cache(shares: CacheShares) -> Text:
    head = f"cache of {_plain(shares.model)}: {shares.prompt_tokens:,} prompt tokens"
    if not shares.engines_say:
        return Text(f"{head}; 0 of {shares.answers:,} answers say how many of them engines had cached")
    predicted, cached = (
        f"{tokens / shares.reported_prompt_tokens:.1%}" if shares.reported_prompt_tokens else "nothing"
        for tokens in (shares.predicted_tokens, shares.cached_tokens)
    )
    return Text(
        f"{head}; of the {shares.reported_prompt_tokens:,} in {shares.reported_by_route} that say what was "
        f"cached, the router expected {predicted}, engines had {cached}"
    )


def _plain(text: str) -> str:
    """Return text without a terminal's control characters."""
    return "".join(char if char.isprintable() else "�" for char in text)
