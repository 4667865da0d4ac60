"""A worker's card as stores keep it: JSON, so that people can read what is there."""

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.workers import ModelType, WorkerCard

CARD_MAX_BYTES = 256 * 1024
"""The largest card that is read."""


def encode_card(card: WorkerCard) -> bytes:
    """Return ``card`` as JSON."""
    return _encoder.encode(card)


def decode_card(text: bytes) -> WorkerCard:
    """Return the card in ``text``; raise ProtocolError that names the field."""
    if len(text) > CARD_MAX_BYTES:
        raise ProtocolError(f"card: {len(text)} bytes are more than {CARD_MAX_BYTES}", param="card")
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"card: {error}", param="card") from error


def _pack(value: object) -> object:
    if isinstance(value, ModelType):
        return value.value
    raise NotImplementedError(f"a {type(value).__name__} does not travel")


def _unpack(kind: type, value: object) -> object:
    if kind is ModelType and isinstance(value, int) and not isinstance(value, bool):
        return ModelType(value)
    raise ValueError(f"{value!r} is no {kind.__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_pack)
_decoder = msgspec.json.Decoder(WorkerCard, dec_hook=_unpack)
