"""The native core: hashes, the block index, the ledger, link costs, and the mock engine's scheduler.

Tokens are passed as a C-contiguous buffer of unsigned 32-bit integers (``array('I')``, a numpy ``uint32``
array, a memoryview of either; read in place) or as a sequence of ints (copied, which costs more than
hashing). A hash column is ``bytes``: unsigned 64-bit integers, little-endian, 8 bytes each. An ``out`` column
is a writable, C-contiguous buffer of unsigned 32-bit integers over slots.

A number out of range raises an error with the name of its argument; a failed allocation raises MemoryError.

Short calls keep the interpreter lock: a call of one microsecond that released it could wait milliseconds to
get it back. Big batches and ``dump`` release it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self, SupportsIndex, final, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvrouter.core.events import HashColumn, Held, KvEvent, Medium, Removed, Stored
from kvrouter.core.ids import EngineHash, LeaseId, LeaseKey, RequestId, RouterId, Slot
from kvrouter.core.requests import TokenBuffer
from kvrouter.recording.request import RequestFields
from kvrouter.telemetry.log_forms import LogValue

PredictionAsked = tuple[
    tuple[float, float, float, float, float, float, float], tuple[bool, bool, bool, bool, bool]
]
"""The input of a prediction: prompt tokens and blocks, block size, seconds of an answer, interference, weight
of overlap, now; whether the leg prefills, decodes, counts tokens, counts blocks, and delays others."""

Seconds = npt.NDArray[np.float64]

U32Buffer = Buffer | npt.NDArray[np.uint32]

@final
class JsonBounds:
    """The bounds of one JSON text.

    ``depth`` counts nested containers, ``values`` all values, ``items`` the members of one object or the
    elements of one array. Numbers in arrays of the outermost object's ``number_fields`` are token ids
    (``nvext.token_data`` is one of an object in it): they count only as ``numbers``. ``text_bytes`` bounds
    all strings that are not plain ASCII, encoded or in Python's memory, whichever is more. ``short_bytes``
    bounds each string in the outermost object's ``short_fields``, ``key_bytes`` one name, ``number_bytes``
    one number, each as encoded. ``blanks_in_row`` bounds each run of blanks outside of strings, ``blanks``
    all of them together. ``containers`` counts lists and objects. ``read_fields`` are the names that the
    decoder reads, each with whether it reads everything inside, down to ``read_depth``: elsewhere only depth,
    names, numbers and blanks are bounded. With ``takes_nan`` ``NaN``, ``Infinity`` and ``-Infinity`` are
    numbers, as for Python's own decoder.
    """

    def __new__(
        cls,
        *,
        depth: int,
        values: int,
        items: int,
        numbers: int,
        text_bytes: int,
        short_bytes: int,
        key_bytes: int,
        number_bytes: int,
        blanks_in_row: int,
        blanks: int,
        number_fields: Sequence[str],
        short_fields: Sequence[str],
        containers: int = ...,
        read_fields: Sequence[tuple[str, bool]] | None = ...,
        read_depth: int = ...,
        takes_nan: bool = ...,
    ) -> JsonBounds: ...
    def scan(self, text: bytes) -> tuple[dict[str, tuple[int, int, int, int]], int]:
        """Return the fields of the outermost object by their encoded names, the last of equal names (begin,
        end, and the characters and UTF-8 bytes of its unescaped strings), and the number of values.

        Raises :class:`kvrouter.core.json_bounds.JsonRefused`. From 64 KiB on it releases the interpreter
        lock.
        """

@final
class MsgpackBounds:
    """The bounds of one msgpack frame: ``depth`` counts nested containers, ``values`` all values, including
    keys and containers, ``containers`` arrays and maps.
    """

    def __new__(cls, *, depth: int, values: int, containers: int) -> MsgpackBounds: ...
    def scan(self, frame: bytes) -> None:
        """Raise :class:`kvrouter.core.json_bounds.JsonRefused` for a frame that exceeds the bounds, or
        announces to. Invalid msgpack is left to the decoder. From 64 KiB on it releases the interpreter lock.
        """

@final
class Prompt:
    """The hashes of one prompt: immutable, computed once, shared by all of its leases.

    ``mm_hashes[i]`` holds the hashes of the multimodal objects in full block ``i``, in any order.

    Raises ValueError (block_size below 1, a buffer that is not contiguous, mm_hashes of another length than
    n_blocks), OverflowError (an id outside 0..2**32-1), TypeError (neither ids nor a buffer of them).
    """

    def __new__(
        cls,
        tokens: U32Buffer | Sequence[int],
        *,
        block_size: int,
        seed: int = 1337,
        mm_hashes: Sequence[Sequence[int]] | None = None,
    ) -> Prompt: ...
    @staticmethod
    def from_blocks(block_hashes: bytes, *, isl_tokens: int, block_size: int) -> Prompt:
        """Make a prompt from the hashes of its leading full blocks, without its tokens.

        Further full blocks have no hashes, like a partial tail. Raises ValueError (a column that is not a
        multiple of 8 bytes, fewer tokens than blocks, more than 2**32-1 tokens, block_size below 1) or
        OverflowError.
        """
    @property
    def isl_tokens(self) -> int:
        """The number of token ids."""
    @property
    def block_size(self) -> int:
        """The tokens of a block."""
    @property
    def n_blocks(self) -> int:
        """The number of full blocks with hashes: all of them, unless made by :meth:`from_blocks`."""
    @property
    def total_blocks(self) -> int:
        """The number of blocks of the prompt, a partial tail included."""
    @property
    def block_hashes(self) -> bytes:
        """The hash of each full block's own tokens, as a column."""
    @property
    def sequence_hashes(self) -> bytes:
        """The hash of each full block chained over all blocks before it, as a column."""

