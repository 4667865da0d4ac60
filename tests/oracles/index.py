"""The block index and the approximate index in plain dicts: what the native ones have to equal."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrouter.core.events import Held, KvEvent, Medium, Removed, Stored, pack_hashes, unpack_hashes
from kvrouter.core.hashing import Prompt, sequence_hashes
from kvrouter.core.ids import EngineHash, SequenceHash, Slot
from kvrouter.kernel.index import SLOTS_MAX, OverlapColumn


@dataclass
class NaiveApplied:
    """What became of the blocks of some events."""

    stored: int = 0
    repeated: int = 0
    replaced: int = 0
    removed: int = 0
    unknown_removed: int = 0
    orphaned: int = 0
    cleared: int = 0
    over_limit: int = 0


@dataclass(frozen=True)
class NaiveStats:
    """Sizes; a plain dict's memory is not counted."""

    blocks: tuple[int, int, int, int]
    sequences: tuple[int, int, int, int]
    ranks: int
    bytes: int = 0


@dataclass
class _Held:
    sequence: SequenceHash
    stores: int


@dataclass
class NaiveBlockIndex:
    """Who holds which blocks; see :class:`kvrouter.kernel.index.BlockIndex`."""

    blocks_per_rank_max: int = 1 << 26
    _media: dict[Medium, dict[Slot, dict[EngineHash, _Held]]] = field(
        default_factory=lambda: {medium: {} for medium in Medium}
    )

    def apply(self, slot: Slot, events: Sequence[KvEvent | Held]) -> NaiveApplied:
        """Apply events of one rank, in order."""
        _check(slot)
        applied = NaiveApplied()
        for event in events:
            if isinstance(event, Stored):
                self._stored(slot, event, applied)
            elif isinstance(event, Held):
                pairs = zip(
                    unpack_hashes(event.engine_hashes), unpack_hashes(event.sequence_hashes), strict=True
                )
                for name, sequence in pairs:
                    self._place(slot, event.medium, EngineHash(name), SequenceHash(sequence), applied)
            elif isinstance(event, Removed):
                for name in unpack_hashes(event.engine_hashes):
                    self._remove(slot, event.medium, EngineHash(name), applied)
            else:
                applied.cleared += sum(len(ranks.pop(slot, {})) for ranks in self._media.values())
        return applied

    def _stored(self, slot: Slot, event: Stored, applied: NaiveApplied) -> None:
        sequences = sequence_hashes(event.block_hashes)
        if event.parent is not None:
            parent = self._find(slot, event.parent, event.medium)
            if parent is None:
                applied.orphaned += event.n_blocks
                return
            # A chain that begins with the parent's sequence hash goes on from the parent.
            sequences = sequence_hashes(pack_hashes([parent]) + event.block_hashes)[8:]
        for name, sequence in zip(unpack_hashes(event.engine_hashes), unpack_hashes(sequences), strict=True):
            self._place(slot, event.medium, EngineHash(name), SequenceHash(sequence), applied)

    def _find(self, slot: Slot, name: EngineHash, medium: Medium) -> SequenceHash | None:
        for other in (medium, *Medium):
            held = self._media[other].get(slot, {}).get(name)
            if held is not None:
                return held.sequence
        return None

    def _place(
        self, slot: Slot, medium: Medium, name: EngineHash, sequence: SequenceHash, applied: NaiveApplied
    ) -> None:
        rank = self._media[medium].setdefault(slot, {})
        held = rank.get(name)
        if held is None:
            if len(rank) >= self.blocks_per_rank_max:
                applied.over_limit += 1
            else:
                applied.stored += 1
                rank[name] = _Held(sequence, 1)
        elif held.sequence == sequence:
            applied.repeated += 1
            held.stores += 1
        else:
            applied.replaced += 1
            rank[name] = _Held(sequence, 1)

    def _remove(self, slot: Slot, medium: Medium, name: EngineHash, applied: NaiveApplied) -> None:
        rank = self._media[medium].get(slot, {})
        held = rank.get(name)
        if held is None:
            applied.unknown_removed += 1
            return
        applied.removed += 1
        held.stores -= 1
        if held.stores == 0:
            del rank[name]
        if not rank:
            del self._media[medium][slot]

    def dump(self, slot: Slot) -> list[Held]:
        """Return a snapshot of the rank."""
        _check(slot)
        events = []
        for medium in Medium:
            rows = sorted(
                (name, held.sequence)
                for name, held in self._media[medium].get(slot, {}).items()
                for _ in range(held.stores)
            )
            if rows:
                names, sequences = zip(*rows, strict=True)
                events.append(Held(pack_hashes(names), pack_hashes(sequences), medium))
        return events

    def dump_some(self, slot: Slot, place: int = 0) -> tuple[list[Held], int] | None:
        """Return one event of the snapshot, and the number of the next."""
        events = self.dump(slot)[place : place + 1]
        return (events, place + 1) if events else None

    def drop_some(self, slot: Slot) -> NaiveApplied:
        """Forget one medium of the rank."""
        _check(slot)
        n_blocks = next((len(ranks.pop(slot)) for ranks in self._media.values() if slot in ranks), 0)
        return NaiveApplied(cleared=n_blocks)

    def overlap(self, prompt: Prompt, out: OverlapColumn, medium: Medium = Medium.GPU) -> None:
        """Fill ``out`` with the longest contiguous prefix of the prompt's blocks that each slot holds."""
        ranks = self._media[medium]
        if len(out) <= max(ranks, default=-1):
            raise ValueError(f"out: a place for each of the {max(ranks) + 1} slots in use, not {len(out)}")
        out[:] = 0
        for slot, rank in ranks.items():
            sequences = {held.sequence for held in rank.values()}
            out[slot] = _leading(unpack_hashes(prompt.sequence_hashes), sequences)

    def held(self, slot: Slot, medium: Medium = Medium.GPU) -> int:
        """How many blocks the rank holds."""
        return len(self._media[medium].get(slot, {}))

    def stats(self) -> NaiveStats:
        """Sizes now."""
        blocks, sequences = [], []
        for ranks in self._media.values():
            blocks.append(sum(len(rank) for rank in ranks.values()))
            sequences.append(len({held.sequence for rank in ranks.values() for held in rank.values()}))
        slots = {slot for ranks in self._media.values() for slot, rank in ranks.items() if rank}
        return NaiveStats(_four(blocks), _four(sequences), len(slots))


