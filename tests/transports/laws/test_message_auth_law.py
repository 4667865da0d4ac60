"""The law of the seal: what was not sealed for here, whole, with this token, does not open."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvrouter.core.errors import ProtocolError
from kvrouter.transports.message_auth import MESSAGE_AUTH_BYTES, MessageAuth, ReplayGuard

TOKENS = st.text(max_size=20)
BODIES = st.binary(max_size=200)
NUMBERS = st.integers(min_value=0, max_value=2**64 - 1)
SEAL = MessageAuth("t0p", "events 1 ns")


def refused(seal: MessageAuth, subject: str, message: bytes) -> bool:
    with pytest.raises(ProtocolError) as error:
        seal.opened(subject, message)
    return error.value.param == "token"


@given(TOKENS, TOKENS, st.text(), BODIES, NUMBERS)
def test_sealed_message_opens_with_its_number_and_body(
    token: str, purpose: str, subject: str, body: bytes, number: int
) -> None:
    message = MessageAuth(token, purpose).seal(subject, body, number=number)
    assert len(message) == MESSAGE_AUTH_BYTES + len(body)
    opened = MessageAuth(token, purpose).numbered(subject, memoryview(message))
    assert (opened[0], bytes(opened[1])) == (number, body)


@given(st.text(), BODIES, NUMBERS, st.data())
def test_message_with_one_changed_byte_is_refused(
    subject: str, body: bytes, number: int, data: st.DataObject
) -> None:
    message = bytearray(SEAL.seal(subject, body, number=number))
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] ^= data.draw(st.integers(1, 255))
    assert refused(SEAL, subject, bytes(message))


@given(st.text(), BODIES, st.data())
def test_truncated_or_extended_message_is_refused(subject: str, body: bytes, data: st.DataObject) -> None:
    message = SEAL.seal(subject, body)
    assert refused(SEAL, subject, message[: data.draw(st.integers(0, len(message) - 1))])
    assert refused(SEAL, subject, message + data.draw(st.binary(min_size=1, max_size=9)))


@given(st.text(), st.text(), BODIES)
def test_message_sealed_for_another_subject_is_refused(subject: str, other: str, body: bytes) -> None:
    assume(other != subject)
    assert refused(SEAL, other, SEAL.seal(subject, body))


@given(TOKENS, TOKENS, BODIES)
def test_message_sealed_with_another_token_or_purpose_is_refused(one: str, other: str, body: bytes) -> None:
    assume(one != other)
    assert refused(MessageAuth(other, "p"), "s", MessageAuth(one, "p").seal("s", body))
    assert refused(MessageAuth("t0p", other), "s", MessageAuth("t0p", one).seal("s", body))


@given(BODIES)
def test_random_bytes_are_refused(garbage: bytes) -> None:
    assert refused(SEAL, "s", garbage)


@given(st.binary(min_size=1, max_size=20), st.data())
def test_message_with_bytes_moved_from_body_to_subject_is_refused(body: bytes, data: st.DataObject) -> None:
    """What moved from the body into the subject is another message."""
    text = body.hex()
    cut = data.draw(st.integers(0, len(text) - 1))
    message = SEAL.seal(text[:cut], text[cut:].encode())
    moved = message[:MESSAGE_AUTH_BYTES] + text[cut + 1 :].encode()
    assert refused(SEAL, text[: cut + 1], moved)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9))))
def test_replay_guard_takes_each_number_once_and_in_order(said: list[tuple[str, int]]) -> None:
    newest = ReplayGuard()
    taken: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for sender, number in said:
        is_new = number > max(taken[sender], default=0)
        assert newest.takes(sender, number) == is_new
        if is_new:
            taken[sender].append(number)


def test_replay_guard_forgets_the_least_recently_heard_sender() -> None:
    newest = ReplayGuard(remembered_max=2)
    for sender, number in (("a", 5), ("b", 5), ("a", 6), ("c", 5)):
        assert newest.takes(sender, number)
    assert not newest.takes("a", 6)
    assert not newest.takes("c", 5)
    assert newest.takes("b", 5)