def token_ids(text: bytes, begin: int) -> tuple[bytes, int]:
    """Read the JSON list of token ids that begins at ``begin``; return a u32 column, and the end of the list.

    Raises :class:`kvrouter.core.json_bounds.JsonRefused` of the kind ``token_id`` for an element that is not
    an integer from 0 to 2**32-1; its path is the element's, such as ``[3]``. From 64 KiB on it releases the
    interpreter lock.
    """

def event_text(
    event: str, fields: dict[str, LogValue], plain_max: int, quote: Callable[[str], str], /
) -> str:
    """Return the event, then ``key=value`` for each field, as a line of a log shows them.

    A text is what ``quote`` returns for it, unless it is printable ASCII of 1 to ``plain_max`` characters
    without spaces, quotes and backslashes.
    """

def pick_lowest(
    cost: Seconds,
    allowed: npt.NDArray[np.bool_] | None,
    rank_hash: npt.NDArray[np.uint64],
    request_id: RequestId,
    unseen: int,
    own_cost: float,
    /,
) -> Slot:
    """Return the ``allowed`` slot of the lowest cost, after ``unseen`` requests were added one by one to the
    cheapest, each of which adds ``own_cost``. Of equal ones the hashes of the request and the ranks choose.

    Raises ValueError if no slot is allowed, or the cost of one that is allowed is not a number.
    """

def mix64(bits: int) -> int:
    """Return splitmix64's output for the lowest 64 bits: each input bit changes each output bit half the
    time.
    """

def finish64(bits: int) -> int:
    """Return splitmix64's finisher of the lowest 64 bits, which maps 0 to 0."""

def hash_seed(*, lora_name: str | None = None, cache_namespace: str | None = None) -> int:
    """Return the seed of block hashes: 1337 [+ xxh3_64(lora_name, 0)] [+ xxh3_64(cache_namespace, 1)] mod
    2**64.

    An empty name counts as absent.
    """

def block_hashes(
    tokens: U32Buffer | Sequence[int],
    *,
    block_size: int,
    seed: int = 1337,
    mm_hashes: Sequence[Sequence[int]] | None = None,
) -> bytes:
    """Return the hash of each full block: xxh3_64 of its tokens (u32 LE), then its sorted mm_hashes (u64 LE).

    Raises the errors of Prompt.
    """

def sequence_hashes(block_hashes: bytes) -> bytes:
    """Return the chained column: s0 = h0, si = xxh3_64(s(i-1) LE, then hi LE; seed 1337).

    Raises ValueError when the column is not a multiple of 8 bytes.
    """

@final
class Applied:
    """The result of applying events; see kvrouter.kernel.index.Applied for each count."""

    @property
    def stored(self) -> int: ...
    @property
    def repeated(self) -> int: ...
    @property
    def replaced(self) -> int: ...
    @property
    def removed(self) -> int: ...
    @property
    def unknown_removed(self) -> int: ...
    @property
    def orphaned(self) -> int: ...
    @property
    def cleared(self) -> int: ...
    @property
    def over_limit(self) -> int: ...

