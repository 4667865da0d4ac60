"""Messages between router replicas: which requests run where, so that each counts the load of all.

A router numbers its :class:`Deltas` from 1. Applied in order they give the leases that it holds; a router
that missed one asks, and is sent them all as of a number. Every message carries the id of the router that it
is from, so that nobody hears itself.

:class:`LinkNews` have no number: what of them is lost is lost, and the next says how it is then.
"""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvrouter.core.events import HASH_BYTES, HashColumn
from kvrouter.core.ids import Epoch, ModelName, RequestId, RouterId, WorkerRank

DELTAS_MAX = 256
"""Deltas, or leases, in one message."""

NAMED_BLOCKS_MAX = 16_384
"""How many of a prompt's leading blocks are named. Those beyond count as load, and are shared with nobody."""

MESSAGE_BLOCKS_MAX = 65_536
"""How many blocks one message names, in about 512 KiB: a broker's usual limit is 1 MiB."""

_Count = Annotated[int, Meta(ge=0, lt=2**32)]


class LeaseName(NamedTuple):
    """Which lease of a router: one leg of one request of a model; see :class:`kvrouter.core.ids.LeaseKey`."""

    model: ModelName
    request_id: RequestId
    leg_number: int


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A leg of a request was booked at a rank, or moved there: it replaces what the name meant before.

    ``incarnation`` is the worker's: the lease is not one of a worker that comes back under the same id.
    ``block_hashes`` are those of the prompt's leading full blocks, none when its blocks are not tracked;
    sequence hashes follow from them, so that no message can name a chain that is none.
    """

    model: ModelName
    request_id: RequestId
    leg_number: _Count
    rank: WorkerRank
    incarnation: Epoch
    isl_tokens: _Count
    block_hashes: HashColumn
    prefill_tokens: _Count
    track_blocks: bool
    output_blocks: _Count = 0

    def __post_init__(self) -> None:
        if len(self.block_hashes) % HASH_BYTES or len(self.block_hashes) > HASH_BYTES * NAMED_BLOCKS_MAX:
            raise ValueError(
                f"block_hashes: a column of at most {NAMED_BLOCKS_MAX} 8-byte hashes, "
                f"not {len(self.block_hashes)} bytes"
            )

    @property
    def name(self) -> LeaseName:
        """Which lease it opens."""
        return LeaseName(self.model, self.request_id, self.leg_number)


class MarkPrefillCompleted(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The first token came: the lease's prefill is over."""

    lease: LeaseName


class Free(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The lease ended."""

    lease: LeaseName


class OutputBlocks(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """So many blocks are full of output by now, since the lease was opened."""

    lease: LeaseName
    blocks: _Count


Delta = AddRequest | MarkPrefillCompleted | Free | OutputBlocks


class Deltas(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What changed at a router, in order; ``number`` counts these messages from 1."""

    router_id: RouterId
    number: Annotated[int, Meta(ge=1)]
    deltas: Annotated[tuple[Delta, ...], Meta(max_length=DELTAS_MAX)]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The router lives; ``number`` is that of its latest deltas, after which it held so many leases."""

    router_id: RouterId
    number: Annotated[int, Meta(ge=0)]
    open_leases: _Count


class StateQuestion(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Ask for all leases: of every router, or of the one that it is sent to."""

    router_id: RouterId


class StatePart(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """One of ``n_parts`` pieces of all the leases that a router held after its deltas ``number``."""

    router_id: RouterId
    number: Annotated[int, Meta(ge=0)]
    part: _Count
    n_parts: Annotated[int, Meta(ge=1, lt=2**32)]
    leases: Annotated[tuple[AddRequest, ...], Meta(max_length=DELTAS_MAX)]


LINK_NEWS_MAX = 64
"""Transfers, and links, in one message."""

AMOUNT_MAX = 1e18
"""Seconds, bytes, and bytes a second: more than any link and any fleet have."""

LEVELS_MAX = 16
LEVEL_CHARS_MAX = 63
VALUE_CHARS_MAX = 189
_Value = Annotated[str, Meta(max_length=VALUE_CHARS_MAX)]


class LinkName(NamedTuple):
    """Which link; see :class:`kvrouter.kernel.topology.SharedLink`."""

    src: Annotated[
        tuple[tuple[Annotated[str, Meta(max_length=LEVEL_CHARS_MAX)], _Value | None], ...],
        Meta(min_length=1, max_length=LEVELS_MAX),
    ]
    dst: _Value | None


class LinkSeen(msgspec.Struct, frozen=True, array_like=True):
    """A transfer that arrived ``age_s`` ago over a link of these given figures: what it took, and would have
    taken by them. ``link`` is None where nobody knows what it shares. It is the transfer ``number`` of the
    router ``seen_by``, no matter which one passes it on.
    """

    seen_by: Annotated[RouterId, Meta(max_length=64)]
    number: Annotated[int, Meta(ge=0, le=2**63 - 1)]

    link: LinkName | None
    latency_s: float
    bandwidth_bytes_per_s: float
    age_s: float
    plain_s: float
    seen_s: float

    def __post_init__(self) -> None:
        _check_amounts(self.latency_s, self.age_s, self.plain_s, self.seen_s)
        _check_amounts(self.bandwidth_bytes_per_s)
        if self.bandwidth_bytes_per_s == 0.0:
            raise ValueError("bandwidth_bytes_per_s: has to be above 0")


class LinkUse(msgspec.Struct, frozen=True, array_like=True):
    """What a router's requests put on a link, in the mean since its last message: bytes that were to travel,
    in so many transfers, and those of them that were on their way.
    """

    link: LinkName
    bytes: float
    transfers: float
    moving_bytes: float
    moving_transfers: float

    def __post_init__(self) -> None:
        _check_amounts(self.bytes, self.transfers, self.moving_bytes, self.moving_transfers)


class LinkNews(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """What a router saw of a model's links since its last message, and puts on them now. ``table`` is the
    digest of the figures that are given of links: routers that were given others learn nothing of it.
    """

    router_id: RouterId
    model: ModelName
    table: Annotated[str, Meta(max_length=64)]
    seen: Annotated[tuple[LinkSeen, ...], Meta(max_length=LINK_NEWS_MAX)] = ()
    uses: Annotated[tuple[LinkUse, ...], Meta(max_length=LINK_NEWS_MAX)] | None = None
    """None where nothing is said of that."""


def _check_amounts(*amounts: float) -> None:
    if not all(0.0 <= amount <= AMOUNT_MAX for amount in amounts):  # not a number is neither
        raise ValueError(f"amounts of links have to be from 0 to {AMOUNT_MAX:g}")


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The router ends, and its leases with it."""

    router_id: RouterId


SyncMessage = Deltas | Heartbeat | StateQuestion | StatePart | LinkNews | Goodbye
