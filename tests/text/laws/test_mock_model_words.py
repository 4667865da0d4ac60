"""Laws of the mock model's words."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.text.model import FIRST_WORD_ID, mock_words
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(MOCK_FOLDER)
NUMBERS = st.lists(st.integers(0, len(mock_words()) - 1), max_size=200)
BEFORE = st.sampled_from(["", "\n", "<|im_start|>user\n", "<|im_end|>", "end.", "\t", "ok?\n\n", "7", "你好"])
AFTER = st.sampled_from(["", "\n", "<|im_end|>\n", ".", ", ", " ", "7", "!\n"])


def joined(numbers: list[int]) -> str:
    return "".join(f" {mock_words()[number]}" for number in numbers)


@given(NUMBERS)
def test_mock_words_encode_to_one_token_each(numbers: list[int]) -> None:
    assert list(TOKENIZER.encode(joined(numbers))) == [FIRST_WORD_ID + number for number in numbers]


@given(NUMBERS.filter(bool), BEFORE, AFTER)
def test_mock_words_encode_to_the_same_tokens_in_any_context(
    numbers: list[int], before: str, after: str
) -> None:
    expected = [*TOKENIZER.encode(before), *(FIRST_WORD_ID + number for number in numbers)]
    assert list(TOKENIZER.encode(before + joined(numbers) + after)) == expected + list(
        TOKENIZER.encode(after)
    )
