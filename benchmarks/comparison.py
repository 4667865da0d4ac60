"""Measuring rows: each side in a process of its own, round by round in turn, so that drift hits both."""

from collections.abc import Callable
from contextlib import ExitStack

from benchmarks.results import Line, measured
from benchmarks.rows import Row, Variant
from benchmarks.sides import Side, SideCommand


class SidesDisagree(Exception):
    """The two sides were prepared alike and say different things: a comparison would mean nothing."""


def measure_alone(row: Row, ours: SideCommand) -> list[Line]:
    """Measure every variant of ours."""
    lines = []
    with Side(ours) as side:
        side.prepare(row.bench, row.params)
        for variant in row.variants:
            rounds = [side.round(variant.ours, row.calls) for _ in range(row.rounds)]
            lines.append(_line(row, variant, rounds))
    return lines


def measure_beside(row: Row, ours: SideCommand, theirs: SideCommand) -> list[Line]:
    """Measure every variant of ours beside the peer's; raises :class:`SidesDisagree`."""
    with ExitStack() as stack:
        our_side, their_side = stack.enter_context(Side(ours)), stack.enter_context(Side(theirs))
        our_facts, their_facts = (
            our_side.prepare(row.bench, row.params),
            their_side.prepare(row.bench, row.params),
        )
        for fact, said in our_facts.items():
            if their_facts.get(fact) != said:
                raise SidesDisagree(f"{row.name}: {fact}: {_differing(said, their_facts.get(fact))}")
        return [_measure_variant(row, variant, our_side, their_side, theirs.name) for variant in row.variants]


def _measure_variant(row: Row, variant: Variant, our_side: Side, their_side: Side, peer: str) -> Line:
    our_rounds: list[list[float]] = []
    their_rounds: list[list[float]] = []

    def measure_ours() -> None:
        our_rounds.append(our_side.round(variant.ours, row.calls))

    def measure_theirs() -> None:
        if variant.theirs is not None:
            their_rounds.append(their_side.round(variant.theirs, row.calls))

    turns: tuple[Callable[[], None], Callable[[], None]] = (measure_ours, measure_theirs)
    for number in range(row.rounds):
        for measure in turns if number % 2 else reversed(turns):
            measure()
    return _line(row, variant, our_rounds, peer=peer, their_rounds=their_rounds)


def _line(
    row: Row,
    variant: Variant,
    our_rounds: list[list[float]],
    *,
    peer: str | None = None,
    their_rounds: list[list[float]] | None = None,
) -> Line:
    ours = measured(our_rounds)
    if not their_rounds:
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
