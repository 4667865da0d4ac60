"""The native core: hashes, the block index, the ledger.

Tokens come as a C-contiguous buffer of unsigned 32-bit integers (``array('I')``, a numpy ``uint32`` array, a
memoryview of either; read where it lies) or as a sequence of ints (copied, which costs more than hashing). A
hash column is ``bytes``: unsigned 64-bit integers, little-endian, 8 bytes each. An ``out`` column is a
writable, C-contiguous buffer of unsigned 32-bit integers over slots.

A number out of range is refused by the name of its argument, and memory that cannot be had for what comes in
is a MemoryError.

Short calls keep the interpreter lock: a call of one microsecond that gave it up could wait milliseconds to
get it back. Big batches and ``dump`` give it up.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, Self, SupportsIndex, final, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvrouter.core.events import HashColumn, Held, KvEvent, Medium
from kvrouter.core.ids import LeaseId, LeaseKey, RouterId, Slot
from kvrouter.recording.request import RequestFields

PredictionAsked = tuple[tuple[float, float, float, float, float, float], tuple[bool, bool, bool, bool, bool]]
"""Prompt tokens and blocks, block size, seconds of an answer, interference, weight of overlap; whether the
leg prefills and decodes, whether tokens and blocks count, and whether those do who are answered meanwhile."""

Seconds = npt.NDArray[np.float64]

U32Buffer = Buffer | npt.NDArray[np.uint32]

@final
class JsonBounds:
    """What one JSON text may hold.

    ``depth`` counts containers in containers, ``values`` all values, ``items`` the members of one object or
    the elements of one array. Numbers in arrays of the outermost object's ``number_fields`` are token ids
    (``nvext.token_data`` is one of an object in it): they count as ``numbers``, and as nothing else.
    ``text_bytes`` bounds all strings that are not plain ASCII, as they are written or as Python holds them,
    whichever is more. ``short_bytes`` bounds each string in the outermost object's ``short_fields``,
    ``key_bytes`` one name, ``number_bytes`` one number: these as they are written. ``blanks_in_row`` bounds
    each run of blanks outside of strings, ``blanks`` all of them together. ``containers`` counts lists and
    objects. ``read_fields`` are the names that what decodes the text reads, each with whether it reads all
    inside, and ``read_depth`` is down to where: in the rest only depth, names, numbers and blanks are
    bounded. With ``takes_nan`` ``NaN``, ``Infinity`` and ``-Infinity`` are numbers, as they are for Python's
    own decoder.
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
        """The fields of the outermost object by their names as they are written, of equal names the last
        (begin, end, and of the strings in it, once escapes are read, characters and bytes of UTF-8), and how
        many values there are.

        Raises :class:`kvrouter.core.json_bounds.JsonRefused`. From 64 KiB on others run meanwhile.
        """

@final
class MsgpackBounds:
    """What one frame of msgpack may hold: ``depth`` counts containers in containers, ``values`` all values,
    keys and containers among them, ``containers`` arrays and maps.
    """

    def __new__(cls, *, depth: int, values: int, containers: int) -> MsgpackBounds: ...
    def scan(self, frame: bytes) -> None:
        """Raise :class:`kvrouter.core.json_bounds.JsonRefused` for a frame that holds more, or announces it.
        What is no msgpack is left to its decoder. From 64 KiB on others run meanwhile.
        """

@final
class Prompt:
    """The hashes of one prompt: immutable, computed once, shared with every lease that is booked for it.

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
        """A prompt whose tokens are elsewhere, from the hash of each of its leading full blocks.

        Full blocks beyond those have no hashes, as a partial tail has none. Raises ValueError (a column that
        is not a multiple of 8 bytes, fewer tokens than blocks, more than 2**32-1 tokens, block_size below 1)
        or OverflowError.
        """
    @property
    def isl_tokens(self) -> int:
        """The number of token ids."""
    @property
    def block_size(self) -> int:
        """Tokens a block."""
    @property
    def n_blocks(self) -> int:
        """The number of full blocks that have hashes: all of them, unless made from fewer."""
    @property
    def total_blocks(self) -> int:
        """The number of blocks that the prompt occupies, a partial tail included."""
    @property
    def block_hashes(self) -> bytes:
        """The hash of each full block's own tokens, as a column."""
    @property
    def sequence_hashes(self) -> bytes:
        """The hash of each full block chained over all blocks before it, as a column."""

