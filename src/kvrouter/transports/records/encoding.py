"""The JSON of worker cards and cordons in every store."""

import operator
import re
import reprlib

import msgspec

from kvrouter.core.cordon_rules import CORDONS_MAX, Cordon, checked_cordon, cordon_digest
from kvrouter.core.errors import ConfigError, InvalidRequest, ProtocolError
from kvrouter.core.ids import WORKER_IDS, Epoch
from kvrouter.core.json import decoded
from kvrouter.core.workers import ModelType, WorkerCard
from kvrouter.transports.records.store import RecordKind

RECORD_MAX_BYTES = 260 * 1024
"""The largest card record that is read, lease and replaced incarnations included."""

CORDON_MAX_BYTES = 16 * 1024
"""The largest cordon record that is read."""

WORKERS_MAX = 16_384
"""How many worker records one process reads and follows; an excess is reported."""

LEASE_MAX_S = 3600.0
"""The longest lease that a record may ask for."""

DP_RANKS_MAX = 4096
"""The most data-parallel ranks of one card: it limits what a card makes a router allocate."""

INTEGERS = 2**63
"""Integers of a card are below this: stores and readers keep them in signed 64 bits."""

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")


class CardRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stored record of one worker id.

    The card expires after ``lease_s`` seconds without a renewal. ``replaced`` are the earlier incarnations,
    newest first: a worker that finds its own there was replaced for good. ``withdrawn`` marks that the worker
    left; the record stays for a while, so that a missing record is never taken for a withdrawal.
    """

    card: WorkerCard
    lease_s: float
    replaced: tuple[Epoch, ...] = ()
    withdrawn: bool = False


def checked_namespace(namespace: str) -> str:
    """Return ``namespace``; raise ConfigError unless it can be a folder, a subject and a bucket."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"namespace: 1 to 64 letters, digits, '_' and '-', not {namespace[:80]!r}", param="namespace"
        )
    return namespace


def checked_lease(lease_s: float) -> float:
    """Return ``lease_s``, in seconds; raise ConfigError when it is out of range."""
    if not 0 < lease_s <= LEASE_MAX_S:
        raise ConfigError(f"lease_s: more than 0 and at most {LEASE_MAX_S:g}, not {lease_s}", param="lease_s")
    return lease_s


def encode_record(record: CardRecord) -> bytes:
    """Return ``record`` as JSON."""
    return _encoder.encode(record)


def decode_record(text: bytes) -> CardRecord:
    """Return the record in ``text``; raise ProtocolError that names the field."""
    if len(text) > RECORD_MAX_BYTES:
        raise ProtocolError(f"record: {len(text)} bytes are more than {RECORD_MAX_BYTES}", param="record")
    record = decoded(_decoder, text, "record")
    if not 0 < record.lease_s <= LEASE_MAX_S:
        raise ProtocolError(f"lease_s: at most {LEASE_MAX_S:g}, not {record.lease_s}", param="lease_s")
    _check(record.card)
    return record


def decode_cordon(text: bytes) -> Cordon:
    """Return the cordon in ``text``; raise ProtocolError that names the field."""
    if len(text) > CORDON_MAX_BYTES:
        raise ProtocolError(f"cordon: {len(text)} bytes are more than {CORDON_MAX_BYTES}", param="cordon")
    try:
        return checked_cordon(decoded(_cordon_decoder, text, "cordon"))
    except InvalidRequest as error:
        raise ProtocolError(error.message, param=error.param) from error


def _check(card: WorkerCard) -> None:
    """Raise ProtocolError for numbers that no worker may have: readers of cards rely on these ranges."""
    config = card.runtime_config
    for name, number, least, most in (
        ("worker_id", card.worker_id, 0, WORKER_IDS - 1),
        ("dp_size", card.dp_size, 1, DP_RANKS_MAX),
        ("dp_start", card.dp_start, 0, INTEGERS - DP_RANKS_MAX),
        ("block_size", card.block_size, 1, INTEGERS - 1),
        ("context_length", card.context_length, 1, INTEGERS - 1),
        ("total_kv_blocks", config.total_kv_blocks, 0, INTEGERS - 1),
        ("kv_bytes_per_token", config.kv_bytes_per_token, 0, INTEGERS - 1),
        ("max_num_seqs", config.max_num_seqs, 0, INTEGERS - 1),
        ("max_num_batched_tokens", config.max_num_batched_tokens, 0, INTEGERS - 1),
        ("prompt_tokens_min", config.prompt_tokens_min, 0, INTEGERS - 1),
        ("prompt_tokens_max", config.prompt_tokens_max, 0, INTEGERS - 1),
        ("bootstrap_port", config.bootstrap_port, 0, 65535),
    ):
        if number is not None and not least <= number <= most:
            raise ProtocolError(f"{name}: {least} to {most}, not {reprlib.repr(number)}", param=name)


def _pack(value: object) -> object:
    if isinstance(value, ModelType):
        return value.value
    raise NotImplementedError(f"a {type(value).__name__} does not travel")


def _unpack(kind: type, value: object) -> object:
    if kind is ModelType and isinstance(value, int) and not isinstance(value, bool):
        return ModelType(value)
    raise ValueError(f"{value!r} is no {kind.__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_pack)
_decoder = msgspec.json.Decoder(CardRecord, dec_hook=_unpack)
_cordon_decoder = msgspec.json.Decoder(Cordon)

CARDS = RecordKind(
    name="worker",
    key=re.compile(r"0|[1-9][0-9]{0,18}"),
    key_of=lambda record: str(record.card.worker_id),
    describe=lambda record: f"card of worker {record.card.worker_id}",
    param="worker_id",
    encode=encode_record,
    decode=decode_record,
    continues=lambda held, record: held.card.incarnation == record.card.incarnation,
    bytes_max=RECORD_MAX_BYTES,
    records_max=WORKERS_MAX,
)
"""The records of workers: their keys are worker ids."""

CORDONS = RecordKind(
    name="cordon",
    key=re.compile(r"[0-9a-f]{32}"),
    key_of=lambda cordon: cordon_digest(cordon.level, cordon.name, cordon.source),
    describe=lambda cordon: f"cordon of {cordon.place}",
    param="name",
    encode=_encoder.encode,
    decode=decode_cordon,
    continues=operator.eq,
    bytes_max=CORDON_MAX_BYTES,
    records_max=CORDONS_MAX,
)
"""The records of cordons: their keys are digests of level, name and source."""
