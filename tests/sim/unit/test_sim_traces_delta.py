"""Mooncake's rows that have only what a turn adds: prompts grow by it and by the answers between."""

from array import array
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.cli import main
from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.read import open_trace
from kvrouter.sim.traces.trace_request import Pieces, TraceRequest, Wait
from tests.testing.trace_rows import dialogue, lines


def test_delta_prompt_is_the_last_prompt_its_answer_and_the_new_turn(
    write_trace: Callable[[bytes], Path],
) -> None:
    content = lines(
        dialogue("s", 700, [1, 2], timestamp=2_000),
        dialogue("s", 100, [3], delay=250),
        dialogue("t", 600, [1, 9], timestamp=1_500),
        dialogue("s", 1_024, [4, 5], delay=750),
    )
    trace = open_trace(write_trace(content), trace_format="mooncake-delta")
    assert (trace.info.format, trace.info.piece_tokens) == ("mooncake-delta", 512)
    assert (trace.info.has_sessions, trace.info.has_times) == (True, False)
    for _ in range(2):
        other, first, second, third = trace
        assert [row.input_tokens for row in (other, first, second, third)] == [600, 700, 805, 1_834]
        assert [row.line for row in (other, first, second, third)] == [3, 1, 2, 4]
        assert [row.waits for row in (first, second, third)] == [(), (Wait(1, 0.25),), (Wait(2, 0.75),)]
        assert first.pieces == array("Q", [1, 2])
        assert (second.pieces[0], len(second.pieces)) == (1, 2)
        assert (third.pieces[0], len(third.pieces)) == (1, 4)
        assert not {2, 3, 4, 5, second.pieces[1]} & set(third.pieces[1:])


def test_whole_blocks_of_a_delta_prompt_keep_their_names(
    write_trace: Callable[[bytes], Path],
) -> None:
    def turns(session: str) -> list[dict[str, Any]]:
        first = {**dialogue(session, 1_024, [1, 2], timestamp=0), "output_length": 512}
        return [first, dialogue(session, 512, [9], delay=1)]

    content = lines(*turns("s"), *turns("t"))
    first, other, second, of_other = open_trace(write_trace(content), trace_format="mooncake-delta")
    assert first.pieces == other.pieces == array("Q", [1, 2])
    assert [second.pieces[n] for n in (0, 1, 3)] == [1, 2, 9]
    assert second.pieces[2] != of_other.pieces[2], "nobody says that two answers are the same"


def test_answers_of_different_sessions_have_different_pieces(write_trace: Callable[[bytes], Path]) -> None:
    rows = [
        {**dialogue(session, 412, [n], **times), "output_length": 700}
        for session in "st"
        for n, times in ((1, {"timestamp": 0}), (2, {"delay": 1}), (3, {"delay": 1}))
    ]
    trace = list(open_trace(write_trace(lines(*rows)), trace_format="mooncake-delta"))
    one, other = trace[-2:]
    assert one.input_tokens == 3 * 412 + 2 * 700
    assert one.pieces[5] == other.pieces[5], "the end of the last block that was added"
    assert len({*one.pieces, *other.pieces}) == 11


class Turn(NamedTuple):
    """Tokens that are the same in all sessions, then its own; and the answer's."""

    shared: int
    own: int
    output: int


def tokens_of(turn: Turn, session: int, number: int) -> list[object]:
    return [*(("shared", n) for n in range(turn.shared)), *((session, number, n) for n in range(turn.own))]


def both_forms(sessions: list[list[Turn]], block_size: int) -> tuple[bytes, bytes]:
    """The same sessions as whole prompts, their blocks named with all before them, and as what is added."""
    names: dict[object, int] = {}
    whole: list[dict[str, Any]] = []
    added: list[dict[str, Any]] = []

    def name(content: tuple[object, ...]) -> int:
        return names.setdefault(content, len(names))

    for number, turns in enumerate(sessions):
        said: list[object] = []
        for place, turn in enumerate(turns):
            tokens = tokens_of(turn, number, place)
            said += tokens
            for rows, prompt, is_whole in ((whole, said, True), (added, tokens, False)):
                ends = range(block_size, len(prompt) + block_size, block_size)
                ids = [name(tuple(prompt[0 if is_whole else end - block_size : end])) for end in ends]
                row = dialogue(
                    str(number), len(prompt), ids, **{"delay" if place else "timestamp": 7.0 * number}
                )
                rows.append({**row, "output_length": turn.output})
            said += [(number, place, "answer", n) for n in range(turn.output)]
    sized = dialogue("sized", 9 * block_size + 1, list(range(10**6, 10**6 + 10)), timestamp=0.0)
    return lines(sized, *whole), lines(sized, *added)


def common(one: Pieces, other: Pieces) -> int:
    """How many pieces two prompts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (name, its) in enumerate(pairs) if name != its), min(len(one), len(other)))


@given(
    sessions=st.lists(
        st.lists(
            st.builds(Turn, st.integers(0, 70), st.integers(1, 40), st.integers(1, 40)),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=4,
    ),
    block_size=st.sampled_from([16, 32]),
)
def test_delta_rows_read_back_as_the_same_whole_prompts(
    scratch_trace: Path, sessions: list[list[Turn]], block_size: int
) -> None:
    read: list[list[TraceRequest]] = []
    whole, added = both_forms(sessions, block_size)
    scratch_trace.write_bytes(whole)
    read.append(list(open_trace(scratch_trace, trace_format="mooncake")))
    scratch_trace.write_bytes(added)
    read.append(list(open_trace(scratch_trace, trace_format="mooncake-delta")))
    for one, other in zip(*read, strict=True):
        assert one.piece_tokens == other.piece_tokens == block_size
        assert (one.number, one.line, one.session) == (other.number, other.line, other.session)
        assert (one.at_s, one.waits) == (other.at_s, other.waits)
        assert (one.input_tokens, one.output_tokens) == (other.input_tokens, other.output_tokens)
        assert len(one.pieces) == len(other.pieces)
    for (one, other), (grown, grown_other) in zip(*(combinations(rows, 2) for rows in read), strict=True):
        assert common(one.pieces, other.pieces) == common(grown.pieces, grown_other.pieces)


def test_delta_prompt_with_too_many_tokens_is_refused(
    write_trace: Callable[[bytes], Path],
) -> None:
    sized = dialogue("n", 9, list(range(9)), timestamp=0)
    rows = [{**dialogue("s", 1, [1], timestamp=0), "output_length": 1 << 31}, dialogue("s", 1, [1], delay=1)]
    path = write_trace(lines(sized, *rows))
    trace = open_trace(path, trace_format="mooncake-delta")
    assert trace.info.piece_tokens == 1
    with pytest.raises(ConfigError, match=rf"{path}:3: input_length: .* 2147483650 tokens, and 4194304 is"):
        list(trace)


def test_delta_trace_is_replayed_from_the_command_line(
    write_trace: Callable[[bytes], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [dialogue("s", 700, [1, 2], timestamp=0), dialogue("s", 300, [3], delay=250)]
    path = write_trace(lines(*rows))
    assert main(["replay", str(path), "--dispatch", "closed"]) == 2
    assert "--trace-format mooncake-delta (what a turn adds)" in " ".join(capsys.readouterr().err.split())
    assert main(["replay", str(path), "--dispatch", "closed", "--trace-format", "mooncake-delta"]) == 0
    assert "mooncake-delta, dispatched closed loop" in " ".join(capsys.readouterr().out.split())
