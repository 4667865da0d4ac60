"""The lines of ``kvrouter up`` that count the engines that have joined, and name those that have not."""

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvrouter.api.fleet_schema import ExpectedEngine, ExpectedState

if TYPE_CHECKING:
    from kvrouter.app.attach.attached_fleet import AttachedFleet

NAMED = 4
"""Engines without a worker that one line names; further ones are counted."""

_PATH = re.compile(r"^/\S*?:? ")
"""The path of an engine's page at the beginning of a reason."""

_CLAUSE_END = re.compile(r"[,:;] ")


def engines_line(expected: Sequence[ExpectedEngine]) -> str:
    """Return how many engines have joined, and which ones are waited for or refused, and why."""
    missing = [engine for engine in expected if engine.state != ExpectedState.JOINED]
    n = len(expected)
    count = f"{n - len(missing)} of {n} engine{'' if n == 1 else 's'}"
    if not missing:
        return count
    shown = []
    for state, verb in ((ExpectedState.REFUSED, "refused:"), (ExpectedState.AWAITED, "waiting for")):
        of_state = [engine for engine in missing if engine.state == state]
        named = [f"{engine.engine_url} ({_brief(engine)})" for engine in of_state[:NAMED]]
        more = [f"{len(of_state) - NAMED} more"] if len(of_state) > NAMED else []
        shown += [f"{verb} {', '.join((*named, *more))}"] if named else []
    return ", ".join((count, *shown))


def _brief(engine: ExpectedEngine) -> str:
    """Return the reason: whole of a refusal, and the first clause of one that passes by itself."""
    reason = engine.reason or "no reason is known"
    if engine.state == ExpectedState.REFUSED:
        return reason
    return _CLAUSE_END.split(_PATH.sub("", reason), maxsplit=1)[0]


def change_line(before: Sequence[ExpectedEngine], now: Sequence[ExpectedEngine]) -> str:
    """Return who joined since ``before``, and how many have."""
    joined_before = {engine.worker_id for engine in before if engine.state == ExpectedState.JOINED}
    joined = [
        str(engine.engine_url)
        for engine in now
        if engine.state == ExpectedState.JOINED and engine.worker_id not in joined_before
    ]
    more = f" and {len(joined) - NAMED} more" if len(joined) > NAMED else ""
    who = f"{', '.join(joined[:NAMED])}{more} joined: " if joined else ""
    return f"{who}{engines_line(now)}"


async def write_changes(attached: "AttachedFleet") -> None:
    """Write a line to standard output whenever engines join, are refused, or are awaited again; until
    cancelled.
    """
    before = attached.expected()
    while True:
        await attached.changed.wait()
        attached.changed.clear()
        now = attached.expected()
        if [engine.state for engine in now] != [engine.state for engine in before]:
            write_text(f"{change_line(before, now)}\n")
        before = now


def write_text(text: str) -> None:
    """Write to standard output, which may be closed."""
    with suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()
