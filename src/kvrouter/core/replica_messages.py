"""Messages of replica sync: each router publishes its open leases, so that all routers count the total load.

A router numbers its :class:`Deltas` from 1. Applied in order, they give the leases that it holds; a router
that missed one asks for the state and receives all leases as of a number. Every message carries its sender's
router id, so that a router ignores its own messages.

A :class:`LinkUpdate` has no number: a lost one is not repeated, and the next one has the current values.
"""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvrouter.core.events import HASH_BYTES, HashColumn
from kvrouter.core.ids import Epoch, ModelName, RequestId, RouterId, WorkerRank

DELTAS_MAX = 256
"""The most deltas, or leases, in one message."""

NAMED_BLOCKS_MAX = 16_384
"""The most leading blocks of a prompt that a message names. Further blocks count as unshared load."""

MESSAGE_BLOCKS_MAX = 65_536
"""The most blocks that one message names, in about 512 KiB: a broker's usual limit is 1 MiB."""

_Count = Annotated[int, Meta(ge=0, lt=2**32)]


class LeaseName(NamedTuple):
    """The name of a lease at its router: one leg of one request; see :class:`kvrouter.core.ids.LeaseKey`."""

    model: ModelName
    request_id: RequestId
    leg_number: int


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A leg of a request was booked at a rank, or moved there; it replaces an earlier lease of the same name.

    ``incarnation`` is the worker's: the lease does not hold for a restarted worker with the same id.
    ``block_hashes`` are those of the prompt's leading full blocks, empty when its blocks are not tracked;
    the receiver computes the sequence hashes from them, so that a message cannot name an invalid chain.
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
        """The name of the lease that it opens."""
        return LeaseName(self.model, self.request_id, self.leg_number)


class MarkPrefillCompleted(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The first token arrived: the lease's prefill is over."""

    lease: LeaseName


class Free(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The lease ended."""

    lease: LeaseName


class OutputBlocks(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The total number of blocks that output has filled since the lease was opened."""

    lease: LeaseName
    blocks: _Count


Delta = AddRequest | MarkPrefillCompleted | Free | OutputBlocks


class Deltas(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The changes of a router's leases, in order; ``number`` counts these messages from 1."""

    router_id: RouterId
    number: Annotated[int, Meta(ge=1)]
    deltas: Annotated[tuple[Delta, ...], Meta(max_length=DELTAS_MAX)]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The router is alive; ``open_leases`` counts its leases after its latest deltas, ``number``."""

    router_id: RouterId
    number: Annotated[int, Meta(ge=0)]
    open_leases: _Count


class StateQuestion(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A request for all leases, to every router or to one."""

    router_id: RouterId


class StatePart(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """One of ``n_parts`` pieces of all the leases that a router held after its deltas ``number``."""

    router_id: RouterId
    number: Annotated[int, Meta(ge=0)]
    part: _Count
    n_parts: Annotated[int, Meta(ge=1, lt=2**32)]
    leases: Annotated[tuple[AddRequest, ...], Meta(max_length=DELTAS_MAX)]


LINK_UPDATE_MAX = 64
"""The most transfers, and the most links, in one message."""

AMOUNT_MAX = 1e18
"""The upper limit of seconds, bytes and bytes a second, above the values of any link or fleet."""

LEVELS_MAX = 16
LEVEL_CHARS_MAX = 63
VALUE_CHARS_MAX = 189
_Value = Annotated[str, Meta(max_length=VALUE_CHARS_MAX)]


class LinkName(NamedTuple):
    """The name of a link; see :class:`kvrouter.kernel.topology.link_table.SharedLink`."""

    src: Annotated[
        tuple[tuple[Annotated[str, Meta(max_length=LEVEL_CHARS_MAX)], _Value | None], ...],
        Meta(min_length=1, max_length=LEVELS_MAX),
    ]
    dst: _Value | None


class LinkSample(msgspec.Struct, frozen=True, array_like=True):
    """One measured KV transfer, which arrived ``age_s`` ago. ``seen_s`` is its measured duration, ``plain_s``
    the duration by the link table's latency and bandwidth. ``link`` is None when its link is unknown.
    ``seen_by`` and ``number`` identify it, whichever router forwards it.
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
    """The mean load of a router's requests on a link since its last message: booked bytes and transfers, and
    the part of them that was being transferred (``moving_``).
    """

    link: LinkName
    bytes: float
    transfers: float
    moving_bytes: float
    moving_transfers: float

    def __post_init__(self) -> None:
        _check_amounts(self.bytes, self.transfers, self.moving_bytes, self.moving_transfers)


class LinkUpdate(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The transfers that a router measured since its last message, and its load on each link. ``table`` is
    the digest of its link table: routers with another table ignore the message.
    """

    router_id: RouterId
    model: ModelName
    table: Annotated[str, Meta(max_length=64)]
    seen: Annotated[tuple[LinkSample, ...], Meta(max_length=LINK_UPDATE_MAX)] = ()
    uses: Annotated[tuple[LinkUse, ...], Meta(max_length=LINK_UPDATE_MAX)] | None = None
    """None when the message does not report loads."""


def _check_amounts(*amounts: float) -> None:
    if not all(0.0 <= amount <= AMOUNT_MAX for amount in amounts):  # false for NaN
        raise ValueError(f"amounts of links have to be from 0 to {AMOUNT_MAX:g}")


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The router shuts down; its leases end."""

    router_id: RouterId


SyncMessage = Deltas | Heartbeat | StateQuestion | StatePart | LinkUpdate | Goodbye
