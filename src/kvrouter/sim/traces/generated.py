"""Generated traffic: tenants with growing sessions, arrivals and lengths by a distribution."""

from array import array
from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvrouter.core.hashing import finish64
from kvrouter.core.json import Unreadable, converted
from kvrouter.settings.problems import Document
from kvrouter.sim.traces.lines import field_first, wrong_row
from kvrouter.sim.traces.trace_request import TraceInfo, TraceRequest, Wait

PIECE_TOKENS = 64

METRONOME = 1e-6
"""A coefficient of variation below it is 0 as far as anybody sees, and its square may be no number."""

_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=100_000_000)]
Above0 = Annotated[float, Meta(ge=1e-9, le=1e9)]


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens by a lognormal law: ``mean``, ``sigma`` of the logarithm (0: always the mean), ``max``."""

    mean: Above0
    sigma: Annotated[float, Meta(ge=0, le=5)] = 0.8
    max: Count = 200_000


class Burst(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every ``every_s`` seconds arrivals are ``factor`` times as many for ``for_s`` seconds."""

    every_s: Above0
    for_s: Above0
    factor: Above0


class Generator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of traffic. New sessions and later turns together arrive ``rate_per_s`` a second.

    ``variation`` is the coefficient of variation of the time between arrivals: 1 is a Poisson process, 0 a
    metronome, more is burstier. A tenant's prompts share their first ``system_tokens`` tokens; tenants are as
    popular as Zipf's law with ``tenant_exponent`` states. With the probability ``turn_share`` a request is a
    later turn of the longest waiting session: then its prompt is the one before, that answer, and ``turn``
    tokens more. At most ``open_sessions`` go on; the oldest ends first.
    """

    requests: Count
    rate_per_s: Above0
    input: Lengths
    output: Lengths
    turn: Lengths = Lengths(400.0)
    variation: Annotated[float, Meta(ge=0, le=20)] = 1.0
    burst: Burst | None = None
    tenants: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    tenant_exponent: Annotated[float, Meta(ge=0, le=10)] = 1.0
    system_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    turn_share: Share = 0.0
    think_s: Annotated[float, Meta(ge=0, le=1e6)] = 5.0
    open_sessions: Annotated[int, Meta(ge=1, le=1_000_000)] = 1_000
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


def parse_generator(document: Document) -> Generator:
    """Return the generator that a file describes under ``generate``. Raises ConfigError that names line and
    field.
    """
    try:
        return converted(document.content["generate"], Generator)
    except Unreadable as error:
        message = field_first(str(error), within="generate.")
        line = document.line_of(tuple(message.partition(":")[0].split(".")))
        wrong_row(Path(document.name), line, message)


def generated_info(generator: Generator) -> TraceInfo:
    """Return the values of the trace."""
    return TraceInfo("generated", PIECE_TOKENS, has_sessions=generator.turn_share > 0.0)


class _Session(msgspec.Struct):
    """An open session: its prompt so far, in whole pieces, and its last request."""

    name: str
    pieces: "array[int]"
    tokens: int
    last: int


def generate(generator: Generator) -> Iterator[TraceRequest]:
    """Yield the requests, in bounded memory. The same spec gives the same ones."""
    chance = np.random.Generator(np.random.PCG64(generator.seed))
    weights = np.arange(1, generator.tenants + 1, dtype=np.float64) ** -generator.tenant_exponent
    reached = np.cumsum(weights / weights.sum())
    sessions: dict[int, _Session] = {}
    idle: list[tuple[float, int]] = []
    own = finish64(generator.seed + 1)
    at_s = 0.0
    n_sessions = 0
    for number in range(generator.requests):
        if number:
            at_s += _gap_s(generator, chance, at_s)
        output_tokens = _length(generator.output, chance)
        while idle and idle[0][1] not in sessions:
            heappop(idle)
        if idle and idle[0][0] <= at_s and chance.random() < generator.turn_share:
            _, key = heappop(idle)
            session = sessions[key]
            waits: tuple[Wait, ...] = (Wait(session.last, generator.think_s),)
            tokens = session.tokens + _length(generator.turn, chance)
        else:
            key, waits = n_sessions, ()
            n_sessions += 1
            tenant = int(np.searchsorted(reached, chance.random()))
            salt = finish64((tenant + 1) * _SPREAD & _MASK)
            n_system = generator.system_tokens // PIECE_TOKENS
            system = array("Q", _names(salt, n_system))
            session = _Session(f"s{key}", system, 0, number)
            tokens = generator.system_tokens + _length(generator.input, chance)
            if generator.turn_share:
                sessions[key] = session
                if len(sessions) > generator.open_sessions:
                    del sessions[next(iter(sessions))]
        n_pieces = -(-tokens // PIECE_TOKENS)
        pieces = session.pieces[:]
        n_new = max(0, n_pieces - len(pieces))
        pieces.frombytes(_names(own + _SPREAD & _MASK, n_new))
        own = own + n_new * _SPREAD & _MASK
        yield TraceRequest(
            number=number,
            at_s=at_s,
            input_tokens=tokens,
            output_tokens=output_tokens,
            piece_tokens=PIECE_TOKENS,
            pieces=pieces,
            session=session.name if generator.turn_share else "",
            waits=waits,
        )
        if key in sessions:
            session.pieces = pieces[: tokens // PIECE_TOKENS]
            session.tokens = tokens + output_tokens
            session.last = number
            if session.tokens < generator.input.max:
                heappush(idle, (at_s + generator.think_s, key))


def _names(first: int, n_names: int) -> bytes:
    """Return ``n_names`` names of pieces, each 64 bits, in the machine's byte order."""
    return (np.uint64(first) + np.arange(n_names, dtype=np.uint64) * np.uint64(_SPREAD)).tobytes()


def _gap_s(generator: Generator, chance: np.random.Generator, at_s: float) -> float:
    rate = generator.rate_per_s
    burst = generator.burst
    if burst is not None and at_s % burst.every_s < burst.for_s:
        rate *= burst.factor
    if generator.variation < METRONOME:
        return 1.0 / rate
    shape = generator.variation**-2
    return float(chance.gamma(shape, 1.0 / (shape * rate)))


def _length(law: Lengths, chance: np.random.Generator) -> int:
    if law.sigma == 0.0:
        return max(1, min(law.max, round(law.mean)))
    mu = np.log(law.mean) - law.sigma**2 / 2.0
    return max(1, min(law.max, int(chance.lognormal(mu, law.sigma))))