def _leading(wanted: Sequence[int], held: set[SequenceHash]) -> int:
    for depth, sequence in enumerate(wanted):
        if sequence not in held:
            return depth
    return len(wanted)


def _four(numbers: list[int]) -> tuple[int, int, int, int]:
    gpu, cpu, disk, external = numbers
    return gpu, cpu, disk, external


def _check(slot: Slot) -> None:
    if not 0 <= slot < SLOTS_MAX:
        raise ValueError(f"slot: within 0..{SLOTS_MAX - 1}, not {slot}")


@dataclass(frozen=True)
class NaiveApproximateStats:
    """Sizes; a plain dict's memory is not counted."""

    blocks: int
    bytes: int = 0


@dataclass(frozen=True)
class _Touched:
    at_s: float
    number: int
    depth: int


@dataclass
class NaiveApproximateIndex:
    """Who may hold which blocks; see :class:`kvrouter.kernel.index.ApproximateIndex`."""

    ttl_s: float = 120.0
    max_blocks: int = 1 << 20
    prune_target_ratio: float = 0.8
    _blocks: dict[tuple[Slot, SequenceHash], _Touched] = field(default_factory=dict)
    _n_touches: int = 0

    def touch(self, slot: Slot, prompt: Prompt, now_s: float) -> None:
        """A decision sends the prompt to the slot."""
        self.expire(now_s)
        self._n_touches += 1
        for depth, sequence in enumerate(unpack_hashes(prompt.sequence_hashes)):
            self._blocks[slot, SequenceHash(sequence)] = _Touched(now_s, self._n_touches, depth)
        if len(self._blocks) > self.max_blocks:
            self._prune()

    def _prune(self) -> None:
        n_over = len(self._blocks) - int(self.max_blocks * self.prune_target_ratio)
        oldest = sorted(self._blocks.items(), key=lambda item: (item[1].at_s, -item[1].depth, item[1].number))
        for block, _ in oldest[:n_over]:
            del self._blocks[block]

    def overlap(self, prompt: Prompt, out: OverlapColumn, now_s: float) -> None:
        """Fill ``out`` with the leading blocks that each slot may hold."""
        slots = {slot for slot, _ in self._blocks}
        out[:] = 0
        for slot in slots:
            for sequence in unpack_hashes(prompt.sequence_hashes):
                touched = self._blocks.get((slot, SequenceHash(sequence)))
                if touched is None or touched.at_s + self.ttl_s <= now_s:
                    break
                out[slot] += 1

    def expire(self, now_s: float) -> int:
        """Forget the blocks whose time is over; return how many."""
        return self._forget({b for b, touched in self._blocks.items() if touched.at_s + self.ttl_s <= now_s})

    def drop(self, slot: Slot) -> None:
        """Forget the slot."""
        self._forget({block for block in self._blocks if block[0] == slot})

    def _forget(self, blocks: set[tuple[Slot, SequenceHash]]) -> int:
        for block in blocks:
            del self._blocks[block]
        return len(blocks)

    def stats(self) -> NaiveApproximateStats:
        """Sizes now."""
        return NaiveApproximateStats(len(self._blocks))
