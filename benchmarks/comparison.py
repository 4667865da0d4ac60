"""Measuring rows: each side in a process of its own, round by round in turn, so that drift hits both."""

from contextlib import ExitStack

from benchmarks.results import Line, measured
from benchmarks.rows import Row, Variant
from benchmarks.sides import Side, SideCommand


class SidesDisagree(Exception):
    """The two sides were prepared alike and say different things: a comparison would mean nothing."""


def measure_alone(row: Row, ours: SideCommand) -> list[Line]:
    """Measure every variant of ours."""
    rounds: list[list[list[float]]] = [[] for _ in row.variants]
    with Side(ours) as side:
        side.prepare(row.bench, row.params)
        for number in range(row.warm_rounds + row.rounds):
            for variant, kept in zip(row.variants, rounds, strict=True):
                samples = side.round(variant.ours, row.calls)
                if number >= row.warm_rounds:
                    kept.append(samples)
    return [_line(row, variant, kept) for variant, kept in zip(row.variants, rounds, strict=True)]


def measure_with(row: Row, ours: SideCommand, theirs: SideCommand) -> list[Line]:
    """Measure every variant of ours next to the peer's; raises :class:`SidesDisagree`."""
    our_rounds: list[list[list[float]]] = [[] for _ in row.variants]
    their_rounds: list[list[list[float]]] = [[] for _ in row.variants]
    with ExitStack() as stack:
        our_side, their_side = stack.enter_context(Side(ours)), stack.enter_context(Side(theirs))
        _check_agreement(
            row, our_side.prepare(row.bench, row.params), their_side.prepare(row.bench, row.params)
        )
        for number in range(row.warm_rounds + row.rounds):
            for at, variant in enumerate(row.variants):
                our_samples, their_samples = _round(
                    row, variant, our_side, their_side, ours_first=number % 2 == 0
                )
                if number >= row.warm_rounds:
                    our_rounds[at].append(our_samples)
                    their_rounds[at].append(their_samples)
    return [
        _line(row, variant, our_rounds[at], peer=theirs.name, their_rounds=their_rounds[at])
        for at, variant in enumerate(row.variants)
    ]


def _round(
    row: Row, variant: Variant, ours: Side, theirs: Side, *, ours_first: bool
) -> tuple[list[float], list[float]]:
    """One round of both sides; the peer has no samples where it has no such variant."""
    our_samples = ours.round(variant.ours, row.calls) if ours_first else []
    their_samples = [] if variant.theirs is None else theirs.round(variant.theirs, row.calls)
    return our_samples or ours.round(variant.ours, row.calls), their_samples


def _check_agreement(row: Row, ours: dict[str, object], theirs: dict[str, object]) -> None:
    for fact, said in ours.items():
        if theirs.get(fact) != said:
            raise SidesDisagree(f"{row.name}: {fact}: {_differing(said, theirs.get(fact))}")


def _line(
    row: Row,
    variant: Variant,
    our_rounds: list[list[float]],
    *,
    peer: str | None = None,
    their_rounds: list[list[float]] | None = None,
) -> Line:
    ours = measured(our_rounds)
    if not their_rounds or variant.theirs is None:
        return Line(row.name, variant.ours, row.unit, ours)
    theirs = measured(their_rounds)
    return Line(
        row.name,
        variant.ours,
        row.unit,
        ours,
        peer=peer,
        theirs=theirs,
        ratio=ours.p50 / theirs.p50 if theirs.p50 else None,
        wanted_ratio=variant.wanted_ratio,
    )


def _differing(ours: object, theirs: object) -> str:
    """Return the first place where two answers differ."""
    path = ""
    while isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        at = next(i for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other)
        path, ours, theirs = f"{path}[{at}]", ours[at], theirs[at]
    return f"{path} ours {ours!r}, theirs {theirs!r}"
