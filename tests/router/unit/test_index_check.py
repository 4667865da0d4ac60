"""The index is checked against what engines say that they had cached."""

import pytest

from kvrouter.core.ids import Slot
from kvrouter.router.index_check import (
    SPAN_S,
    WINDOW_ANSWERS,
    AnswerCounts,
    Compared,
    IndexCheck,
    Prediction,
)

SLOT = Slot(3)
BLOCK = 16


def compared(
    errors_blocks: list[int],
    *,
    check: IndexCheck | None = None,
    spread_s: float = SPAN_S,
    begun_s: float = 0.0,
) -> list[Compared]:
    """What is said of answers whose prediction was so many blocks too high."""
    check = check or IndexCheck(block_size=BLOCK)
    each_s = spread_s / (WINDOW_ANSWERS - 1)
    said = [
        check.note(
            SLOT,
            predicted_tokens=(10 + error) * BLOCK,
            cached_tokens=10 * BLOCK,
            isl_tokens=100 * BLOCK,
            prompt_tokens=None,
            now_s=begun_s + number * each_s,
        )
        for number, error in enumerate(errors_blocks)
    ]
    return [each for each in said if each is not None]


def noted(
    errors_blocks: list[int],
    *,
    check: IndexCheck | None = None,
    spread_s: float = SPAN_S,
    begun_s: float = 0.0,
) -> list[AnswerCounts | None]:
    """The verdicts on these answers."""
    said = compared(errors_blocks, check=check, spread_s=spread_s, begun_s=begun_s)
    return [each.wrong for each in said]


@pytest.mark.parametrize("error", [4, -4])
def test_a_window_of_wrong_predictions_is_reported_once(error: int) -> None:
    verdicts = noted([error] * WINDOW_ANSWERS)
    assert verdicts[:-1] == [None] * (WINDOW_ANSWERS - 1)
    assert verdicts[-1] == AnswerCounts(WINDOW_ANSWERS, WINDOW_ANSWERS, float(error), SPAN_S)


def test_a_verdict_needs_half_of_the_answers_wrong() -> None:
    half = WINDOW_ANSWERS // 2
    assert noted([0] * half + [3] * half)[-1] == AnswerCounts(WINDOW_ANSWERS, half, 1.5, SPAN_S)
    assert noted([0] * (half + 1) + [3] * (half - 1))[-1] is None


@pytest.mark.parametrize("error", [0, 1, -1])
def test_a_prediction_off_by_one_block_is_not_wrong(error: int) -> None:
    assert not any(noted([error] * WINDOW_ANSWERS))


def test_a_burst_of_wrong_predictions_gives_no_verdict() -> None:
    assert not any(noted([-9] * WINDOW_ANSWERS, spread_s=SPAN_S - 0.1))


def test_a_second_verdict_needs_a_whole_new_window() -> None:
    check = IndexCheck(block_size=BLOCK)
    assert noted([4] * WINDOW_ANSWERS, check=check)[-1] is not None
    verdicts = noted([4] * WINDOW_ANSWERS, check=check, begun_s=2 * SPAN_S)
    assert verdicts[:-1] == [None] * (WINDOW_ANSWERS - 1)
    assert verdicts[-1] is not None


def test_answers_without_a_prediction_do_not_hide_wrong_predictions() -> None:
    check = IndexCheck(block_size=BLOCK)
    verdicts = []
    for number in range(2 * WINDOW_ANSWERS):
        predicted = 8 * BLOCK if number % 2 else 0
        verdicts.append(
            check.note(
                SLOT,
                predicted_tokens=predicted,
                cached_tokens=0,
                isl_tokens=100 * BLOCK,
                prompt_tokens=None,
                now_s=number,
            )
        )
    assert verdicts[::2] == [None] * WINDOW_ANSWERS
    assert any(each is not None and each.wrong for each in verdicts)


def test_each_answer_has_its_own_prediction_result() -> None:
    said = [each.prediction for each in compared([0, 1, -1, 2, -2])]
    right = Prediction.RIGHT
    assert said == [right, right, right, Prediction.TOO_MANY, Prediction.TOO_FEW]


def counted(check: IndexCheck) -> tuple[int, int, float]:
    last = check.last_answers(SLOT)
    assert last is not None
    return last.n_answers, last.n_wrong, last.mean_error_blocks


def test_the_last_answers_are_kept_after_a_verdict_until_the_slot_is_freed() -> None:
    check = IndexCheck(block_size=BLOCK)
    assert check.last_answers(SLOT) is None
    compared([0, 0, 0, -4], check=check)
    assert counted(check) == (4, 1, -1.0)
    assert noted([4] * WINDOW_ANSWERS, check=check)[-1] is not None
    assert counted(check) == (WINDOW_ANSWERS, WINDOW_ANSWERS, 4.0)
    compared([0] * (WINDOW_ANSWERS // 2), check=check)
    assert counted(check) == (WINDOW_ANSWERS, WINDOW_ANSWERS // 2, 2.0)
    check.freed(SLOT)
    assert check.last_answers(SLOT) is None


def test_answers_with_another_prompt_length_are_not_compared() -> None:
    check = IndexCheck(block_size=BLOCK)
    for number in range(2 * WINDOW_ANSWERS):
        said = check.note(
            SLOT,
            predicted_tokens=0,
            cached_tokens=9 * BLOCK,
            isl_tokens=10 * BLOCK,
            prompt_tokens=10 * BLOCK + 1,
            now_s=number * SPAN_S,
        )
        assert said == Compared(Prediction.OTHER_PROMPT, None)
    assert check.last_answers(SLOT) is None
