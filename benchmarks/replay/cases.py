"""The traces that policies are compared on, in windows: the first tunes rules, the others judge them."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from msgspec import structs

from kvrouter.sim.traces.read import open_trace
from kvrouter.sim.traces.trace_request import TraceRequest

HERE = Path(__file__).parent
DATA = HERE.parents[1] / "data"
AZURE = DATA / "azure-conversation-arrivals.csv.gz"

WINDOWS = 3
"""Of each trace: the first tunes, each of the others judges."""

LATE_S = 0.01
"""A seed delays each request by up to so much, as a network does. Most rules draw nothing, and one replay of
such a rule is one of many that its choices might have led to.
"""

CODE_ANSWER_TOKENS = 28.0

COPY_LATER_S = 7.0
"""Copies of closed sessions begin so long after each other."""


class Case(NamedTuple):
    """One trace, over workers with blocks of so many tokens.

    ``is_closed``: a turn follows the answer before it after its think time. Else requests arrive by time
    stamp.
    """

    name: str
    read: Callable[[], Iterable[TraceRequest]]
    block: int
    is_closed: bool = False


def code_service() -> Iterator[TraceRequest]:
    """Yield Azure's arrivals and prompts; every answer is as many times shorter as makes their mean 28."""
    rows = list(open_trace(AZURE))
    factor = CODE_ANSWER_TOKENS * len(rows) / sum(row.output_tokens for row in rows)
    for row in rows:
        yield structs.replace(row, output_tokens=max(1, round(row.output_tokens * factor)))


PASSAGES = 2_000
PASSAGE_PIECES = 8
PASSAGES_EACH = 6
FOLLOW_UPS = 0.05
RAG_PIECE_TOKENS = 64


def passages(requests: int = 12_000, seed: int = 0) -> Iterator[TraceRequest]:
    """Yield prompts of a piece of their own, six of 2,000 shared passages in a random order, and a question.
    Passages are as popular as Zipf's law says. One prompt in 20 begins as the one before.
    """
    chance = np.random.Generator(np.random.PCG64(seed))
    weights = np.arange(1, PASSAGES + 1, dtype=np.float64) ** -1.0
    weights /= weights.sum()
    at_s, own, head = 0.0, 1 << 40, array("Q")
    for number in range(requests):
        at_s += float(chance.exponential(0.2))
        if not head or chance.random() >= FOLLOW_UPS:
            head = array("Q", [own])
            for passage in chance.choice(PASSAGES, PASSAGES_EACH, replace=False, p=weights):
                head.extend(range(int(passage) * PASSAGE_PIECES, (int(passage) + 1) * PASSAGE_PIECES))
        n_question = int(chance.integers(1, 5))
        pieces = head + array("Q", range(own + 1, own + 1 + n_question))
        own += 1 + n_question
        yield TraceRequest(
            number=number,
            at_s=at_s,
            input_tokens=len(pieces) * RAG_PIECE_TOKENS,
            output_tokens=1 + int(chance.exponential(200.0)),
            piece_tokens=RAG_PIECE_TOKENS,
            pieces=pieces,
        )


CASES = (
    Case("conversation", partial(open_trace, DATA / "mooncake-conversation.jsonl.gz"), 512),
    Case(
        "coding agents", partial(open_trace, DATA / "agentic-coding-sessions.jsonl.gz"), 512, is_closed=True
    ),
    Case("many tenants", partial(open_trace, HERE / "tenants.yaml"), 512),
    Case("long sessions", partial(open_trace, HERE / "sessions.yaml"), 512),
    Case("code service", code_service, 64),
    Case("short chat", partial(open_trace, HERE / "chat.yaml"), 64),
    Case("shared passages", passages, 64),
)


class Rows:
    """The first rows of a window of a case's trace at one load, held, so that every replay has the same."""

    def __init__(self, case: Case, load: float, rows_max: int, window: int = 0, copies: int = 1) -> None:
        self.is_closed = case.is_closed
        self.rows = [
            structs.replace(
                row,
                at_s=row.at_s / load,
                not_before_s=row.not_before_s / load,
                waits=tuple(structs.replace(wait, think_s=wait.think_s / load) for wait in row.waits),
            )
            for row in _windows(case, copies)[window][:rows_max]
        ]
        self.piece_tokens = self.rows[0].piece_tokens
        self.half = len(self.rows) // 2
        """How many of them fill caches; figures are of the others."""

    def delayed(self, seed: int) -> list[TraceRequest]:
        """Return the rows, each as late as the seed says, of LATE_S at most."""
        draw, replace = Random(seed), structs.replace
        rows = []
        for row in self.rows:
            late_s = LATE_S * draw.random()
            waits = tuple(replace(wait, think_s=wait.think_s + late_s) for wait in row.waits)
            moments = {"at_s": row.at_s + late_s, "not_before_s": row.not_before_s + late_s}
            rows.append(replace(row, waits=waits, **moments))
        return rows if self.is_closed else sorted(rows, key=lambda row: row.at_s)


@lru_cache(maxsize=WINDOWS)
def rows_of(case: Case, load: float, rows_max: int, window: int = 0, copies: int = 1) -> Rows:
    """Read the rows once in a process."""
    return Rows(case, load, rows_max, window, copies)


@lru_cache(maxsize=2)
def _windows(case: Case, copies: int) -> list[list[TraceRequest]]:
    """Cut a trace into windows: by time, or, in a closed loop, by session. There each session comes
    ``copies`` times, with contents of its own, so that a larger fleet has more of them.
    """
    rows = list(case.read())
    if not case.is_closed:
        length = len(rows) // WINDOWS
        return [_renumbered(rows[length * at : length * (at + 1)]) for at in range(WINDOWS)]
    roots = list(dict.fromkeys(_root(row) for row in rows))
    found = []
    for window in range(WINDOWS):
        chosen = set(roots[window::WINDOWS])
        of_window = [row for row in rows if _root(row) in chosen]
        found.append(
            _renumbered([_copied(row, copy, len(rows)) for row in of_window for copy in range(copies)])
        )
    return found


def _root(row: TraceRequest) -> str:
    """The session that a row, or the sub-agent that sends it, is of."""
    return row.session.partition("/")[0]


def _copied(row: TraceRequest, copy: int, n_rows: int) -> TraceRequest:
    if not copy:
        return row
    pieces = array("Q")
    pieces.frombytes((np.frombuffer(row.pieces, np.uint64) ^ np.uint64(copy << 60)).tobytes())
    return structs.replace(
        row,
        number=row.number + copy * n_rows,
        at_s=row.at_s + copy * COPY_LATER_S,
        not_before_s=row.not_before_s + copy * COPY_LATER_S if row.not_before_s else 0.0,
        session=f"{row.session}, copy {copy}",
        waits=tuple(structs.replace(wait, number=wait.number + copy * n_rows) for wait in row.waits),
        pieces=pieces,
    )


def _renumbered(rows: list[TraceRequest]) -> list[TraceRequest]:
    """Return rows in the order of arrival, counted and timed from the first; what others waited for before
    the window is no wait.
    """
    rows = sorted(rows, key=lambda row: row.at_s)
    numbers = {row.number: number for number, row in enumerate(rows)}
    begins_s = rows[0].at_s
    return [
        structs.replace(
            row,
            number=number,
            at_s=row.at_s - begins_s,
            not_before_s=max(0.0, row.not_before_s - begins_s),
            waits=tuple(
                structs.replace(wait, number=numbers[wait.number])
                for wait in row.waits
                if wait.number in numbers
            ),
        )
        for number, row in enumerate(rows)
    ]
