"""The blocks of one rank by the engine's own hashes, which its next events refer to.

Stores are counted per medium, as the routers' index counts them: an engine may store a block three times and
remove it three times. vLLM's ``kv_cache_report_mode: full`` stores a block again that is merely found,
without a removal for it: such blocks stay counted until the next clear, so that mode must not reach an
engine.

A block with an unknown parent is dropped: its position in the sequence is unknown. The rank is then
*partial*: the engine holds the blocks held here, and may hold more. A clear ends this at any time.
"""

from collections import Counter
from collections.abc import Iterable

from kvrouter._native import EngineBlocks
from kvrouter.core.events import Cleared, KvEvent, Medium, Stored, count_blocks
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
        self._blocks = EngineBlocks(max_blocks=traits.blocks_max)
        self._deciding: CacheGroup | None = None

    def held(self, medium: Medium = Medium.GPU) -> int:
        """How many blocks are known in ``medium``."""
        return self._blocks.held(medium)

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
        elif not event.token_ids or (event.medium is not Medium.GPU and self._is_copy(event)):
            for name in event.names:
                self._copy(name, event.medium, out)
        else:
            self._store_new(event, out)

    def _is_copy(self, event: EngineStored) -> bool:
        """Whether known blocks were copied below the GPU: these events omit fields of the first store."""
        return all(map(self._blocks.is_known, event.names))

    def _store_new(self, event: EngineStored, out: list[KvEvent]) -> None:
        traits, n_blocks = self._traits, len(event.names)
        self.lookahead_tokens = max(self.lookahead_tokens, event.lookahead_tokens)
        lora_name = event.lora_name
        if lora_name is None and event.lora_id is not None:
            lora_name = traits.lora_names.get(event.lora_id)
        if event.block_size != traits.block_size:
            self.skipped[Skipped.OTHER_BLOCK_SIZE] += n_blocks
        elif len(event.token_ids) != n_blocks * traits.block_size or (
            event.mm_hashes is not None and len(event.mm_hashes) != n_blocks
        ):
            self.skipped[Skipped.TOKENS_MISMATCH] += n_blocks
        elif lora_name is None and event.lora_id is not None:
            self.skipped[Skipped.UNNAMED_LORA] += n_blocks
        else:
            stored = self._blocks.store(
                event.names,
                event.parent,
                event.token_ids,
                traits.block_size,
                event.medium,
                lora_name,
                event.cache_salt,
                event.mm_hashes,
            )
            self._stored(stored, n_blocks, out)

    def _copy(self, name: EngineHash, medium: Medium, out: list[KvEvent]) -> None:
        """Store a block in ``medium`` that is known elsewhere, or there already."""
        if self._blocks.is_known(name):
            self._stored(self._blocks.copy(name, medium), 1, out)
        else:
            self.skipped[Skipped.NO_TOKENS] += 1

    def _stored(self, stored: Stored | None, n_blocks: int, out: list[KvEvent]) -> None:
        """Pass on what was stored of ``n_blocks`` blocks, None if their parent is not known."""
        n_stored = 0 if stored is None else stored.n_blocks
        if n_stored < n_blocks:
            self.skipped[Skipped.ORPHAN if stored is None else Skipped.OVER_LIMIT] += n_blocks - n_stored
            self.is_partial = True
        if stored is not None and n_stored:
            out.append(stored)

    def _remove(self, event: EngineRemoved, out: list[KvEvent]) -> None:
        if not self._is_of_deciding(event.group_key):
            self.skipped[Skipped.OTHER_GROUP] += len(event.names)
            return
        removed = self._blocks.remove(event.names, event.medium)
        out += removed
        n_unknown = len(event.names) - count_blocks(removed)
        if n_unknown:
            self.skipped[Skipped.UNKNOWN_REMOVED] += n_unknown

    def _move(self, event: EngineMoved, out: list[KvEvent]) -> None:
        if not self._is_of_deciding(event.group_key):
            self.skipped[Skipped.OTHER_GROUP] += 1
        elif not self._blocks.is_held(event.name, event.source):
            self.skipped[Skipped.UNKNOWN_REMOVED] += 1
        else:
            self._copy(event.name, event.target, out)
            out += self._blocks.remove((event.name,), event.source)

    def _clear(self, out: list[KvEvent]) -> None:
        self._blocks.clear()
        out.append(Cleared())

    def _decides(self, group: CacheGroup, out: list[KvEvent]) -> bool:
        """Whether ``group`` decides reuse; a higher one takes over, and all blocks are dropped."""
        deciding = self._deciding
        if deciding is not None and (group.key == deciding.key or group.standing <= deciding.standing):
            if group.key == deciding.key and group.standing > deciding.standing:
                self._deciding = group
            return group.key == deciding.key
        self._deciding = group
        if any(map(self.held, Medium)):
            self._clear(out)
        return True

    def _is_of_deciding(self, group_key: int | None) -> bool:
        return group_key is None or self._deciding is None or group_key == self._deciding.key
