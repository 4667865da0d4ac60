"""The lines of ``kvrouter up`` on standard output: what it serves, and which engines have joined."""

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import AsyncIterable, Sequence
from contextlib import suppress

from kvrouter.api.fleet_schema import ExpectedEngine, ExpectedState
from kvrouter.fleetfile.fleet_file import ENGINES_OWN, FleetFile
from kvrouter.settings.setting import installed_version

NAMED = 4
"""Engines without a worker that one line names; further ones are counted."""

_PATH = re.compile(r"^/\S*?:? ")
"""The path of an engine's page at the beginning of a reason."""

_CLAUSE_END = re.compile(r"[,:;.?] ")


def url_of(host: str, port: int) -> str:
    """Return the URL under which this host reaches what listens there."""
    shown = "127.0.0.1" if host in {"", "0.0.0.0", "::"} else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"http://{shown}:{port}"


def first_screen(urls: Sequence[str], fleet: FleetFile, expected: Sequence[ExpectedEngine] = ()) -> str:
    """Return three lines for the user who has just started it: the model, the frontends' addresses and who
    has joined, and a first call.
    """
    url = urls[0]
    at = f"{url}/v1" if len(urls) == 1 else f"{url}/v1 to {urls[-1]}/v1 ({len(urls)} frontends)"
    places = Counter[str]()
    for group in fleet.workers:
        names = [name for name in fleet.topology.levels if name in group.domains]
        places[f"{names[0]} {group.domains[names[0]]}" if names else ""] += group.n_workers
    where = ", ".join(f"{n} in {place}" for place, n in places.items() if place)
    n_workers = sum(places.values())
    workers = f"{n_workers} worker{'' if n_workers == 1 else 's'}" + (f" ({where})" if where else "")
    if expected:
        is_plain = not where and len(expected) == n_workers
        workers = engines_line(expected) if is_plain else f"{workers}, {engines_line(expected)}"
    models = _model_names(fleet, expected)
    tried = "/v1/models"
    if models:
        call = {"model": models[0], "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}
        tried = f"/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(json.dumps(call))}"
    return (
        f"kvrouter {installed_version()} serves {', '.join(models) or ENGINES_OWN} at {at}: {workers}\n"
        f"Watch it at {url}/ui, or with: kvrouter top --url {url}\n"
        f"Try it: curl {url}{tried}\n"
    )


def _model_names(fleet: FleetFile, expected: Sequence[ExpectedEngine]) -> list[str]:
    """Return the names of the models, as far as the file or an engine has said them."""
    stated = (fleet.stated_name(model) for model in fleet.models)
    told = (engine.model for engine in expected)
    return [*dict.fromkeys(name for name in (*stated, *told) if name is not None)]


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


async def write_changes(
    shown: Sequence[ExpectedEngine], states: AsyncIterable[Sequence[ExpectedEngine]]
) -> None:
    """Write a line to standard output whenever engines have joined, are refused, or are awaited again, since
    they were ``shown``.
    """
    async for now in states:
        if [engine.state for engine in now] != [engine.state for engine in shown]:
            write_text(f"{change_line(shown, now)}\n")
        shown = now


def write_text(text: str) -> None:
    """Write to standard output, which may be closed."""
    with suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()
