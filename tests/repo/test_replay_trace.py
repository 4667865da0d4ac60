"""Conversations are found in a trace, and the sample in the repository is what its page says."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.http_replay.trace import (
    BlockId,
    SampleRow,
    TraceRow,
    find_conversations,
    read_sample,
    read_trace,
    select_sample,
    write_sample,
)
from scripts.select_trace_sample import SAMPLE, figures


def row(
    input_tokens: int, block_ids: list[int], *, output_tokens: int = 10, timestamp_ms: int = 0
) -> TraceRow:
    return TraceRow(timestamp_ms, input_tokens, output_tokens, tuple(map(BlockId, block_ids)))


def test_rows_continuing_an_earlier_rows_full_blocks_are_linked() -> None:
    rows = [
        row(1100, [0, 1, 2]),
        row(1100, [0, 7, 8]),
        row(1700, [0, 1, 3, 4]),
        row(2200, [0, 1, 3, 5, 6]),
    ]
    assert find_conversations(rows) == [(0, 2, 3), (1,)]


def test_a_block_shared_by_all_rows_links_no_rows() -> None:
    assert find_conversations([row(600, [0, 1]), row(1200, [0, 2, 3])]) == [(0,), (1,)]


def test_a_partial_last_block_does_not_prevent_a_link() -> None:
    rows = [row(1030, [0, 1, 2]), row(1600, [0, 1, 9, 10])]
    assert find_conversations(rows) == [(0, 1)]


def test_rows_are_linked_by_their_longest_prefix() -> None:
    rows = [row(1024, [0, 1]), row(1536, [0, 1, 2]), row(2048, [0, 1, 2, 3])]
    assert find_conversations(rows) == [(0, 1, 2)]


def test_forking_conversations_are_left_out() -> None:
    rows = [row(1024, [0, 1]), row(1536, [0, 1, 2]), row(1536, [0, 1, 3]), row(1024, [0, 5])]
    assert find_conversations(rows) == [(3,)]


def test_a_turn_shorter_than_its_history_is_no_conversation() -> None:
    assert find_conversations([row(1024, [0, 1], output_tokens=600), row(1536, [0, 1, 2])]) == []


def conversation(first_block: int, turns: int) -> list[TraceRow]:
    return [
        row(512 * (2 + turn), [0, *range(first_block, first_block + turn + 1)], timestamp_ms=turn)
        for turn in range(turns)
    ]


def test_a_sample_is_whole_ordered_conversations_of_the_asked_length() -> None:
    rows = sorted(
        (each for number in range(12) for each in conversation(1000 * (number + 1), 3 + number % 4)),
        key=lambda each: each.timestamp_ms,
    )
    sample = select_sample(rows, rows_wanted=13, turns_min=4, turns_max=5)
    assert len(sample) == 13
    assert [each.timestamp_ms for each in sample] == sorted(each.timestamp_ms for each in sample)
    for number in {each.conversation for each in sample}:
        turns = [each.turn for each in sample if each.conversation == number]
        assert turns == list(range(len(turns)))
        assert 4 <= len(turns) <= 5
    assert sample == select_sample(rows, rows_wanted=13, turns_min=4, turns_max=5)


def test_too_few_conversations_are_an_error_with_the_missing_rows() -> None:
    with pytest.raises(ValueError, match="6 are missing"):
        select_sample(conversation(1000, 4), rows_wanted=10)


def test_a_sample_is_read_back_as_written(tmp_path: Path) -> None:
    sample = select_sample(conversation(1000, 4), rows_wanted=4)
    write_sample(tmp_path / "sample.jsonl", sample)
    assert read_sample(tmp_path / "sample.jsonl") == sample
    assert [each.block_ids for each in read_trace(tmp_path / "sample.jsonl")] == [
        each.block_ids for each in sample
    ]


def test_an_invalid_trace_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 1, "input_length": 2}\n')
    with pytest.raises(msgspec.ValidationError, match="output_length"):
        read_trace(tmp_path / "trace.jsonl")


@pytest.fixture(scope="module")
def sample() -> list[SampleRow]:
    return read_sample(SAMPLE)


def test_the_repositorys_sample_is_whole_conversations(sample: list[SampleRow]) -> None:
    assert len(sample) == 300
    found = {tuple(turns) for turns in find_conversations(sample)}
    listed: dict[int, list[int]] = {}
    for number, each in enumerate(sample):
        listed.setdefault(each.conversation, []).append(number)
        assert each.turn == len(listed[each.conversation]) - 1
    assert found == {tuple(turns) for turns in listed.values()}
    assert all(4 <= len(turns) <= 12 for turns in listed.values())


def test_the_samples_page_has_its_figures(sample: list[SampleRow]) -> None:
    page = (SAMPLE.parent / "README.md").read_text(encoding="utf-8")
    for name, value in figures(sample).items():
        assert f"| {name} | {value} |" in page
