"""``kvrouter explain``: prints a decision as tables, for a prompt or a request id, with its reasons."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.api.decision_schema import (
    Attempt,
    Candidate,
    Constraint,
    Decisions,
    Explanation,
    Leg,
    Legs,
    Pick,
    Times,
)

ROWS_MAX = 50
"""Candidates that a table shows; ``--output json`` has them all."""

CROSSED = "The handoff crosses its domain: no decode worker was left in it."

CANDIDATES_DROPPED = "The other candidates of this decision are kept no longer."

LAST_RESORT = "Nobody else was left: workers that failed again and again may take it too."


def draw(explanation: Explanation, console: Console) -> None:
    """Print the decision: a refusal's error, the request, a table for each leg, and how KV is moved."""
    if explanation.error is not None:
        console.print(Text(f"{explanation.error.code}: {explanation.error.message}", "bold red"))
    console.print(
        Text.assemble(
            (explanation.model, "bold"),
            f", {explanation.isl_tokens} tokens, {explanation.blocks} blocks, mode {explanation.mode}",
        )
    )
    columns: list[Column] = []
    _draw_legs(explanation, columns, console)
    draw_transfer(explanation.constraint, console)
    if explanation.fallback_used:
        console.print(Text(CROSSED, "yellow"))
    if explanation.last_resort:
        console.print(Text(LAST_RESORT, "yellow"))
    _print_legend(columns, console)


def draw_transfer(constraint: Constraint | None, console: Console) -> None:
    """Print the prefill worker's constraint on the handoff; nothing without one."""
    if constraint is not None:
        value = constraint.value or "unknown"
        console.print(f"KV transfer: {constraint.enforcement} {constraint.domain}={value}", markup=False)


def _ordered(leg: Leg) -> list[Candidate]:
    """Return the candidates: the chosen one, then the eligible ones by cost, then the refused ones."""
    return sorted(
        leg.candidates,
        key=lambda row: (
            not row.chosen,
            not row.eligible,
            row.cost if row.cost is not None else 0.0,
            row.reason or "",
            row.worker_id,
            row.dp_rank,
        ),
    )


class Column(NamedTuple):
    """A column of a table: its name and unit, and its meaning in the legend, if it needs one."""

    name: str
    unit: str = ""
    meaning: str = ""

    @property
    def header(self) -> str:
        """The name, and the unit below it."""
        return f"{self.name}\n{self.unit}" if self.unit else self.name


CHOSEN, LEG, WORKER, WHERE, OUTCOME = map(Column, ("", "leg", "worker", "where", ""))
MULTIPLIER = Column("×", meaning="what preferred taints and transfer domains multiply the cost by")
BLOCKS = (
    Column("overlap", "blocks", "those of the prompt that are cached there"),
    Column("prefill", "blocks", "those to compute there, with those that are queued"),
    Column("decode", "blocks", "those that running requests hold there, with this request's"),
    Column("transfer", "blocks", "seconds that the KV travels, times --kv-transfer-weight"),
    MULTIPLIER,
)
BLOCKS_COST = Column(
    "cost",
    meaning="lower wins: (prefill + decode + transfer) in blocks, times ×; prefill is weighed by "
    "--kv-overlap-score-weight. Under --router-cost lmetric: tokens to compute times requests there",
)
TIME_COST = Column(
    "cost",
    "ms",
    "lower wins: TTFT and for others, times ×; queue and prefill are weighed by --kv-overlap-score-weight",
)
TIMED = (
    Column("queue", "ms", "until what is queued there is computed"),
    Column("prefill", "ms", "for what is not cached of the prompt"),
    Column("memory", "ms", "until there is room for its blocks"),
    Column("transfer", "ms", "for its KV, over the link of the pair"),
    Column(
        "= TTFT", "ms", "queue + prefill + memory + transfer: this leg's part of the time to the first token"
    ),
    Column(
        "for others", "ms", "slower decode steps, longer waits and lost cache of others, and the link's price"
    ),
)
"""The columns behind the blocks if a leg's cost is time."""

