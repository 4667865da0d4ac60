"""The rows of both tables: what is measured, in how many calls, and the ratio that is wanted."""

from dataclasses import dataclass

import click

FRONT_DOOR = "front door"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of measuring a row. ``theirs`` names the peer's way when it has one to set next to ours."""

    ours: str
    theirs: str | None = None
    wanted_ratio: float | None = None
    """Ours over theirs, at most."""


@dataclass(frozen=True, slots=True)
class Row:
    """One bench with its parameters; each row has fresh processes."""

    name: str
    bench: str
    params: dict[str, int]
    unit: str
    variants: tuple[Variant, ...]
    calls: int = 200
    """Calls a round."""

    rounds: int = 7
    warm_rounds: int = 1
    """Rounds before those, which do not count."""


# A list is the form that Dynamo takes fastest, so ours is set next to it whatever form ours has.
DECIDE = (
    Variant("decide, buffer", "decide, list", 0.1),
    Variant("decide, list", "decide, list"),
    Variant("decide, book and free, buffer", "decide, book and free, list", 0.1),
)


def decision_row(n_workers: int) -> Row:
    """The whole decision for a fleet of ``n_workers``."""
    return Row(
        name=f"decision, 8,192 tokens, {n_workers:,} ranks",
        bench="decision",
        params={"n_workers": n_workers},
        unit="µs",
        variants=DECIDE,
    )


def memory_row(*, shared: bool) -> Row:
    """The bytes of a held block; what is measured once has one call and one round."""
    return Row(
        name=f"memory, 2 M blocks, {'all hold the same' if shared else 'each its own'}",
        bench="memory",
        params={"n_workers": 16, "n_blocks": 2_000_000, "shared": int(shared)},
        unit="bytes/block",
        variants=(Variant("held", "held", 0.5), Variant("dropped", "dropped")),
        calls=1,
        rounds=1,
        warm_rounds=0,
    )


ROWS = (
    decision_row(16),
    decision_row(256),
    decision_row(1000),
    Row(
        name="hash, 8,192 tokens",
        bench="hash",
        params={"isl_tokens": 8192},
        unit="µs",
        variants=(
            Variant("buffer", "list", 0.1),
            Variant("list", "list"),
            Variant("prompt, buffer"),
            Variant("prompt, list"),
        ),
    ),
    Row(
        name="overlap, 128 blocks, 16 ranks, 2 M blocks held",
        bench="overlap",
        params={"n_blocks": 2_000_000, "n_shared": 512},
        unit="µs",
        variants=(
            Variant("shared", "shared", 0.2),
            Variant("one", "one", 0.2),
            Variant("nobody", "nobody", 0.2),
        ),
    ),
    Row(
        name="apply stored events",
        bench="apply",
        params={"n_workers": 16},
        unit="ns/block",
        variants=(
            Variant("128", "128"),
            Variant("16", "16"),
            Variant("1", "1"),
            Variant("128, from bytes", "128"),
            Variant("1, from bytes", "1"),
        ),
        calls=400,
        rounds=5,
    ),
    memory_row(shared=False),
    memory_row(shared=True),
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a run measures."""

    rows: tuple[Row, ...]
    front_door: bool


def choose(only: str | None) -> Chosen:
    """Choose what has ``only`` in its name, everything when it is None; raises UsageError for nothing."""
    rows = tuple(row for row in ROWS if only is None or only in row.name)
    front_door = only is None or only in FRONT_DOOR
    if not rows and not front_door:
        names = "; ".join((*(row.name for row in ROWS), FRONT_DOOR))
        raise click.UsageError(f"--only: no row's name has {only!r} in it; there are: {names}")
    return Chosen(rows, front_door)
