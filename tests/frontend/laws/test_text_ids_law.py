"""The text of a prompt that cannot be read: prompts that begin alike have alike text ids."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.frontend.response_passthrough import text_ids_of

texts = st.text(st.characters(codec=None), max_size=40)
contents = texts | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3)
messages = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": contents}), max_size=4)
fields = st.recursive(
    st.none() | texts | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(texts, inner)
)


@given(messages, messages, fields)
def test_what_a_chat_adds_leaves_the_text_ids_before_it(
    chat: list[dict[str, object]], added: list[dict[str, object]], tools: object
) -> None:
    begun, whole = text_ids_of(chat, tools), text_ids_of([*chat, *added], tools)
    full = max(0, len(begun) - 1)  # the last one may be padded
    assert whole[:full] == begun[:full]
    assert len(whole) >= len(begun)


@given(texts)
def test_a_text_has_an_id_for_each_four_bytes(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    assert text_ids_of(text).tobytes().rstrip(b"\0") == data.rstrip(b"\0")
    assert len(text_ids_of(text)) == -(-len(data) // 4)
