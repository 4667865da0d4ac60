"""Laws of stop strings: the cut of the text changes nothing."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.core.errors import InvalidRequest
from kvrouter.text.model import STOP_CHARS_MAX, STOPS_MAX, StopMatcher

LETTERS = "ab^-]\n"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=STOPS_MAX)
CHUNKS = st.lists(st.text(LETTERS, max_size=6), max_size=20)


def applied_at_once(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule as it reads: the first character that completes a stop string, and the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def streamed(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = ""
    for chunk in chunks:
        text, stopped = matcher.push(chunk)
        out += text
        assert stopped == matcher.stopped
        if stopped is not None:
            assert matcher.push("more") == ("", stopped)
            break
    return out + matcher.finish(), matcher.stopped


@given(CHUNKS, STOPS)
@example(["ab", "c"], ["abcd", "bc"])
@example(["xabc"], ["bc", "abc", "c"])
def test_stop_strings_cut_streamed_text_like_the_whole_text(chunks: list[str], stops: list[str]) -> None:
    assert streamed(chunks, stops) == applied_at_once("".join(chunks), stops)


@given(CHUNKS, STOPS)
def test_only_text_that_could_begin_a_stop_string_is_held_back(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = ""
    seen = ""
    for chunk in chunks:
        text, stopped = matcher.push(chunk)
        seen += chunk
        out += text
        if stopped is not None:
            return
        held = seen[len(out) :]
        longest = max(
            (size for stop in stops for size in range(1, len(stop)) if seen.endswith(stop[:size])), default=0
        )
        assert len(held) == longest


def test_text_passes_through_unchanged_without_stop_strings() -> None:
    text = "some text"
    assert StopMatcher([]).push(text)[0] is text


@pytest.mark.parametrize("stops", [["a"] * (STOPS_MAX + 1), [""], ["ok", "x" * (STOP_CHARS_MAX + 1)]])
def test_too_many_empty_and_overlong_stops_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        StopMatcher(stops)
    assert refused.value.param == "stop"
    assert refused.value.message.startswith("stop: ")
