"""What a router tells the others of its own leases, in messages of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from msgspec import structs

from kvrouter.core.columns import count_hashes
from kvrouter.core.ids import RouterId
from kvrouter.core.sync import (
    DELTAS_MAX,
    MESSAGE_BLOCKS_MAX,
    AddRequest,
    Delta,
    Deltas,
    Free,
    Heartbeat,
    LeaseName,
    MarkPrefillCompleted,
    OutputBlocks,
    StatePart,
)

LEASES_MAX: Final = 65_536
"""How many leases a router tells of. Those beyond stay its own knowledge, and are counted as ``untold``."""

PENDING_MAX: Final = 4_096
"""How many deltas may wait to be taken. When there are more they are dropped, and a number with them: the
others see the gap and ask for everything."""

Item = TypeVar("Item", bound=Delta)


class Journal:
    """This router's open leases as the others know them, and the deltas that they have not been told.

    ``on_pending`` is called when there begins to be something to take.
    """

    def __init__(
        self,
        router_id: RouterId,
        *,
        on_pending: Callable[[], None],
        leases_max: int = LEASES_MAX,
        pending_max: int = PENDING_MAX,
    ) -> None:
        self.router_id = router_id
        self.untold = 0
        self.dropped = 0
        self._on_pending = on_pending
        self._leases_max = leases_max
        self._pending_max = pending_max
        self._leases: dict[LeaseName, AddRequest] = {}
        self._grown: dict[LeaseName, int] = {}
        self._pending: list[Delta] = []
        self._number = 0

    def __len__(self) -> int:
        """How many leases are open and told."""
        return len(self._leases)

    @property
    def is_full(self) -> bool:
        """Whether no further lease is told of."""
        return len(self._leases) >= self._leases_max

    # What happens to leases

    def opened(self, request: AddRequest) -> bool:
        """A lease was booked. False when there are too many to tell of it: its name stays unknown here."""
        name = request.name
        if name not in self._leases and self.is_full:
            self.untold += 1
            return False
        self._leases[name] = request
        self._note(request)
        return True

    def moved(self, request: AddRequest) -> None:
        """A lease is elsewhere now; its blocks of output went along."""
        old = self._leases[request.name]
        request = structs.replace(request, output_blocks=old.output_blocks)
        if request != old:
            self._leases[request.name] = request
            self._note(request)

    def prefill_completed(self, name: LeaseName) -> None:
        """Prefill is over, if there was any to do."""
        old = self._leases[name]
        if old.prefill_tokens:
            self._leases[name] = structs.replace(old, prefill_tokens=0)
            self._note(MarkPrefillCompleted(name))

    def grew(self, name: LeaseName, blocks: int) -> None:
        """So many more blocks are full of output: told with the next heartbeat, in one sum a lease."""
        self._grown[name] = self._grown.get(name, 0) + blocks

    def ended(self, name: LeaseName) -> None:
        """The lease is closed."""
        del self._leases[name]
        self._grown.pop(name, None)
        self._note(Free(name))

    def _note(self, delta: Delta) -> None:
        if len(self._pending) >= self._pending_max:
            self.dropped += len(self._pending)
            self._pending.clear()
            self._number += 1
        self._pending.append(delta)
        if len(self._pending) == 1:
            self._on_pending()

    # What is told

    def take(self) -> Iterator[Deltas]:
        """Yield what waits, as numbered messages; nothing waits any more once they are all taken."""
        pending, self._pending = self._pending, []
        for piece in pieces(pending):
            self._number += 1
            yield Deltas(self.router_id, self._number, piece)

    def take_heartbeat(self) -> Iterator[Deltas | Heartbeat]:
        """Yield what waits, the growth of output included, and then a sign of life."""
        for name, blocks in self._grown.items():
            old = self._leases[name]
            new = structs.replace(old, output_blocks=old.output_blocks + blocks)
            self._leases[name] = new
            self._note(OutputBlocks(name, new.output_blocks))
        self._grown.clear()
        yield from self.take()
        yield Heartbeat(self.router_id, self._number, len(self._leases))

    def state(self) -> Iterator[StatePart]:
        """Return every open lease, in parts, as of what was taken so far.

        Raises RuntimeError while something waits: with one number go the same leases, whenever they are told.
        """
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} deltas wait to be taken before the state")
        parts = tuple(pieces(self._leases.values())) or ((),)
        number = self._number
        return (
            StatePart(self.router_id, number, part, len(parts), leases) for part, leases in enumerate(parts)
        )


def pieces(items: Iterable[Item]) -> Iterator[tuple[Item, ...]]:
    """Yield ``items`` in order, in pieces that fit into a message."""
    piece: list[Item] = []
    n_blocks = 0
    for item in items:
        named = count_hashes(item.block_hashes) if isinstance(item, AddRequest) else 0
        if len(piece) == DELTAS_MAX or (piece and n_blocks + named > MESSAGE_BLOCKS_MAX):
            yield tuple(piece)
            piece, n_blocks = [], 0
        piece.append(item)
        n_blocks += named
    if piece:
        yield tuple(piece)
