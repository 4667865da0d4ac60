"""The names of answers' blocks, by the prompts of the turns that follow them.

No trace names the blocks of an answer, but the prompt of the next turn holds them, and an engine that
generated the answer has them cached. The blocks that follow a prompt in its next turn's are taken to be its
answer's: a request is that turn if it waits for the answer, begins with all full pieces of the prompt, and
has room for the answer.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import structs

from kvrouter.sim.traces.trace_request import TraceRequest

NOTE = (
    "engines have answers cached: the blocks that follow a prompt in the next turn's are taken to be its "
    "answer's, where there is room for it"
)


def with_named_answers(trace: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Yield the requests, whose pieces go on with those of their answers where a next turn has them. The
    trace is held whole.

    The last piece of a prompt, if it is not full, becomes the next turn's, except where another prompt has
    the same pieces: the two would no longer be alike.
    """
    rows = list(trace)
    alike = Counter(row.pieces.tobytes() for row in rows)
    named: dict[int, TraceRequest] = {}
    for turn in rows:
        for wait in turn.waits:
            before = rows[wait.number]
            if wait.for_arrival or wait.number in named or not _goes_on(before, turn):
                continue
            if len(before.pieces) == _n_full(before) or alike[before.pieces.tobytes()] == 1:
                named[wait.number] = _named(before, turn)
    for row in rows:
        yield named.get(row.number) or structs.replace(row, named_tokens=row.input_tokens)


def _n_full(row: TraceRequest) -> int:
    return row.input_tokens // row.piece_tokens


def _goes_on(before: TraceRequest, turn: TraceRequest) -> bool:
    n_full = _n_full(before)
    has_room = turn.input_tokens >= before.input_tokens + before.output_tokens
    return before.has_answer and n_full > 0 and has_room and turn.pieces[:n_full] == before.pieces[:n_full]


def _named(before: TraceRequest, turn: TraceRequest) -> TraceRequest:
    piece_tokens = turn.piece_tokens
    tokens = min(before.input_tokens + before.output_tokens, len(turn.pieces) * piece_tokens)
    return structs.replace(before, pieces=turn.pieces[: -(-tokens // piece_tokens)], named_tokens=tokens)