PAIR = Column("pair", "ms", "cost of the whole request, together with the worker beside it")
PARTNER = Column("with")
CANDIDATES = Column("candidates", meaning="how many ranks it was picked from")
TEXTS = (CHOSEN, LEG, WORKER, WHERE, PARTNER, OUTCOME)
WHOLE = (CHOSEN, LEG, WORKER, PARTNER, OUTCOME)
"""Columns that are never cut, however narrow the terminal: ids, and why a worker is refused."""


def _print_legend(shown: Sequence[Column], console: Console) -> None:
    """Print what each of these columns means, once."""
    for column in (*BLOCKS, BLOCKS_COST, TIME_COST, *TIMED, PAIR, CANDIDATES):
        if column in shown:
            console.print(Text(f"{f'{column.name} {column.unit}'.strip()}: {column.meaning}", "dim"))


def _draw_legs(legs: Explanation | Legs, columns: list[Column], console: Console) -> None:
    """Print a table for each leg, with a row for each candidate; add their columns to ``columns``."""
    for title, leg in (
        ("Prefill", legs.prefill),
        ("Decode" if legs.prefill is not None else "Worker", legs.decode),
        ("Prefill on the decode worker", legs.local_prefill),
    ):
        if leg is not None:
            console.print(_table(title, leg, columns))
            rest = _rest(leg)
            if rest:
                console.print(Text(rest, "dim"))


def _table(title: str, leg: Leg, columns: list[Column]) -> Table:
    """Return the table of a leg; add its columns to ``columns``."""
    table = Table(
        title=Text(f"{title}: {_chosen(leg)}"), title_justify="left", title_style="bold", header_style="bold"
    )
    timed = any(row.times is not None for row in leg.candidates)
    together = any(row.pair_cost is not None for row in leg.candidates)
    of_table = [CHOSEN, WORKER, WHERE, *BLOCKS, TIME_COST if timed else BLOCKS_COST]
    of_table += [*(TIMED if timed else ()), *((PAIR, PARTNER) if together else ()), OUTCOME]
    rows, styles = [], []
    for row in _ordered(leg)[:ROWS_MAX]:
        styles.append("bold green" if row.chosen else ("" if row.eligible else "dim"))
        blocks = (row.prefill_blocks, row.decode_blocks, row.transfer_blocks)
        numbers = (*blocks, row.multiplier, _cost_shown(row.cost, row.times))
        cells = [
            "→" if row.chosen else "",
            f"{row.worker_id}/{row.dp_rank}",
            " ".join(f"{domain}={value}" for domain, value in row.domains.items()),
            str(row.overlap_blocks),
            *map(number_text, numbers),
            *(_times_cells(row.times) if timed else ()),
            *(_pair_cells(row) if together else ()),
            "chosen" if row.chosen else (row.reason or ""),
        ]
        rows.append(cells)
    columns += _fill(table, of_table, rows, styles, timed=timed)
    return table


def _fill(
    table: Table,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str],
    *,
    timed: bool,
) -> list[Column]:
    """Add the columns and the rows; if times are shown, without empty columns. Return the shown columns."""
    shown = [
        at for at, column in enumerate(columns) if not (timed and _is_idle(column, [row[at] for row in rows]))
    ]
    for at in shown:
        column = columns[at]
        justify: Literal["left", "right"] = "left" if column in TEXTS else "right"
        table.add_column(column.header, justify=justify, no_wrap=column in WHOLE)
    for cells, style in zip(rows, styles, strict=True):
        table.add_row(*(Text(cells[at]) for at in shown), style=style)
    return [columns[at] for at in shown]


def _is_idle(column: Column, cells: Sequence[str]) -> bool:
    """Whether a column of numbers is empty: there are many if times are shown."""
    nothing = {"1", ""} if column is MULTIPLIER else {"0", "0.0", ""}
    return column not in (*TEXTS, BLOCKS[0]) and set(cells) <= nothing


def _pair_cells(row: Candidate) -> list[str]:
    """Return the cost of the whole request with the other rank of the pair, and that rank."""
    if row.pair_cost is None:
        return ["", ""]
    partner = "itself" if row.partner is None else f"{row.partner.worker_id}/{row.partner.dp_rank}"
    return [f"{1e3 * row.pair_cost:.1f}", partner]