@final
class IndexStats:
    """Sizes of a BlockIndex; see kvrouter.kernel.index.IndexStats."""

    @property
    def blocks(self) -> tuple[int, int, int, int]: ...
    @property
    def sequences(self) -> tuple[int, int, int, int]: ...
    @property
    def ranks(self) -> int: ...
    @property
    def bytes(self) -> int: ...

@final
class KvEvents(Sequence[KvEvent]):
    """KV events of mock engines in this process, or of a frame. They become Python objects only when
    accessed: :meth:`BlockIndex.apply` does not need that. They equal a tuple of the same events.
    """

    @staticmethod
    def decode(frame: Buffer) -> KvEvents | None:
        """Return the events of a msgpack array, in the form in which workers encode it; None for other bytes,
        among them those that are malformed.
        """
    @property
    def n_blocks(self) -> int:
        """The number of blocks of all events."""
    @property
    def has_cleared(self) -> bool:
        """Whether one of the events is :class:`Cleared`."""
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, at: SupportsIndex) -> KvEvent: ...
    @overload
    def __getitem__(self, at: slice) -> KvEvents: ...
    def __iter__(self) -> Iterator[KvEvent]: ...

@final
class BlockIndex:
    """The blocks that each rank holds, from KV events; it implements kvrouter.kernel.index.BlockIndex.

    An engine hash is opaque and local to its rank. A block stored n times at one (rank, medium) takes n
    removals. Two engine hashes of one rank may name the same block, which stays until both are removed. An
    engine hash that is stored again with other content names only the new content. A rank holds at most
    ``blocks_per_rank_max`` blocks per medium.

    Raises ValueError for a slot outside 0..65535, a medium outside 0..3, a malformed event.
    """

    def __new__(cls, *, blocks_per_rank_max: int = ...) -> BlockIndex: ...
    def apply(self, slot: Slot, events: Sequence[KvEvent | Held]) -> Applied:
        """Apply events of one rank, in order; it releases the interpreter lock above 4,096 blocks."""
    def drop_some(self, slot: Slot) -> Applied:
        """Remove some of the rank's blocks, a few thousand at most; none when the rank is empty."""
    def dump(self, slot: Slot) -> list[Held]:
        """Return a snapshot of the rank, at most 4,096 blocks an event, by medium and rising engine hash."""
    def dump_some(self, slot: Slot, place: int = 0) -> tuple[list[Held], int] | None:
        """Return a part of a snapshot, a few thousand blocks, and the next part's ``place``; None after the
        last.
        """
    def overlap(self, prompt: Prompt, out: U32Buffer, medium: Medium = ...) -> None:
        """Fill ``out`` with the length, in blocks, of the longest prefix of the prompt that each slot holds.

        Raises ValueError when ``out`` is shorter than the slots in use.
        """
    def held(self, slot: Slot, medium: Medium = ...) -> int:
        """Return the number of blocks that the rank holds."""
    def stats(self) -> IndexStats:
        """Return the current sizes, in time proportional to the ranks."""

@final
class ApproximateStats:
    """Sizes of an ApproximateIndex."""

    @property
    def blocks(self) -> int: ...
    @property
    def bytes(self) -> int: ...

@final
class ApproximateIndex:
    """The blocks that each rank is predicted to hold; it implements kvrouter.kernel.index.ApproximateIndex.

    Raises ValueError for a ttl_s that is not above 0, max_blocks below 1, a ratio outside 0..1, a time that
    is not finite.
    """

    def __new__(
        cls, *, ttl_s: float = 120.0, max_blocks: int = ..., prune_target_ratio: float = 0.8
    ) -> ApproximateIndex: ...
    def touch(self, slot: Slot, prompt: Prompt, now_s: float) -> None:
        """Record a decision that sends the prompt to the slot, and remove blocks as expire does."""
    def overlap(self, prompt: Prompt, out: U32Buffer, now_s: float) -> None:
        """Fill ``out`` as BlockIndex.overlap does, without expired blocks."""
    def expire(self, now_s: float) -> int:
        """Remove expired blocks, 4,096 at most; return how many this call removed."""
    def drop(self, slot: Slot) -> None:
        """Forget the slot's blocks: none counts any more, and 4,096 at most are removed now."""
    def stats(self) -> ApproximateStats:
        """Return the current sizes."""

