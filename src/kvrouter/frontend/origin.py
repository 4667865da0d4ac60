"""Where a call comes from, as a recording of traffic says it: nothing of this changes how it is served."""

from collections.abc import Iterable

from kvrouter.service.traffic import Origin

SESSION_HEADERS = (b"x-dynamo-session-id", b"x-session-id")
PARENT_HEADERS = (b"x-dynamo-parent-session-id", b"x-parent-session-id")
"""Of two for one thing, the first wins."""


def origin_of(route: str, headers: Iterable[tuple[bytes, bytes]]) -> Origin:
    """Return a call's route and the sessions that its headers name."""
    sent = {name: value.decode("latin-1").strip() for name, value in headers}
    return Origin(route, _first(sent, SESSION_HEADERS), _first(sent, PARENT_HEADERS))


def _first(sent: dict[bytes, str], names: Iterable[bytes]) -> str | None:
    return next((sent[name] for name in names if sent.get(name)), None)
