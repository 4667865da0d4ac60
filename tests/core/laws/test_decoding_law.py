"""Whatever bytes come, a decoder gives a value or one error."""

import json
from contextlib import suppress

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.json import UNSCANNED_BYTES, Decoder, Unreadable, parsed
from kvrouter.engines.openai.answer_events import AnswerEvent
from kvrouter.transports.records.encoding import CardRecord

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "token_ids", "usage", "card", "kv_transfer_params"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)
TEXTS = st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode())
DECODERS: list[Decoder[object]] = [
    msgspec.json.Decoder(AnswerEvent),
    msgspec.json.Decoder(dict[str, msgspec.Raw]),
    msgspec.json.Decoder(object),
    msgspec.json.Decoder(CardRecord),
]


@given(TEXTS, st.binary(max_size=4), st.integers(0, 200), st.booleans())
def test_decoders_give_a_value_or_unreadable_for_any_bytes(
    text: bytes, other: bytes, at: int, is_long: bool
) -> None:
    data = text[:at] + other + text[at + len(other) :]
    if is_long:  # those are scanned first
        data += b" " * UNSCANNED_BYTES
    for decoder in DECODERS:
        with suppress(Unreadable):
            parsed(decoder, data)


@given(VALUES)
def test_long_scanned_text_decodes_like_short_text(value: object) -> None:
    """The scan refuses nothing that a decoder takes, within the bounds."""
    text = json.dumps(value).encode()
    for decoder in DECODERS:
        found = []
        for data in (text, b" " * UNSCANNED_BYTES + text):
            try:
                found.append(("value", parsed(decoder, data)))
            except Unreadable:
                found.append(("refused", None))
        assert found[0] == found[1]