@final
class LinkMap:
    """The links between slots, by their values of domains; see :mod:`kvrouter.kernel.routing.fleet_links` for
    the rules.

    ``domains`` are columns of value ids over slots, -1 without a value. ``order_at`` gives for each slot the
    index in ``orders`` of its worker's levels: each level is the number of its domain, and that of its link
    or None. ``pairs`` are measured links: the number of a domain, two of its value ids, the number of the
    link. ``destinations`` are the slots to which KV may be sent, ``links`` the latency in seconds, bytes per
    second and price per byte of each link; the first one is for workers that share no level. Raises
    ValueError for an unknown number.
    """

    def __new__(
        cls,
        domains: Sequence[npt.NDArray[np.int32]],
        order_at: Sequence[int],
        orders: Sequence[Sequence[tuple[int, int | None]]],
        pairs: Sequence[tuple[int, int, int, int]],
        destinations: Sequence[int],
        links: Sequence[tuple[float, float, float]],
    ) -> Self: ...
    def link(self, src: int, dst: int) -> tuple[int, int]:
        """Return the number of the link between two slots, and that of their shared link: 0 when unknown.
        IndexError for an unknown slot.
        """
    def name(self, shared: int) -> tuple[list[tuple[int, int]], int] | None:
        """Return the identity of a shared link: the numbers of domains with the value ids of the source, and
        the value id of the destination in the last of them; None for 0.
        """
    def number(self, source: Sequence[tuple[int, int]], dst: int) -> int:
        """Return the number of a shared link, given the result of :meth:`name`."""
    def state(self, src: int, dst: int) -> tuple[int, float, float, float, float]:
        """Return the number of the link between two slots, its load (bytes, and transfers), its slowness and
        its extra seconds per transfer. IndexError for an unknown slot.
        """
    def set_load(self, shared: int, kv_bytes: float, count: float) -> None:
        """Set the load of a shared link. IndexError for an unknown number."""
    def set_pace(self, shared: int, pace: tuple[float, float] | None) -> None:
        """Set the slowness and the extra seconds per transfer of a shared link; None for its kind's.
        IndexError for an unknown number.
        """
    def set_kind_pace(self, domain: int | None, within: bool, pace: tuple[float, float] | None) -> None:
        """Set the pace of all links within one value of a domain, or between two, without a separate pace;
        None for the domain: of unknown links. IndexError for an unknown domain.
        """
    def clear(self) -> None:
        """Reset all loads and paces."""
    def transfer_seconds(
        self,
        out: Seconds,
        src: int,
        overlap: npt.NDArray[np.uint32] | None,
        asked: tuple[float, float, float],
    ) -> None:
        """Fill ``out`` with the seconds of a transfer to each destination, 0 elsewhere; ``asked`` are the
        prompt tokens, tokens per block and bytes per token.
        """
    def prices(self, out: Seconds, src: int) -> None:
        """Fill ``out`` with the price of a byte to each destination, 0 elsewhere."""
    def least_pairs(
        self,
        out: Seconds,
        predictor: Predictor,
        columns: RankColumns,
        asked: tuple[PredictionAsked, PredictionAsked],
        senders: Senders,
        masks: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]],
        multipliers: tuple[Seconds | None, Seconds | None, Sequence[Seconds | None]],
        price_weight: float,
    ) -> None:
        """Fill ``out`` with the lowest cost of a pair for each slot of the first mask with a decode slot of
        the second; infinity elsewhere. ``asked`` are the two legs, ``multipliers`` those of prefill slots, of
        decode slots, and, by limit, of decode slots in a preferred domain.
        """
    def pair_costs(
        self,
        out: Seconds,
        predictor: Predictor,
        columns: RankColumns,
        asked: tuple[PredictionAsked, PredictionAsked],
        senders: Senders,
        sender: int,
        multiplier: Seconds | None,
        price_weight: float,
    ) -> None:
        """Fill ``out`` with the cost that each destination adds to a prefill slot; infinity elsewhere."""