def token_ids(text: bytes, begin: int) -> tuple[bytes, int]:
    """Read the JSON list of token ids that begins at ``begin``: as a u32 column, and where it ends.

    Raises :class:`kvrouter.core.json_bounds.JsonRefused` of the kind ``token_id`` for an element that is no
    whole number from 0 to 2**32-1; its path is the element's, such as ``[3]``. From 64 KiB on others run
    meanwhile.
    """

def mix64(bits: int) -> int:
    """splitmix64's output for the lowest 64 bits: each input bit changes each output bit half the time."""

def finish64(bits: int) -> int:
    """What splitmix64's finisher makes of the lowest 64 bits: 0 stays 0."""

def hash_seed(*, lora_name: str | None = None, cache_namespace: str | None = None) -> int:
    """The seed of block hashes: 1337 [+ xxh3_64(lora_name, 0)] [+ xxh3_64(cache_namespace, 1)] mod 2**64.

    An empty name counts as absent.
    """

def block_hashes(
    tokens: U32Buffer | Sequence[int],
    *,
    block_size: int,
    seed: int = 1337,
    mm_hashes: Sequence[Sequence[int]] | None = None,
) -> bytes:
    """The hash of each full block: xxh3_64 of its tokens (u32 LE) and then its sorted mm_hashes (u64 LE).

    Raises what Prompt raises.
    """

def sequence_hashes(block_hashes: bytes) -> bytes:
    """The chained column: s0 = h0, si = xxh3_64(s(i-1) LE, then hi LE; seed 1337).

    Raises ValueError when the column is not a multiple of 8 bytes.
    """

@final
class Applied:
    """What became of the blocks of some events; see kvrouter.kernel.index.Applied for each count."""

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
class KvEvents:
    """Events that engines of this process gave. They become Python objects where somebody looks at them:
    :meth:`BlockIndex.apply` does not.
    """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, at: SupportsIndex) -> KvEvent: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[KvEvent, ...]: ...
    def __iter__(self) -> Iterator[KvEvent]: ...

@final
class BlockIndex:
    """Who holds which blocks, as the engines' events say; the contract is kvrouter.kernel.index.BlockIndex.

    An engine hash is opaque and means something at its own rank alone. A block stored n times at one (rank,
    medium) takes n removals. Two engine hashes of one rank may name the same block, which stays until both
    are gone. An engine hash that is stored again with other content names the new content alone, its earlier
    stores forgotten. A rank holds at most ``blocks_per_rank_max`` blocks a medium.

    Raises ValueError for a slot outside 0..65535, a medium outside 0..3, a malformed event.
    """

    def __new__(cls, *, blocks_per_rank_max: int = ...) -> BlockIndex: ...
    def apply(self, slot: Slot, events: Sequence[KvEvent | Held] | KvEvents) -> Applied:
        """Apply events of one rank, in order; more than 4,096 blocks give the interpreter lock up."""
    def drop_some(self, slot: Slot) -> Applied:
        """Forget some of what the rank holds, a few thousand blocks: none when nothing is left."""
    def dump(self, slot: Slot) -> list[Held]:
        """A snapshot of the rank, at most 4,096 blocks an event, by medium and rising engine hash."""
    def dump_some(self, slot: Slot, place: int = 0) -> tuple[list[Held], int] | None:
        """Some of a snapshot, a few thousand blocks, and the place of what follows; None after the last."""
    def overlap(self, prompt: Prompt, out: U32Buffer, medium: Medium = ...) -> None:
        """Fill ``out`` with the longest contiguous prefix of the prompt's blocks that each slot holds.

        Raises ValueError when ``out`` is shorter than the slots in use.
        """
    def held(self, slot: Slot, medium: Medium = ...) -> int:
        """How many blocks the rank holds."""
    def stats(self) -> IndexStats:
        """Sizes now; walks over the ranks."""

@final
class ApproximateStats:
    """Sizes of an ApproximateIndex."""

    @property
    def blocks(self) -> int: ...
    @property
    def bytes(self) -> int: ...

