"""What an API server warns of in its answers."""

import string

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.kube.client import WARNING_CHARS_MAX, WARNINGS_MAX, warnings_in

TEXTS = st.text(string.printable.replace("\r", "").replace("\n", ""), max_size=2 * WARNING_CHARS_MAX)


def quoted(text: str) -> str:
    """As an API server writes it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'299 - "{escaped}"'


@given(st.lists(TEXTS, max_size=3 * WARNINGS_MAX))
def test_warnings_are_decoded_deduplicated_and_limited(texts: list[str]) -> None:
    found = warnings_in([quoted(text) for text in texts])
    read = ["".join(c if c.isprintable() else " " for c in text[:WARNING_CHARS_MAX]) for text in texts]
    assert found == [*dict.fromkeys(read)][:WARNINGS_MAX]
    together = ", ".join(quoted(text) for text in texts)
    assert warnings_in([together]) == found


@given(st.lists(TEXTS))
def test_any_warning_header_is_parsed_without_error(headers: list[str]) -> None:
    assert all(len(text) <= WARNING_CHARS_MAX for text in warnings_in(headers))
