"""The rule of :class:`kvrouter._native.EngineBlocks`, block by block."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.core.events import Medium, Removed, Stored, pack_hashes, unpack_hashes
from kvrouter.core.hashing import block_hashes, hash_seed, sequence_hashes
from kvrouter.core.ids import EngineHash


@dataclass
class Held:
    """A block in one medium."""

    parent: EngineHash | None
    block_hash: int
    sequence_hash: int
    salt: str | None
    stores: int = 1


class NaiveEngineBlocks:
    """Finds a block in its medium, or else in the first one that has it."""

    def __init__(self, *, max_blocks: int) -> None:
        self.media: dict[Medium, dict[EngineHash, Held]] = {medium: {} for medium in Medium}
        self.max_blocks = max_blocks

    def find(self, name: EngineHash, medium: Medium) -> Held | None:
        found = [self.media[each][name] for each in (medium, *Medium) if name in self.media[each]]
        return found[0] if found else None

    def store(
        self,
        names: Sequence[EngineHash],
        parent: EngineHash | None,
        tokens: Sequence[int],
        block_size: int,
        medium: Medium,
        lora_name: str | None,
        cache_salt: str | None,
        mm_hashes: Sequence[Sequence[int]] | None,
    ) -> Stored | None:
        before = None if parent is None else self.find(parent, medium)
        if parent is not None and before is None:
            return None
        salt = before.salt if cache_salt is None and before is not None else cache_salt
        seed = hash_seed(lora_name=lora_name, cache_namespace=salt)
        hashes = block_hashes(tokens, block_size=block_size, seed=seed, mm_hashes=mm_hashes)
        return self.place(names, unpack_hashes(hashes), parent, before, medium, salt)

    def copy(self, name: EngineHash, medium: Medium) -> Stored | None:
        held = self.find(name, medium)
        if held is None:
            return None
        before = None if held.parent is None else self.find(held.parent, medium)
        if held.parent is not None and before is None:
            return None
        return self.place([name], [held.block_hash], held.parent, before, medium, held.salt)

    def place(
        self,
        names: Sequence[EngineHash],
        hashes: Sequence[int],
        parent: EngineHash | None,
        before: Held | None,
        medium: Medium,
        salt: str | None,
    ) -> Stored:
        room = max(0, self.max_blocks - sum(map(len, self.media.values())))
        stored = Stored(parent, pack_hashes(names[:room]), pack_hashes(hashes[:room]), medium)
        chain = [] if before is None else [before.sequence_hash]
        for name, block_hash in zip(names[:room], hashes, strict=False):
            chain = [*unpack_hashes(sequence_hashes(pack_hashes([*chain, block_hash])))][-1:]
            held = self.media[medium].get(name)
            if held is not None and held.sequence_hash == chain[0]:
                held.stores += 1
            else:
                self.media[medium][name] = Held(parent, block_hash, chain[0], salt)
            parent = name
        return stored

    def remove(self, names: Sequence[EngineHash], medium: Medium | None) -> list[Removed]:
        found: dict[Medium, list[EngineHash]] = {}
        for name in names:
            where = [each for each in Medium if name in self.media[each] and medium in (None, each)]
            if not where:
                continue
            found.setdefault(where[0], []).append(name)
            self.media[where[0]][name].stores -= 1
            if not self.media[where[0]][name].stores:
                del self.media[where[0]][name]
        return [Removed(pack_hashes(names), medium) for medium, names in found.items()]
