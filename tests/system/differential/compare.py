"""What differs between an answer of the engine alone and the same through kvrouter."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.system.differential.vllm_answers import Asked


@dataclass(frozen=True)
class Observed:
    """An answer as a client sees it: what chunks it came in does not count."""

    status: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """A header's values, joined; None where it is absent."""
        values = [value for found, value in self.headers if found == name]
        return ", ".join(values) if values else None


@dataclass(frozen=True)
class Seen:
    """One way of a call: its answer, and what the engines were asked for it."""

    answer: Observed
    asked: Sequence[Asked]


@dataclass(frozen=True)
class Found:
    """One field that differs. A header that is absent is None."""

    field: str
    alone: str | bytes | None
    through: str | bytes | None


def differences(alone: Seen, through: Seen) -> Iterator[Found]:
    """Yield every field that differs: the status, each header, the body, and what the engine was asked."""
    if alone.answer.status != through.answer.status:
        yield Found("status", alone.answer.status, through.answer.status)
    names = {name for name, _ in (*alone.answer.headers, *through.answer.headers)}
    for name in sorted(names):
        values = alone.answer.header(name), through.answer.header(name)
        if values[0] != values[1]:
            yield Found(f"header {name}", *values)
    if alone.answer.body != through.answer.body:
        yield Found("body", alone.answer.body, through.answer.body)
    if len(alone.asked) != len(through.asked):
        yield Found("times asked", str(len(alone.asked)), str(len(through.asked)))
    for asked in through.asked:
        yield from _asked_otherwise(alone.asked[0], asked) if alone.asked else ()


def _asked_otherwise(alone: Asked, through: Asked) -> Iterator[Found]:
    if alone.target != through.target or alone.method != through.method:
        yield Found("asked route", f"{alone.method} {alone.target}", f"{through.method} {through.target}")
    if _as_read(alone.body) != _as_read(through.body):
        yield Found("asked body", alone.body, through.body)


def _as_read(body: bytes) -> object:
    """A body as an engine reads it: every number as it is written, every field in its order, and of a name
    that is there twice the last one.
    """
    try:
        return json.loads(body, parse_float=str, parse_int=str, object_pairs_hook=_fields)
    except ValueError:
        return body


def _fields(pairs: list[tuple[str, object]]) -> object:
    return tuple(dict(pairs).items())
