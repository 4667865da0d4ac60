"""The blocks of one rank by the engine's own hashes, which its next events refer to.

Stores are counted per medium, as the routers' index counts them: an engine may store a block three times and
remove it three times. vLLM's ``kv_cache_report_mode: full`` stores a block again that is merely found,
without a removal for it: such blocks stay counted until the next clear, so that mode must not reach an
engine.

A block with an unknown parent is dropped: its position in the sequence is unknown. The rank is then
*partial*: the engine holds the blocks held here, and may hold more. A clear ends this at any time.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from kvrouter.core.events import (
    HASH_BYTES,
    Cleared,
    HashColumn,
    KvEvent,
    Medium,
    Removed,
    Stored,
    pack_hashes,
    unpack_hashes,
)
from kvrouter.core.hashing import block_hashes, hash_seed, sequence_hashes
from kvrouter.core.ids import EngineHash
from kvrouter.engines.kv_events.engine_events import (
    CacheGroup,
    EngineCleared,
    EngineEvent,
    EngineGroup,
    EngineMoved,
    EngineRemoved,
    EngineSkipped,
    EngineStored,
    EngineTraits,
    Skipped,
)


class _Held:
    """A block in one medium; ``cache_salt`` holds for what follows it."""

    __slots__ = ("block_hash", "cache_salt", "parent", "sequence_hash", "stores")

    def __init__(
        self, parent: EngineHash | None, block_hash: int, sequence_hash: int, cache_salt: str | None
    ) -> None:
        self.parent = parent
        self.block_hash = block_hash
        self.sequence_hash = sequence_hash
        self.cache_salt = cache_salt
        self.stores = 1


class RankBlocks:
    """Converts the engine events of one rank to the events for its routers.

    ``skipped`` counts events that are not passed on. ``is_partial``: events were missed, so the engine may
    hold more. ``lookahead_tokens``: the most tokens behind a block that a prompt needs, too, to find it.
    """

    def __init__(self, traits: EngineTraits, *, is_partial: bool = False) -> None:
        self.skipped: Counter[Skipped] = Counter()
        self.is_partial = is_partial
        self.lookahead_tokens = 0
        self._traits = traits
        self._media: dict[Medium, dict[EngineHash, _Held]] = {medium: {} for medium in Medium}
        self._deciding: CacheGroup | None = None

    def held(self, medium: Medium = Medium.GPU) -> int:
        """How many blocks are known in ``medium``."""
        return len(self._media[medium])

    def take(self, events: Iterable[EngineEvent]) -> tuple[KvEvent, ...]:
        """Apply ``events`` in order; return the events for routers."""
        out: list[KvEvent] = []
        for event in events:
            match event:
                case EngineStored():
                    self._store(event, out)
                case EngineRemoved():
                    self._remove(event, out)
                case EngineMoved():
                    self._move(event, out)
                case EngineCleared():
                    self._clear(out)
                    self.is_partial = False
                case EngineGroup():
                    self._decides(event.group, out)
                case EngineSkipped():
                    self.skipped[event.reason] += event.n
        return tuple(out)

    def lose(self) -> tuple[KvEvent, ...]:
        """Events were lost for good: all blocks are dropped until they are stored again."""
        out: list[KvEvent] = []
        self._clear(out)
        self.is_partial = True
        return tuple(out)

    def _store(self, event: EngineStored, out: list[KvEvent]) -> None:
        if not event.names:
            return
        if event.group is not None and not self._decides(event.group, out):
            self.skipped[Skipped.OTHER_GROUP] += len(event.names)
        elif not event.token_ids or self._is_copy(event):
            self._copy(event.names, event.medium, out)
        else:
            self._store_new(event, out)

    def _is_copy(self, event: EngineStored) -> bool:
        """Whether known blocks were copied below the GPU: these events omit fields of the first store."""
        return event.medium is not Medium.GPU and all(
            self._find(name, event.medium) is not None for name in event.names
        )

    def _store_new(self, event: EngineStored, out: list[KvEvent]) -> None:
        traits, n_blocks = self._traits, len(event.names)
        self.lookahead_tokens = max(self.lookahead_tokens, event.lookahead_tokens)
        lora_name = event.lora_name
        if lora_name is None and event.lora_id is not None:
            lora_name = traits.lora_names.get(event.lora_id)
        parent = None if event.parent is None else self._find(event.parent, event.medium)
        refusal = None
        if event.block_size != traits.block_size:
            refusal = Skipped.OTHER_BLOCK_SIZE
        elif len(event.token_ids) != n_blocks * traits.block_size or (
            event.mm_hashes is not None and len(event.mm_hashes) != n_blocks
        ):
            refusal = Skipped.TOKENS_MISMATCH
        elif lora_name is None and event.lora_id is not None:
            refusal = Skipped.UNNAMED_LORA
        elif event.parent is not None and parent is None:
            refusal = Skipped.ORPHAN
            self.is_partial = True
        if refusal is not None:
            self.skipped[refusal] += n_blocks
            return
        salt = event.cache_salt
        if salt is None and parent is not None:
            salt = parent.cache_salt
        hashes = block_hashes(
            event.token_ids,
            block_size=traits.block_size,
            seed=hash_seed(lora_name=lora_name, cache_namespace=salt),
            mm_hashes=event.mm_hashes,
        )
        self._place(event.names, hashes, event.parent, parent, event.medium, salt, out)

    def _copy(self, names: Sequence[EngineHash], medium: Medium, out: list[KvEvent]) -> None:
        """Store blocks in ``medium`` that are known elsewhere, or there already."""
        for name in names:
            held = self._find(name, medium)
            if held is None:
                self.skipped[Skipped.NO_TOKENS] += 1
                continue
            parent = None if held.parent is None else self._find(held.parent, medium)
            if held.parent is not None and parent is None:
                self.skipped[Skipped.ORPHAN] += 1
                self.is_partial = True
                continue
            column = pack_hashes((held.block_hash,))
            self._place((name,), column, held.parent, parent, medium, held.cache_salt, out)

    def _place(
        self,
        names: Sequence[EngineHash],
        hashes: HashColumn,
        parent: EngineHash | None,
        parent_held: _Held | None,
        medium: Medium,
        salt: str | None,
        out: list[KvEvent],
    ) -> None:
        rank = self._media[medium]
        room = max(0, self._traits.blocks_max - sum(map(len, self._media.values())))
        if room < len(names):
            # What is known already needs no room, but to find that out would cost as much as to place it.
            self.skipped[Skipped.OVER_LIMIT] += len(names) - room
            self.is_partial = True
            names, hashes = names[:room], hashes[: room * HASH_BYTES]
        if not names:
            return
        # A sequence hash chains like a first block's own hash, so the parent's stands in for all before it.
        chained = (
            sequence_hashes(hashes)
            if parent_held is None
            else sequence_hashes(pack_hashes((parent_held.sequence_hash,)) + hashes)[HASH_BYTES:]
        )
        out.append(Stored(parent, pack_hashes(names), hashes, medium))
        for name, block_hash, sequence_hash in zip(
            names, unpack_hashes(hashes), unpack_hashes(chained), strict=True
        ):
            held = rank.get(name)
            if held is not None and held.sequence_hash == sequence_hash:
                held.stores += 1
            else:
                rank[name] = _Held(parent, block_hash, sequence_hash, salt)
            parent = name

    def _remove(self, event: EngineRemoved, out: list[KvEvent]) -> None:
        if not self._is_of_deciding(event.group_key):
            self.skipped[Skipped.OTHER_GROUP] += len(event.names)
            return
        found: dict[Medium, list[EngineHash]] = {}
        for name in event.names:
            medium = event.medium if event.medium is not None else self._where(name)
            if medium is None or not self._take_back(name, medium):
                self.skipped[Skipped.UNKNOWN_REMOVED] += 1
            else:
                found.setdefault(medium, []).append(name)
        out.extend(Removed(pack_hashes(names), medium) for medium, names in found.items())

    def _move(self, event: EngineMoved, out: list[KvEvent]) -> None:
        if not self._is_of_deciding(event.group_key):
            self.skipped[Skipped.OTHER_GROUP] += 1
        elif event.name not in self._media[event.source]:
            self.skipped[Skipped.UNKNOWN_REMOVED] += 1
        else:
            self._copy((event.name,), event.target, out)
            self._take_back(event.name, event.source)
            out.append(Removed(pack_hashes((event.name,)), event.source))

    def _clear(self, out: list[KvEvent]) -> None:
        for rank in self._media.values():
            rank.clear()
        out.append(Cleared())

    def _decides(self, group: CacheGroup, out: list[KvEvent]) -> bool:
        """Whether ``group`` decides reuse; a higher one takes over, and all blocks are dropped."""
        deciding = self._deciding
        if deciding is not None and (group.key == deciding.key or group.standing <= deciding.standing):
            if group.key == deciding.key and group.standing > deciding.standing:
                self._deciding = group
            return group.key == deciding.key
        self._deciding = group
        if any(self._media.values()):
            self._clear(out)
        return True

    def _is_of_deciding(self, group_key: int | None) -> bool:
        return group_key is None or self._deciding is None or group_key == self._deciding.key

    def _find(self, name: EngineHash, medium: Medium) -> _Held | None:
        """The block that the engine calls ``name``: in this medium, or in any other, in the index's order."""
        for each in (medium, *Medium):
            held = self._media[each].get(name)
            if held is not None:
                return held
        return None

    def _where(self, name: EngineHash) -> Medium | None:
        return next((medium for medium in Medium if name in self._media[medium]), None)

    def _take_back(self, name: EngineHash, medium: Medium) -> bool:
        """Take back one store; return whether there was one."""
        held = self._media[medium].get(name)
        if held is None:
            return False
        held.stores -= 1
        if held.stores == 0:
            del self._media[medium][name]
        return True