@final
class ApproximateIndex:
    """Who may hold which blocks, predicted; the contract is kvrouter.kernel.index.ApproximateIndex.

    Raises ValueError for a ttl_s that is not above 0, max_blocks below 1, a ratio outside 0..1, a time that
    is not finite.
    """

    def __new__(
        cls, *, ttl_s: float = 120.0, max_blocks: int = ..., prune_target_ratio: float = 0.8
    ) -> ApproximateIndex: ...
    def touch(self, slot: Slot, prompt: Prompt, now_s: float) -> None:
        """A decision sends the prompt to the slot; also forgets what is over."""
    def overlap(self, prompt: Prompt, out: U32Buffer, now_s: float) -> None:
        """Fill ``out`` as BlockIndex.overlap does, without the blocks whose time is over."""
    def expire(self, now_s: float) -> int:
        """Forget the blocks whose time is over; return how many."""
    def drop(self, slot: Slot) -> int:
        """Forget the slot; return how many blocks it was thought to hold."""
    def stats(self) -> ApproximateStats:
        """Sizes now."""

@final
class LinkMap:
    """The links between slots, by the values of their domains; see
    :mod:`kvrouter.kernel.routing.fleet_links` for the rules.

    ``domains`` are columns of value ids over slots, -1 where there is none. ``order_at`` says for each slot
    which of the ``orders`` of levels its worker has: each level is the number of its domain, and that of its
    link or None. ``pairs`` are links that were measured: the number of a domain, two of its value ids, the
    number of the link. ``destinations`` are the slots that KV may be sent to, ``links`` the latency in
    seconds, bytes a second and price a byte of each link; the first one serves those who share no level.
    Raises ValueError for a number of something that is not there.
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
        """Return the number of the link between two slots, and that of what its transfers share: 0 where
        nobody knows. IndexError for a slot that is not there.
        """
    def name(self, shared: int) -> tuple[list[tuple[int, int]], int] | None:
        """Return what transfers share: the numbers of domains with the value ids of the source, and the value
        id of the destination in the last of them; None for 0.
        """
    def number(self, source: Sequence[tuple[int, int]], dst: int) -> int:
        """Return the number of what :meth:`name` returns."""
    def state(self, src: int, dst: int) -> tuple[int, float, float, float, float]:
        """Return the number of the link between two slots, what is to travel there (bytes, and transfers),
        its slowness and the seconds that each transfer takes more. IndexError for a slot that is not there.
        """
    def set_load(self, shared: int, kv_bytes: float, count: float) -> None:
        """Say what is to travel there. IndexError for a number that none has."""
    def set_pace(self, shared: int, pace: tuple[float, float] | None) -> None:
        """Say how many times as long bytes take there, and how many seconds more each transfer; None: as for
        its kind. IndexError for a number that none has.
        """
    def set_kind_pace(self, domain: int | None, within: bool, pace: tuple[float, float] | None) -> None:
        """Say so of all links within one value of a domain, or between two, that have no pace of their own;
        None for the domain: of links that share 0. IndexError for a domain that is not there.
        """
    def clear(self) -> None:
        """Nothing travels anywhere, and each link is as its figures say."""
    def transfer_seconds(
        self,
        out: Seconds,
        src: int,
        overlap: npt.NDArray[np.uint32] | None,
        asked: tuple[float, float, float],
    ) -> None:
        """Fill ``out`` with how long a transfer to each destination takes, 0 elsewhere; ``asked`` are prompt
        tokens, tokens a block and bytes a token.
        """
    def prices(self, out: Seconds, src: int) -> None:
        """Fill ``out`` with what a byte to each destination costs, 0 elsewhere."""
    def least_pairs(
        self,
        out: Seconds,
        predictor: Predictor,
        columns: RankColumns,
        asked: tuple[PredictionAsked, PredictionAsked],
        senders: Senders,
        masks: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]],
        multipliers: tuple[Seconds | None, Seconds | None, Sequence[Seconds | None]],
        price_weight: float,
    ) -> None:
        """Fill ``out`` with the least cost of a pair for each slot of the first mask, whose decode slot is
        one of the second; infinity elsewhere. ``asked`` are the two legs, ``multipliers`` those of prefill
        slots, of decode slots, and by limit of decode slots in a domain that is preferred.
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
        """Fill ``out`` with what each destination adds to the cost of a prefill slot; infinity elsewhere."""

