"""A metrics page: only wanted lines are read, within bounds, as Prometheus's own parser reads them."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvrouter.core.errors import ProtocolError
from kvrouter.engines.openai.metrics import (
    LINE_MAX_BYTES,
    PAGE_LINES_MAX,
    PAGE_MAX_BYTES,
    SAMPLES_MAX,
    MetricLines,
    Sample,
    read_metrics,
)

NAMES = ("a", "a:b_total")
VALUES = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**9), 10**9)
LABELS = st.dictionaries(st.sampled_from(["engine", "le", "_x1"]), st.text(max_size=8), max_size=3)
SAMPLES = st.lists(st.tuples(st.sampled_from([*NAMES, "aa", "b"]), LABELS, VALUES), max_size=6)


def written(name: str, labels: dict[str, str], value: float) -> str:
    escapes = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
    pairs = [f'{key}="{text.translate(escapes)}"' for key, text in labels.items()]
    return f"{name}{{{','.join(pairs)}}} {value!r}"


def cut(page: bytes, sizes: list[int], names: tuple[str, ...] = NAMES) -> bytes:
    lines = MetricLines(names)
    at = 0
    for size in sizes:
        lines.push(page[at : at + size])
        at += size
    lines.push(page[at:])
    return lines.page()


@given(SAMPLES, st.lists(st.integers(1, 30), max_size=8))
def test_metrics_are_read_as_prometheus_does_however_the_page_is_cut(
    samples: list[tuple[str, dict[str, str], float]], sizes: list[int]
) -> None:
    text = "".join(f"# HELP {each[0]} a\n{written(*each)}\n" for each in samples)
    expected: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families("".join(f"{written(*each)}\n" for each in samples)):
        for sample in family.samples:
            if sample.name in NAMES:
                expected.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    assert read_metrics(text.encode(), NAMES) == expected
    assert read_metrics(cut(text.encode(), sizes), NAMES) == expected


@given(st.binary(max_size=200))
def test_any_line_is_read_or_refused(line: bytes) -> None:
    try:
        read_metrics(b"a" + line, NAMES)
    except ProtocolError as error:
        assert error.param == "metrics"  # noqa: PT017 - what is not refused is fine too


@pytest.mark.parametrize("line", [b"a \n", b"a x", b'a{b="c} 1', b"a{b=c} 1", b"a{b} 1", b"a{} 1\xff"])
def test_malformed_wanted_line_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="metrics page cannot be read"):
        read_metrics(line, NAMES)


def test_nonfinite_values_are_skipped_and_timestamps_ignored() -> None:
    assert read_metrics(b'a NaN\na +Inf\na 1 1395066363000\na 2 # {x="y"} 3\n', NAMES) == {
        "a": [Sample({}, 1.0), Sample({}, 2.0)]
    }


@pytest.mark.parametrize(
    "piece",
    [
        b"a 1\n" * 16_384,
        b"\n" * 65_536,
        b"x" * 65_536,
        b"aa 1\n" * 13_107,
        b'a{b="' + b"\\" * 65_530,
    ],
)
def test_endless_page_is_read_up_to_a_limit_in_bounded_memory(piece: bytes) -> None:
    lines = MetricLines(NAMES)
    tracemalloc.start()
    pieces = 0
    while not lines.is_full:
        lines.push(piece)
        pieces += 1
        assert pieces * len(piece) <= PAGE_MAX_BYTES + len(piece)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = read_metrics(lines.page(), NAMES)
    assert sum(map(len, found.values())) <= SAMPLES_MAX
    assert peak_bytes < SAMPLES_MAX * (LINE_MAX_BYTES + 100) / 8
    assert piece.count(b"\n") * (pieces - 1) <= PAGE_LINES_MAX


def test_only_the_too_long_line_is_left_out() -> None:
    long = b'a{b="' + b"x" * LINE_MAX_BYTES * 3 + b'"} 1\n'
    for sizes in ([], [100], [LINE_MAX_BYTES, LINE_MAX_BYTES], [len(long) - 1]):
        assert cut(long + b"a 2\n", sizes) == b"a 2\n"
