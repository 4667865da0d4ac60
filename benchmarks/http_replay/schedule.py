"""When each request of the sample is due: conversations arrive on their own, turns wait for their answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.http_replay.synthesis import prompt_text, scaled_tokens
from benchmarks.http_replay.trace import SampleRow


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the replay; ``due_s`` counts from the start, in the fleet's time.

    A turn is sent when it is due, and not before the answer to the turn before it has come.
    """

    conversation: int
    turn: int
    due_s: float
    prompt: str
    output_tokens: int


def plan(
    rows: Sequence[SampleRow], *, compression: float, words: Sequence[str]
) -> list[list[PlannedRequest]]:
    """The conversations of the rows, each a list of turns in order.

    ``compression`` is how many seconds of the trace pass in one second of the fleet's time.
    """
    conversations: dict[int, list[PlannedRequest]] = {}
    for row in rows:
        turns = conversations.setdefault(row.conversation, [])
        turns.append(
            PlannedRequest(
                conversation=row.conversation,
                turn=row.turn,
                due_s=(row.timestamp_ms - rows[0].timestamp_ms) / 1000 / compression,
                prompt=prompt_text(row, words),
                output_tokens=scaled_tokens(row.output_tokens),
            )
        )
    return list(conversations.values())


def first_rows(rows: Sequence[SampleRow], rows_max: int) -> list[SampleRow]:
    """At most so many rows: whole conversations, the earliest first, in order of time."""
    turns: dict[int, int] = {}
    for row in rows:
        turns[row.conversation] = turns.get(row.conversation, 0) + 1
    kept: set[int] = set()
    rows_left = rows_max
    for conversation, count in turns.items():
        if count > rows_left:
            break
        kept.add(conversation)
        rows_left -= count
    return [row for row in rows if row.conversation in kept]
