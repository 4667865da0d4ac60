"""``kvrouter.recording.v1``: the records of a recording, one JSON object a line.

No record holds text, token ids or an id that a client chose: blocks and sessions have salted names. Times
called ``at_s`` count from the recording's start, all others from the request's arrival.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvrouter.core.workers import FORMAT_UNKNOWN, KvFormat

SCHEMA = "kvrouter.recording.v1"

Tokens = Annotated[int, Meta(ge=0, le=1 << 31)]
BlockSize = Annotated[int, Meta(ge=1, le=1 << 31)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""Thirty years at most, so that sums of decoded times stay finite."""

Moment = Annotated[float, Meta(ge=-1e9, le=1e9)]
"""Seconds relative to an event that may have been recorded a little later; may be negative."""

WORKERS_MAX = 16_384
RANKS_MAX = 4_096
"""Limits of the workers of a fleet, and of the ranks of one, the same as routers have."""

FILE_SUFFIX = ".jsonl.gz"
PART_SUFFIX = ".jsonl.gz.part"
"""The suffix of a file that is being written, or whose writer was killed."""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="header"):
    """The first line of each file. ``started_s``: when the recording began, in seconds of the Unix epoch.

    ``salt`` identifies the salt without revealing it: equal salts give blocks of two recordings equal names.
    ``part`` counts the files of a recording from 1.
    """

    schema: str = SCHEMA
    version: str
    recording: str
    part: int
    started_s: Annotated[float, Meta(ge=0, le=1e11)]
    salt: str


class Worker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker as its card describes it, without its address. ``alive`` is False while it does not answer."""

    worker: str
    model: str
    role: str
    block_size: BlockSize
    context_length: Annotated[int, Meta(ge=1, le=1 << 31)]
    dp_size: Annotated[int, Meta(ge=1, le=RANKS_MAX)] = 1
    dp_start: Tokens = 0
    kv_blocks: Count | None = None
    kv_bytes_per_token: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    domains: Mapping[str, str] = {}
    levels: tuple[str, ...] = ()
    """The domains, broadest first, if the worker reports their order."""
    taints: tuple[str, ...] = ()
    transfer_domain: str | None = None
    enforcement: str | None = None
    preferred_weight: float | None = None
    prompt_tokens_min: Count | None = None
    prompt_tokens_max: Count | None = None
    decode_only: bool = False
    kv_format: KvFormat = FORMAT_UNKNOWN
    engine: str = ""
    draining: bool = False
    engine_silent: bool = False
    alive: bool = True


class FleetChange(StrEnum):
    """The change of the workers in a fleet record."""

    ALL = "all"
    """All workers at the beginning of the file."""
    JOINED = "joined"
    CHANGED = "changed"
    LEFT = "left"
    SILENT = "silent"
    ANSWERS = "answers"


class FleetRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="fleet"):
    """The fleet at the beginning of a file, and each change of it."""

    at_s: Moment
    change: FleetChange
    workers: Annotated[tuple[Worker, ...], Meta(max_length=WORKERS_MAX)]


class Constraints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's constraints on routing. A taint that no worker carries has a salted name, ``salted:…``; a
    pin is ``worker`` or ``worker/rank``.
    """

    required_taints: tuple[str, ...] = ()
    required_decode_taints: tuple[str, ...] = ()
    preferred_taints: Mapping[str, float] = {}
    pin: str | None = None
    prefill_pin: str | None = None
    overlap_score_weight: float | None = None
    router_temperature: float | None = None
    router_mode: str | None = None


class LegRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One leg of an attempt: its worker, the expected overlap, its times. None: the event did not happen.

    ``overlap_blocks`` is the overlap that the router expected in the worker's cache; ``cached_tokens`` the
    count that the engine reported.
    """

    leg: str
    worker: str
    overlap_blocks: Count
    domains: Mapping[str, str] = {}
    candidates: Count = 0
    sent_s: Moment | None = None
    first_token_s: Moment | None = None
    last_s: Moment | None = None
    """When its last chunk came, or it was given up."""
    cached_tokens: Count | None = None


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision and its legs.

    ``kv_bytes`` is the KV sent from the prefill worker to the decode worker. Unless the decode worker's
    engine reports it, it is estimated: the prompt without the blocks expected at the decode worker, times the
    bytes per token on the prefill worker's card. None without a pair or without that figure.
    """

    shape: str
    mode: str
    placed_s: Moment
    legs: tuple[LegRecord, ...]
    constraint: str | None = None
    """The transfer policy in force, as ``required zone=a``; without the value where it is unknown."""
    fallback_used: bool = False
    cross_domain: bool = False
    last_resort: bool = False
    kv_bytes: Count | None = None
    kv_bytes_reported: bool = False
    lost: str | None = None
    """The leg that was lost; None without one."""
    kv_lost: str | None = None


class Status(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Its client left."""


class RequestRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="request"
):
    """One request, written when it ended. ``blocks`` are the salted names of the prompt's full blocks, each
    of the whole prefix up to its end: unsigned 64-bit integers, little-endian; base64 in JSON. With
    ``by_text`` the prompt's tokens were unknown: blocks and length are estimates from its text.

    ``max_tokens`` is the limit of its output tokens. ``code`` and ``http_status`` are those of the error that
    ended it; ``refusals`` counts worker ranks by the reason of their refusal.
    """

    at_s: Moment
    model: str
    input_tokens: Tokens
    output_tokens: Tokens
    max_tokens: Count
    block_size: BlockSize
    blocks: bytes
    status: Status
    route: str | None = None
    adapter: str | None = None
    media: bool = False
    by_text: bool = False
    session: str | None = None
    parent: str | None = None
    constraints: Constraints | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    first_token_s: Moment | None = None
    ended_s: Moment
    code: str | None = None
    http_status: int | None = None
    refusals: Mapping[str, int] = {}


class RefusalRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="refusal"
):
    """A call that was refused before it became a request: its length is unknown. ``model`` is None where the
    call names no served model, or was not read that far; ``route`` where not even its head was.
    """

    at_s: Moment
    code: str
    http_status: int
    route: str | None = None
    model: str | None = None


Record = Header | FleetRecord | RequestRecord | RefusalRecord