def _times_cells(times: Times | None) -> list[str]:
    if times is None:
        return [""] * len(TIMED)
    own = (times.queue_ms, times.prefill_ms, times.memory_ms, times.transfer_ms, times.expected_ms)
    others_ms = times.decode_ms + times.others_ms + times.turnover_ms + times.price_ms
    return [f"{part:.1f}" for part in (*own, others_ms)]


def _cost_shown(cost: float | None, times: Times | None) -> float | None:
    """The cost as tables show it: in milliseconds where it is a time."""
    return cost if cost is None or times is None else 1e3 * cost


def _chosen(leg: Leg) -> str:
    if leg.chosen is None:
        eligible = sum(row.eligible for row in leg.candidates)
        return f"nobody, {eligible} of {len(leg.candidates)} eligible"
    return f"{leg.chosen.worker_id}/{leg.chosen.dp_rank}"


def number_text(number: float | None) -> str:
    """Return a number of blocks, short; empty for None."""
    return "" if number is None else f"{number:.2f}".rstrip("0").rstrip(".")


def _rest(leg: Leg) -> str:
    rest = _ordered(leg)[ROWS_MAX:]
    if not rest:
        return ""
    counts = Counter("eligible" if row.eligible else str(row.reason) for row in rest)
    return f"… and {len(rest)} more: " + ", ".join(
        f"{reason} {count}" for reason, count in sorted(counts.items())
    )


def draw_decisions(decisions: Decisions, console: Console) -> None:
    """Print the candidates of each decision, those that lost too, and how KV was to be moved; the picks alone
    where the router keeps the candidates no longer.
    """
    counted = "1 decision" if len(decisions.attempts) == 1 else f"{len(decisions.attempts)} decisions"
    console.print(Text.assemble((decisions.request_id, "bold"), f", {counted}"))
    columns: list[Column] = []
    for attempt in decisions.attempts:
        moment = datetime.fromtimestamp(attempt.decided_at, UTC).isoformat(timespec="milliseconds")
        at = f"Attempt {attempt.attempt}, mode {attempt.mode}, {moment.removesuffix('+00:00')}Z"
        console.print(Text(at, "bold"))
        if attempt.error is not None:
            console.print(Text(f"{attempt.error.code}: {attempt.error.message}", "bold red"))
        if attempt.table is not None:
            _draw_legs(attempt.table, columns, console)
        elif attempt.error is None:
            console.print(_picks_table(attempt, columns))
            console.print(Text(CANDIDATES_DROPPED, "dim"))
        if attempt.pair_cost is not None:
            console.print(f"Together: {1e3 * attempt.pair_cost:.1f} ms", markup=False)
        draw_transfer(attempt.constraint, console)
        if attempt.fallback_used:
            console.print(Text(CROSSED, "yellow"))
        elif attempt.cross_domain:
            console.print(
                Text("The handoff is not known to stay in its domain, which is preferred.", "yellow")
            )
        if attempt.last_resort:
            console.print(Text(LAST_RESORT, "yellow"))
    _print_legend(columns, console)


def _picks_table(attempt: Attempt, columns: list[Column]) -> Table:
    """Return the table of what was picked; add its columns to ``columns``."""
    table = Table(header_style="bold")
    timed = any(pick is not None and pick.times is not None for pick in (attempt.prefill, attempt.decode))
    cost = TIME_COST if timed else BLOCKS_COST
    of_table = (LEG, WORKER, *BLOCKS, cost, CANDIDATES, *(TIMED * timed))
    whole = "decode" if attempt.prefill is not None else "whole"
    rows = [
        [*_cells(leg, pick), *(_times_cells(pick.times) if timed else ())]
        for leg, pick in (("prefill", attempt.prefill), (whole, attempt.decode))
        if pick is not None
    ]
    columns += _fill(table, of_table, rows, ["bold green"] * len(rows), timed=timed)
    return table


def _cells(leg: str, pick: Pick) -> list[str]:
    blocks = (pick.prefill_blocks, pick.decode_blocks, pick.transfer_blocks)
    return [
        leg,
        f"{pick.worker_id}/{pick.dp_rank}",
        str(pick.overlap_blocks),
        *map(number_text, (*blocks, pick.multiplier, _cost_shown(pick.cost, pick.times))),
        str(pick.candidates),
    ]