@final
class Senders:
    """What prefill slots ask of their decode slots: ``limits`` are a rule (anywhere, required, fallback or
    preferred) and the numbers of a domain and a value, ``limit_of`` and ``kv_bytes_per_token`` columns.
    """

    def __new__(
        cls,
        links: LinkMap,
        limits: Sequence[tuple[str, tuple[int, int] | None]],
        limit_of: Sequence[int],
        kv_bytes_per_token: Sequence[float],
    ) -> Self: ...

@final
class Predictor:
    """Predicts what a request takes at each slot; :mod:`kvrouter.kernel.routing.costs.time` has the formulas.

    ``timing`` has the figures of kvrouter.core.timing.Timing in their order. Raises ValueError for
    ``chunk_tokens`` below 1.
    """

    def __new__(
        cls,
        timing: Sequence[float],
        *,
        chunk_tokens: float,
        others_weight: float,
        stalls_weight: float,
        turnover_weight: float,
        decode_weight: float,
    ) -> Self: ...
    def totals(
        self,
        out: npt.NDArray[np.float64],
        columns: RankColumns,
        asked: PredictionAsked,
        among: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Fill ``out`` with the cost of each slot; with infinity where ``among`` is 0.

        Raises IndexError where ``out`` has more entries than ``columns`` have.
        """
    def parts(
        self, slot: int, columns: RankColumns, asked: PredictionAsked
    ) -> tuple[float, float, float, float, float, float]:
        """Return the six parts of one slot; raises what :meth:`totals` does."""

@final
class RankColumns:
    """What predictions read of each slot: overlap and blocks that are not active (uint32, or None), prefill
    tokens, active blocks, requests, waiting (int64), total blocks, seats, slowness, slowness of decode,
    turnover (float64). They have at least ``n_slots`` entries, are C-contiguous, and keep their size while it
    lives.

    Raises TypeError or ValueError that names a column of another type, or with fewer entries.
    """

    def __new__(cls, n_slots: int, columns: tuple[npt.NDArray[np.generic] | None, ...]) -> Self: ...

class PrefixSet:
    """The blocks of all prompts so far; with more than ``max_blocks`` it is given up."""

    def __new__(cls, *, max_blocks: int) -> PrefixSet: ...
    def add(self, prompt: Prompt) -> int | None:
        """Return how many leading blocks were there before; from now on all of them are. None once there were
        too many.
        """

@final
class RecordQueue:
    """Records of a recording between the event loop, which notes them, and the thread that packs them.

    ``key`` are the 16 bytes that blocks' names are made with, ``began_s`` the recording's start on the clock
    of all moments that are given. Lines that were noted are text, without the names of their blocks; these
    are made when the lines are packed. The lines are numbered from 0 each time that some are taken.
    """

    def __new__(cls, *, key: bytes, began_s: float, bytes_max: int) -> RecordQueue: ...
    def add(self, line: bytes, at_s: float, bytes_max: int) -> bool:
        """Note a line of ``at_s`` seconds after the start. Return False where more than ``bytes_max`` would
        wait then.
        """
    def add_request(self, prompt: Prompt, request: RequestFields, more: bytes, /) -> bool:
        """Note the line of a :class:`kvrouter.recording.schema.RequestRecord`; ``more`` are members of it as
        JSON, each after a comma. Return False where more than the queue's ``bytes_max`` would wait then.

        Raises, with nothing noted, where the record cannot be made: UnicodeEncodeError (half of a surrogate
        pair), ValueError (a moment that is no number), TypeError, OverflowError (above 63 bits).
        """
    def take(self) -> int:
        """Take all lines that were noted; forget those that were taken before. Return how many there are."""
    def batch(self, first: int, bytes_max: int) -> tuple[int, int, float]:
        """Of the lines that were taken: where those from ``first`` on end that take ``bytes_max`` at most,
        but one at least; how many bytes :meth:`pack` needs for them; and the first one's ``at_s``.

        Raises IndexError.
        """
    def pack(self, first: int, end: int, out: bytearray) -> tuple[int, bool]:
        """Write lines that were taken to ``out``, which nobody else uses meanwhile; others run. Return how
        many bytes they are, and whether they are a member of a gzip file, which has them as they are. Lines
        that are no member are worth a search for repeats: less than half of them are names.

        Raises IndexError, ValueError (``out`` is too short).
        """

class EngineRanks:
    """The schedulers of mock engines' ranks, on one clock that the caller advances; see
    kvrouter.engines.mock_engine.engine.

    A rank and a sequence are called by the numbers that :meth:`add` and :meth:`submit` return; a sequence's
    has its rank's in its upper 32 bits. Times are in seconds. Raises KeyError for one that is not here, and
    passes on what a leg's content raises.
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

        ``timing`` has the figures of kvrouter.core.timing.Timing in their order. With ``leaps`` only what
        cannot wait ends a :meth:`run`.
        """
    def remove(self, rank: int) -> None:
        """Take a rank away with all that it holds."""
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
        wants_remote_kv: bool,
        pins_kv: bool,
        content: EngineContent | None = None,
        salt: int = 0,
    ) -> int:
        """Hand a leg to a rank. ``content`` names its further blocks, and says whether its output stops;
        without one they are drawn from ``salt``. With ``pins_kv`` its KV stays when it ends, until
        :meth:`release`.
        """
    def drop(self, now: float, sequence: int) -> None:
        """End a sequence early; its last chunk says so."""
    def release(self, now: float, sequence: int) -> None:
        """The KV that stayed of a sequence is no longer needed."""
    def give_credit(self, now: float, sequence: int, tokens: int) -> None:
        """Its reader made room for ``tokens`` more."""
    def receive(self, now: float, sequence: int, arrived: bool) -> None:
        """The KV that it waits for arrived; or it never will, and is computed here."""
    def catch_up(self, now: float, rank: int) -> None:
        """Do what the rank leapt over and ended before ``now``, and report all that readers lack."""
    def next_time(self) -> float | None:
        """When the first step ends or may begin."""
    def run(self, until: float, *, through: bool) -> float | None:
        """Live all that is due before ``until`` (``through``: and at it), up to the first moment in which
        something happens at a rank that cannot wait; return that moment. At other ranks more may be due then.
        """
    def take_notices(self) -> tuple[list[tuple[int, float, float, int, int]], list[tuple[int, int]]]:
        """Return the sequences that generated their last token (with the seconds of their first and last,
        their output tokens and their cached tokens), and those that have memory for the KV of so many tokens.
        """
    @property
    def has_outputs(self) -> bool:
        """Whether any rank did something since the last :meth:`take_outputs`."""
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
        """Return what each rank did since the last call: its number; its KV events, where it has any; if it
        changed, its active blocks, tokens to prefill, running and waiting requests; the sequences with news:
        tokens, cached tokens where they are new, and how it ended (0 not yet, 1 length, 2 stop, 3 dropped);
        and those that were given a place in a step, and when.
        """
    def n_waiting(self, rank: int) -> int:
        """Sequences that wait for memory or a seat."""
    def active_blocks(self, rank: int) -> int:
        """Blocks that somebody holds."""
    def cached_blocks(self, rank: int) -> int:
        """Blocks whose content others can use, idle or held."""
    def snapshot(self, rank: int) -> KvEvents:
        """Return all cached blocks as stores, parents first."""
    def check_integrity(self, rank: int) -> list[str]:
        """Return what is wrong with the books of its memory."""

class EngineContent(Protocol):
    """What :class:`EngineRanks` asks of a leg."""

    def hash_blocks(self, known: int, n_blocks: int) -> HashColumn:
        """Return the hashes of its full blocks from ``known`` to ``n_blocks``."""
    def stops(self, n_output: int) -> bool:
        """Whether the output ends with its token number ``n_output``, counted from 1."""

class PagedKv:
    """The KV memory of a mock engine's rank, on its own.

    ``opaque``: blocks get names drawn from ``seed``; else their names follow from their content. A table is
    what one sequence holds. Raises KeyError for a table that is not held, and for a commit beyond what it
    holds.
    """

    def __new__(cls, *, total_blocks: int, opaque: bool, seed: int, caching: bool = True) -> Self: ...
    @property
    def total_blocks(self) -> int:
        """All of them."""
    @property
    def free_blocks(self) -> int:
        """Blocks without content."""
    @property
    def idle_blocks(self) -> int:
        """Cached blocks that nobody holds."""
    @property
    def active_blocks(self) -> int:
        """Blocks that somebody holds."""
    @property
    def cached_blocks(self) -> int:
        """Blocks whose content others can use, idle or held."""
    @property
    def n_offers(self) -> int:
        """Entries of the heap of what can be evicted, stale ones included."""
    def matched(self, block_hashes: HashColumn, blocks_max: int) -> int:
        """Count the cached blocks that begin this sequence, up to ``blocks_max``."""
    def hold(self, block_hashes: HashColumn, n_matched: int, n_private: int) -> int | None:
        """Hold the first ``n_matched`` blocks, which are cached, and allocate ``n_private`` more, evicting as
        needed. Return the table, None when they do not fit.
        """
    def can_grow(self, n_private: int) -> bool:
        """Return whether :meth:`grow` would find enough blocks."""
    def grow(self, table: int, n_private: int) -> int:
        """Allocate more blocks, evicting as needed. Return how many the table holds then; MemoryError when
        none can go.
        """
    def commit(self, table: int, block_hashes: HashColumn, n_full: int) -> None:
        """Cache the private blocks of the table among its first ``n_full``, which are full. One that another
        sequence cached meanwhile is shared instead, and the private one is free again.
        """
    def release(self, table: int) -> None:
        """Give up every block: private ones are free, cached ones stay until evicted."""
    def take_events(self) -> KvEvents:
        """Return what was stored and removed since the last call, in order."""
    def snapshot(self) -> KvEvents:
        """Return all cached blocks as stores, parents first."""
    def check_integrity(self, tables: Sequence[int]) -> list[str]:
        """Return every way in which the books differ from ``tables``, which is all that holds blocks."""

@final
class Column:
    """A signed 64-bit count for each slot, as a read-only buffer.

    It shows every later change, until the ledger grows; then it stays as it was, and the ledger hands out
    longer ones.
    """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Ledger:
    """Load by slot; the contract is kvrouter.kernel.ledger.port.Ledger. ``n_slots`` is the room at first.

    Raises ValueError for a number out of range, by the argument's name (at most 65,536 slots, and 2**32-1
    prefill tokens a lease), and OverflowError for a sum that would not fit; then nothing has changed.
    """

    def __new__(cls, n_slots: int = ...) -> Self: ...
    def ensure_slots(self, n_slots: int) -> bool:
        """Make room for ``n_slots`` slots or more. True when the columns are new: take them again."""
    @property
    def n_slots(self) -> int:
        """The slots that there is room for."""
    @property
    def n_runs(self) -> int:
        """Runs of blocks that the ledger tells apart: its size in memory."""
    @property
    def prefill_tokens(self) -> Column:
        """Active prefill tokens, by slot."""
    @property
    def active_blocks(self) -> Column:
        """Active blocks, by slot."""
    @property
    def requests(self) -> Column:
        """Open leases, by slot."""
    @property
    def waiting(self) -> Column:
        """Open leases whose first token has not come, by slot."""
    def book(
        self, *, key: LeaseKey, slot: Slot, prompt: Prompt, prefill_tokens: int, track_blocks: bool = True
    ) -> LeaseId:
        """Open a lease. Raises kvrouter.kernel.ledger.port.LeaseExists; ValueError for a slot beyond."""
    def find(self, key: LeaseKey) -> LeaseId | None:
        """The open lease with this key."""
    def first_token(self, lease: LeaseId) -> bool:
        """Prefill is over. False when the lease is not open."""
    def output_block(self, lease: LeaseId, n: int = 1) -> bool:
        """``n`` more blocks are full of output. False when the lease is not open."""
    def close(self, lease: LeaseId) -> bool:
        """End the lease. False when it is not open."""
    def move(self, lease: LeaseId, slot: Slot, prefill_tokens: int) -> bool:
        """Move the lease to another slot. False when it is not open; ValueError for a slot without room."""
    def not_active(self, prompt: Prompt, out: U32Buffer, exclude: LeaseId | None = None) -> None:
        """Fill ``out`` with the prompt's blocks that no lease but ``exclude`` holds at the slot yet."""
    def drop_slot(self, slot: Slot) -> int:
        """Close all leases at the slot; return how many."""
    def drop_router(self, router_id: RouterId) -> int:
        """Close all leases of one router incarnation; return how many."""
    def __len__(self) -> int:
        """The number of open leases."""