@final
class Senders:
    """The constraints of prefill slots on their decode slots: ``limits`` are a rule (anywhere, required,
    fallback or preferred) and the numbers of a domain and a value; ``limit_of`` and ``kv_bytes_per_token``
    are columns; ``groups`` are prefill slots and the decode slots that can take their KV, empty when all can.
    """

    def __new__(
        cls,
        links: LinkMap,
        limits: Sequence[tuple[str, tuple[int, int] | None]],
        limit_of: Sequence[int],
        kv_bytes_per_token: Sequence[float],
        groups: Sequence[tuple[Sequence[int], Sequence[int]]],
    ) -> Self: ...

@final
class Predictor:
    """Predicts the time of a request at each slot; :mod:`kvrouter.kernel.routing.costs.time` has the
    formulas.

    ``timing`` has the coefficients of kvrouter.core.timing.Timing in their order. Raises ValueError for
    ``chunk_tokens`` below 1.
    """

    def __new__(
        cls,
        timing: Sequence[float],
        *,
        chunk_tokens: float,
        others_weight: float,
        later_weight: float,
        stalls_weight: float,
        turnover_weight: float,
        decode_weight: float,
    ) -> Self: ...
    def totals(
        self,
        out: npt.NDArray[np.float64],
        columns: RankColumns,
        asked: PredictionAsked,
        among: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Fill ``out`` with the cost of each slot; with infinity where ``among`` is 0.

        Raises IndexError when ``out`` has more entries than ``columns``.
        """
    def parts(
        self, slot: int, columns: RankColumns, asked: PredictionAsked
    ) -> tuple[float, float, float, float, float, float]:
        """Return the six parts of one slot; raises the errors of :meth:`totals`."""

@final
class RankColumns:
    """The input columns of predictions: overlap and blocks that are not active (uint32, or None), prefill
    tokens, active blocks, requests, waiting (int64), total blocks, seats, slowness, decode slowness,
    turnover, when the step that runs began (float64), where whole requests are placed (bool). They have at
    least ``n_slots`` entries, are C-contiguous, and must not be resized while it exists.

    Raises TypeError or ValueError that names a column of another type, or with fewer entries.
    """

    def __new__(cls, n_slots: int, columns: tuple[npt.NDArray[np.generic] | None, ...]) -> Self: ...

@final
class EngineBlocks:
    """The blocks of one rank by its engine's names for them, in each medium; at most ``max_blocks``, over all
    media. Stores are counted: a block that was stored three times is held until its third removal.
    """

    def __new__(cls, *, max_blocks: int) -> EngineBlocks: ...
    def held(self, medium: Medium, /) -> int:
        """The number of blocks in ``medium``."""
    def is_held(self, name: EngineHash, medium: Medium, /) -> bool:
        """Whether ``medium`` has the block."""
    def is_known(self, name: EngineHash, /) -> bool:
        """Whether any medium has the block."""
    def store(
        self,
        names: Sequence[EngineHash],
        parent: EngineHash | None,
        tokens: U32Buffer | Sequence[int],
        block_size: int,
        medium: Medium,
        lora_name: str | None,
        cache_salt: str | None,
        mm_hashes: Sequence[Sequence[int]] | None,
        /,
    ) -> Stored | None:
        """Store consecutive blocks; return those for which there was room, None when the parent is unknown.
        A salt also applies to the blocks after it.

        Raises ValueError unless ``tokens`` are ``block_size`` for each name.
        """
    def copy(self, name: EngineHash, medium: Medium, /) -> Stored | None:
        """Store in ``medium`` a block that is known there or elsewhere; return it, without blocks if there is
        no room, None when it or its parent is unknown.
        """
    def remove(self, names: Sequence[EngineHash], medium: Medium | None, /) -> list[Removed]:
        """Take back one store of each block, in ``medium`` or else in the first one that holds it; return
        those that were held, by medium.
        """
    def clear(self) -> None:
        """Forget all blocks."""

def engine_events(events: Buffer, events_max: int, /) -> list[tuple[str, bool, bytes]]:
    """Read a msgpack list of an engine's events; return the type of each, whether it is an array, its bytes.

    Raises ValueError with the place, such as ``[3]``, empty for the list itself, and what is wrong there.
    """

def engine_names(names: Buffer, names_max: int, /) -> tuple[EngineHash, ...]:
    """Read a msgpack list of an engine's hashes, each as ``engines.kv_events.engine_hash`` reads one.

    Raises the errors of :func:`engine_events`.
    """

def engine_tokens(
    tokens: Buffer, tokens_max: int, takes_texts: bool, /
) -> tuple[TokenBuffer, Sequence[tuple[int, str]]]:
    """Read a msgpack list of token ids; return them, and the texts among them with their places.

    With ``takes_texts`` up to 262,144 elements may be texts of at most 4,096 characters, which count as token
    0; else a list that begins with a pair of tokens may have more of them, of which the first counts. Raises
    the errors of :func:`engine_events`.
    """

class PrefixSet:
    """The blocks of all prompts so far; it is cleared for good above ``max_blocks``."""

    def __new__(cls, *, max_blocks: int) -> PrefixSet: ...
    def add(self, prompt: Prompt) -> int | None:
        """Add a prompt; return the number of its leading blocks that were already there, None once above the
        limit.
        """

@final
class RecordQueue:
    """The queue of a recording between the event loop, which adds records, and the thread that packs them.

    ``key`` are the 16 bytes from which block names are derived, ``began_s`` is the recording's start on the
    clock of all given times. Queued lines are text without block names, which are made when the lines are
    packed. The lines are numbered from 0 each time that some are taken.
    """

    def __new__(cls, *, key: bytes, began_s: float, bytes_max: int) -> RecordQueue: ...
    def add(self, line: bytes, at_s: float, bytes_max: int) -> bool:
        """Add a line of ``at_s`` seconds after the start. Return False when more than ``bytes_max`` would
        then be queued.
        """
    def add_request(self, prompt: Prompt, request: RequestFields, more: bytes, /) -> bool:
        """Add the line of a :class:`kvrouter.recording.schema.RequestRecord`; ``more`` are members of it as
        JSON, each after a comma. Return False when more than the queue's ``bytes_max`` would then be queued.

        Raises, without adding a line, when the record cannot be made: UnicodeEncodeError (half of a surrogate
        pair), ValueError (a time that is not a number), TypeError, OverflowError (above 63 bits).
        """
    def take(self) -> int:
        """Take all queued lines, and drop those taken before. Return their number."""
    def batch(self, first: int, bytes_max: int) -> tuple[int, int, float]:
        """Return, for the taken lines from ``first`` on: the end of those within ``bytes_max``, at least one
        line; the bytes that :meth:`pack` needs for them; and the first one's ``at_s``.

        Raises IndexError.
        """
    def pack(self, first: int, end: int, out: bytearray) -> tuple[int, bool]:
        """Write taken lines to ``out``, which must not be used meanwhile, without the interpreter lock.
        Return the number of bytes, and whether they are an uncompressed member of a gzip file. Otherwise the
        lines are worth compressing: less than half of them are names.

        Raises IndexError, ValueError (``out`` is too short).
        """

class ContentIndex:
    """Which slots hold which blocks, where engines name blocks by their content and no event is lost."""

    def __new__(cls) -> ContentIndex: ...
    def apply(self, slot: int, events: KvEvents) -> None:
        """Apply a rank's events in order; raises ValueError at a store whose first block has another name."""
    def drop_rank(self, slot: int) -> None:
        """Remove all blocks of a rank."""
    def overlap(self, prompt: Prompt, out: npt.NDArray[np.uint32]) -> None:
        """Fill ``out`` with the number of leading blocks that each slot holds; raises ValueError when it is
        shorter than the slots in use.
        """

class EngineRanks:
    """The schedulers of mock engines' ranks, on one clock that the caller advances; see
    kvrouter.engines.mock_engine.engine.

    Ranks and sequences are identified by the numbers that :meth:`add` and :meth:`submit` return; a sequence's
    number has its rank's in the upper 32 bits. Times are in seconds. Raises KeyError for an unknown number,
    and passes on the errors of a leg's content.
    """

    def __new__(cls) -> Self: ...
    def add(
        self,
        *,
        block_size: int,
        total_blocks: int,
        seqs_max: int,
        tokens_max: int,
        chunked_prefill: bool,
        plans_ahead: bool,
        prefix_caching: bool,
        opaque: bool,
        seed: int,
        timing: Sequence[float],
        leaps: bool,
    ) -> int:
        """Add a rank whose steps compute up to ``tokens_max`` tokens of ``seqs_max`` sequences.

        ``timing`` has the coefficients of kvrouter.core.timing.Timing in their order. With ``leaps`` only
        events that cannot wait end a :meth:`run`.
        """
    def remove(self, rank: int) -> None:
        """Remove a rank with its sequences and blocks."""
    def submit(
        self,
        now: float,
        rank: int,
        *,
        block_hashes: HashColumn,
        prompt_tokens: int,
        max_tokens: int,
        credit_tokens: int,
        may_stop: bool,
        remote_tokens: int,
        pins_kv: bool,
        content: EngineContent | None = None,
        salt: int = 0,
    ) -> int:
        """Submit a leg to a rank. ``content`` returns its further blocks, and whether its output stops;
        without it they are drawn from ``salt``. With ``pins_kv`` its KV stays when it ends, until
        :meth:`release`.
        """
    def drop(self, now: float, sequence: int) -> None:
        """End a sequence early; its last chunk reports that."""
    def release(self, now: float, sequence: int) -> None:
        """Free the pinned KV of an ended sequence."""
    def give_credit(self, now: float, sequence: int, tokens: int) -> None:
        """Allow a sequence ``tokens`` more output tokens, for which its reader has room."""
    def receive(self, now: float, sequence: int, arrived: bool) -> None:
        """Report whether the KV that a sequence waits for ``arrived``; otherwise it is computed here."""
    def catch_up(self, now: float, rank: int) -> None:
        """Execute the steps that the rank skipped and that ended before ``now``, and report all missing
        output.
        """
    def next_time(self) -> float | None:
        """Return when the next step ends or may begin; None when all ranks are idle."""
    def run(self, until: float, *, through: bool) -> float | None:
        """Execute all steps that are due before ``until`` (``through``: or at it), up to the first event that
        cannot wait; return its time. Other ranks may have further steps due at that time.
        """
    def take_notices(self) -> tuple[list[tuple[int, float, float, int, int]], list[tuple[int, int]]]:
        """Return the sequences that generated their last token (with the times of their first and last token,
        their output tokens and their cached tokens), and those with memory for the KV of so many tokens.
        """
    @property
    def has_outputs(self) -> bool:
        """Whether any rank has output since the last :meth:`take_outputs`."""
    def take_outputs(
        self, *, with_loads: bool
    ) -> list[
        tuple[
            int,
            KvEvents | None,
            tuple[int, int, int, int] | None,
            list[tuple[int, int, int | None, int]],
            list[tuple[int, float]],
        ]
    ]:
        """Return the output of each rank since the last call: its number; its KV events, if any; if changed,
        its active blocks, tokens to prefill, running and waiting requests; the sequences with output: tokens,
        cached tokens if new, and how it ended (0 not yet, 1 length, 2 stop, 3 dropped); and the sequences
        that were scheduled for the first time, with the time.
        """
    def n_waiting(self, rank: int) -> int:
        """Return the number of sequences that wait for memory or a seat."""
    def active_blocks(self, rank: int) -> int:
        """Return the number of blocks that sequences hold."""
    def cached_blocks(self, rank: int) -> int:
        """Return the number of reusable blocks, idle or held."""
    def snapshot(self, rank: int) -> KvEvents:
        """Return all cached blocks as stores, parents first."""
    def check_integrity(self, rank: int) -> list[str]:
        """Return the inconsistencies of its memory accounting, one line each."""

class EngineContent(Protocol):
    """The content of a leg, which :class:`EngineRanks` asks for hashes and the end of its output."""

    def hash_blocks(self, known: int, n_blocks: int) -> HashColumn:
        """Return the hashes of its full blocks from ``known`` to ``n_blocks``."""
    def stops(self, n_output: int) -> bool:
        """Whether the output ends with its token number ``n_output``, counted from 1."""

class PagedKv:
    """The paged KV memory of one mock engine rank, without a scheduler.

    ``opaque``: block names are drawn from ``seed``; otherwise they are derived from their content. A table is
    the list of blocks of one sequence. Raises KeyError for an unknown table, and for a commit beyond its
    blocks.
    """

    def __new__(cls, *, total_blocks: int, opaque: bool, seed: int, caching: bool = True) -> Self: ...
    @property
    def total_blocks(self) -> int:
        """The number of all blocks."""
    @property
    def free_blocks(self) -> int:
        """The number of blocks without content."""
    @property
    def idle_blocks(self) -> int:
        """The number of cached blocks that no table holds."""
    @property
    def active_blocks(self) -> int:
        """The number of blocks that tables hold."""
    @property
    def cached_blocks(self) -> int:
        """The number of reusable blocks, idle or held."""
    @property
    def n_offers(self) -> int:
        """The number of entries in the eviction heap, stale ones included."""
    def matched(self, block_hashes: HashColumn, blocks_max: int) -> int:
        """Return the number of cached leading blocks of this sequence, up to ``blocks_max``."""
    def hold(self, block_hashes: HashColumn, n_matched: int, n_private: int) -> int | None:
        """Hold the first ``n_matched`` blocks, which are cached, and allocate ``n_private`` more, evicting as
        needed. Return the table; None when they do not fit.
        """
    def can_grow(self, n_private: int) -> bool:
        """Return whether :meth:`grow` would find enough blocks."""
    def grow(self, table: int, n_private: int) -> int:
        """Allocate more blocks, evicting as needed. Return the table's number of blocks; MemoryError when no
        block can be evicted.
        """
    def commit(self, table: int, block_hashes: HashColumn, n_full: int) -> None:
        """Cache the private blocks of the table among its first ``n_full``, which are full. A block that
        another sequence cached meanwhile is shared instead, and the private one is freed.
        """
    def release(self, table: int) -> None:
        """Release the table: private blocks are freed, cached ones stay until evicted."""
    def take_events(self) -> KvEvents:
        """Return the stores and removals since the last call, in order."""
    def snapshot(self) -> KvEvents:
        """Return all cached blocks as stores, parents first."""
    def check_integrity(self, tables: Sequence[int]) -> list[str]:
        """Return the inconsistencies with ``tables``, which must be all tables."""

@final
class Column:
    """A signed 64-bit count for each slot, as a read-only buffer.

    It shows later changes until the ledger grows; then it stays unchanged, and the ledger returns a longer
    one.
    """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Ledger:
    """The load by slot; it implements kvrouter.kernel.ledger.port.Ledger. ``n_slots`` is the initial room.

    Raises ValueError with the argument's name for a number out of range (at most 65,536 slots, and 2**32-1
    prefill tokens a lease), and OverflowError for a sum that would not fit, without any change.
    """

    def __new__(cls, n_slots: int = ...) -> Self: ...
    def ensure_slots(self, n_slots: int) -> bool:
        """Make room for ``n_slots`` slots or more. Return whether the columns were replaced."""
    @property
    def n_slots(self) -> int:
        """The number of slots with room."""
    @property
    def n_runs(self) -> int:
        """The number of distinct runs of blocks, which determines the ledger's memory."""
    @property
    def prefill_tokens(self) -> Column:
        """The active prefill tokens, by slot."""
    @property
    def active_blocks(self) -> Column:
        """The active blocks, by slot."""
    @property
    def requests(self) -> Column:
        """The open leases, by slot."""
    @property
    def waiting(self) -> Column:
        """The open leases without a first token, by slot."""
    def book(
        self, *, key: LeaseKey, slot: Slot, prompt: Prompt, prefill_tokens: int, track_blocks: bool = True
    ) -> LeaseId:
        """Open a lease. Raises kvrouter.kernel.ledger.port.LeaseExists; ValueError for a slot beyond."""
    def find(self, key: LeaseKey) -> LeaseId | None:
        """Return the open lease with this key; None without one."""
    def first_token(self, lease: LeaseId) -> bool:
        """End the lease's prefill. False when the lease is not open."""
    def output_block(self, lease: LeaseId, n: int = 1) -> bool:
        """Add ``n`` blocks full of output. False when the lease is not open."""
    def close(self, lease: LeaseId) -> bool:
        """Close the lease. False when it is not open."""
    def move(self, lease: LeaseId, slot: Slot, prefill_tokens: int) -> bool:
        """Move the lease to another slot. False when it is not open; ValueError for a slot without room."""
    def not_active(self, prompt: Prompt, out: U32Buffer, exclude: LeaseId | None = None) -> None:
        """Fill ``out``, by slot, with the number of the prompt's blocks that no other lease holds."""
    def drop_slot(self, slot: Slot) -> int:
        """Close all leases at the slot; return their number."""
    def drop_router(self, router_id: RouterId) -> int:
        """Close all leases of one router incarnation; return their number."""
    def __len__(self) -> int:
        """The number of open leases."""
