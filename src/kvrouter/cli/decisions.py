"""``kvrouter explain --request-id ID``: draw where a request went, attempt by attempt."""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.cli.client import decode_answer
from kvrouter.cli.explain import CROSSED, LAST_RESORT, Constraint, draw_transfer, number_text


class Pick(msgspec.Struct, frozen=True):
    """The worker rank that took one leg, with the parts of its cost; ``candidates`` could have."""

    worker_id: int
    dp_rank: int
    overlap_blocks: int
    prefill_blocks: float
    decode_blocks: float
    transfer_blocks: float
    multiplier: float
    cost: float
    candidates: int


class Attempt(msgspec.Struct, frozen=True):
    """One decision. ``decided_at`` is in seconds since 1970; without ``decode`` prefill alone was decided."""

    attempt: int
    decided_at: float
    mode: str
    prefill: Pick | None
    decode: Pick | None
    constraint: Constraint | None
    fallback_used: bool
    cross_domain: bool
    last_resort: bool = False


class Decisions(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/decisions/{request_id}``."""

    request_id: str
    attempts: Sequence[Attempt]


def read_decisions(answer: bytes) -> Decisions:
    """Decode a router's answer; raise AskFailed when it is another program's."""
    return decode_answer(answer, Decisions)


def draw_decisions(decisions: Decisions, console: Console) -> None:
    """Print a table for each decision, and how KV was to be moved."""
    counted = "1 decision" if len(decisions.attempts) == 1 else f"{len(decisions.attempts)} decisions"
    console.print(Text.assemble((decisions.request_id, "bold"), f", {counted}"))
    for attempt in decisions.attempts:
        console.print(_table(attempt))
        draw_transfer(attempt.constraint, console)
        if attempt.fallback_used:
            console.print(Text(CROSSED, "yellow"))
        elif attempt.cross_domain:
            console.print(
                Text("The handoff is not known to stay in its domain, which is preferred.", "yellow")
            )
        if attempt.last_resort:
            console.print(Text(LAST_RESORT, "yellow"))


def _table(attempt: Attempt) -> Table:
    moment = datetime.fromtimestamp(attempt.decided_at, UTC).isoformat(timespec="milliseconds")
    table = Table(
        title=Text(f"Attempt {attempt.attempt}, mode {attempt.mode}, {moment.removesuffix('+00:00')}Z"),
        title_justify="left",
        title_style="bold",
        header_style="bold",
    )
    for name in ("leg", "worker"):
        table.add_column(name)
    for name in ("overlap", "prefill", "decode", "transfer", "×", "cost", "candidates"):
        table.add_column(name, justify="right")
    whole = "decode" if attempt.prefill is not None else "whole"
    for leg, pick in (("prefill", attempt.prefill), (whole, attempt.decode)):
        if pick is not None:
            table.add_row(*map(Text, _cells(leg, pick)), style="bold green")
    return table


def _cells(leg: str, pick: Pick) -> list[str]:
    blocks = (pick.prefill_blocks, pick.decode_blocks, pick.transfer_blocks)
    return [
        leg,
        f"{pick.worker_id}/{pick.dp_rank}",
        str(pick.overlap_blocks),
        *map(number_text, (*blocks, pick.multiplier, pick.cost)),
        str(pick.candidates),
    ]
