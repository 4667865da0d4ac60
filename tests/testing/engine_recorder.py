"""All that one engine tells, added up: what its cache holds by its events, its loads, its states."""

from collections import Counter
from collections.abc import Iterable, Sequence

from kvrouter.core.events import Cleared, KvEvent, Medium, Removed, Stored, unpack_hashes
from kvrouter.core.hashing import Prompt, hash_seed
from kvrouter.core.ids import DpRank
from kvrouter.core.workers import LoadReport
from kvrouter.engines.port import EngineState


class EventRecorder:
    """``stored`` are the names of all blocks in order, ``held`` those since the last clear."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.held: list[int] = []
        self.ranks: set[DpRank] = set()
        self.n_cleared = 0
        self.said: list[str] = []

    def on_events(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
        self.ranks.add(dp_rank)
        for event in events:
            if isinstance(event, Stored):
                names = list(unpack_hashes(event.engine_hashes))
                self.stored += names
                self.held += names
            elif isinstance(event, Cleared):
                self.n_cleared += 1
                self.held.clear()

    def on_change(self, why: str) -> None:
        self.said.append(why)


R0, R1 = DpRank(0), DpRank(1)

_BEGIN = 0


class HeldBlocks:
    """The blocks of one rank, by their stores less their removals. A block is named by all hashes up to it.

    ``wrong`` has whatever no engine may say: a store whose parent is not there, a removal of nothing.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.n_stored = 0
        self._places: dict[tuple[Medium, int], int] = {}
        self._stores: Counter[tuple[Medium, int]] = Counter()

    def take(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self._places.clear()
                self._stores.clear()
            elif isinstance(event, Removed):
                for name in unpack_hashes(event.engine_hashes):
                    self._remove((event.medium, name))
            else:
                self._store(event)

    def places(self) -> set[int]:
        """Every block that is held."""
        return set(self._places.values())

    def overlap_blocks(self, block_hashes: Sequence[int]) -> int:
        """How many leading blocks of a prompt are held."""
        held, place = self.places(), _BEGIN
        for at, block_hash in enumerate(block_hashes):
            place = hash((place, block_hash))
            if place not in held:
                return at
        return len(block_hashes)

    def _store(self, event: Stored) -> None:
        place = _BEGIN
        if event.parent is not None:
            parent = next(
                (self._places[key] for medium in Medium if (key := (medium, event.parent)) in self._places),
                None,
            )
            if parent is None:
                self.wrong.append(f"a store behind {event.parent:#x}, which is not there")
                return
            place = parent
        for name, block_hash in zip(
            unpack_hashes(event.engine_hashes), unpack_hashes(event.block_hashes), strict=True
        ):
            place = hash((place, block_hash))
            if self._places.setdefault((event.medium, name), place) != place:
                self.wrong.append(f"{name:#x} is two blocks")
            self._stores[event.medium, name] += 1
            self.n_stored += 1

    def _remove(self, key: tuple[Medium, int]) -> None:
        if key not in self._places:
            self.wrong.append(f"the removal of {key[1]:#x}, which is not there")
            return
        self._stores[key] -= 1
        if not self._stores[key]:
            del self._places[key], self._stores[key]


class EngineRecorder:
    """The sinks of an engine, and what they were given."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.ranks: dict[DpRank, HeldBlocks] = {}
        self.loads: dict[DpRank, LoadReport] = {}
        self.n_loads = 0
        self.states: list[EngineState] = []

    def on_events(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
        self.ranks.setdefault(dp_rank, HeldBlocks()).take(events)

    def on_load(self, report: LoadReport) -> None:
        self.loads[report.rank.dp_rank] = report
        self.n_loads += 1

    def on_state(self, state: EngineState) -> None:
        self.states.append(state)

    @property
    def wrong(self) -> list[str]:
        """Whatever no engine may say."""
        return [wrong for held in self.ranks.values() for wrong in held.wrong]

    @property
    def n_stored(self) -> int:
        """How many blocks were ever stored."""
        return sum(held.n_stored for held in self.ranks.values())

    @property
    def running(self) -> int:
        """Requests that run or wait, by the latest reports."""
        return sum(load.running_requests + load.waiting_requests for load in self.loads.values())

    @property
    def active_blocks(self) -> int:
        """Blocks that running requests hold, by the latest reports."""
        return sum(load.active_blocks for load in self.loads.values())

    def overlap_blocks(
        self, tokens: Sequence[int], dp_rank: DpRank = R0, *, namespace: str | None = None
    ) -> int:
        """How many leading whole blocks of a prompt the rank holds, by its events."""
        prompt = Prompt(tokens, block_size=self.block_size, seed=hash_seed(cache_namespace=namespace))
        held = self.ranks.get(dp_rank)
        return 0 if held is None else held.overlap_blocks(unpack_hashes(prompt.block_hashes))

    def reusable_tokens(self, tokens: Sequence[int], dp_rank: DpRank = R0) -> int:
        """What an engine can have cached of a prompt: its last token is computed in any case."""
        blocks = min(self.overlap_blocks(tokens, dp_rank), (len(tokens) - 1) // self.block_size)
        return blocks * self.block_size
