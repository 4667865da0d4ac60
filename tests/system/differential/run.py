"""Calls made twice: what differs, and which rows of the table say why."""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvrouter.settings.router_settings import KvRouterConfig
from tests.system.differential.calls import Call
from tests.system.differential.compare import Found, Seen, differences
from tests.system.differential.differences import DIFFERENCES, Difference
from tests.system.differential.upstream import Upstream, upstream
from tests.system.differential.vllm_answers import MODEL, Asked
from tests.system.differential.wire import parsed, received
from tests.testing.mock_fleet import fleet_file
from tests.testing.mock_server import mock_server


@dataclass
class Ways:
    """Two engines that answer alike, the way to the first of them, and the way through kvrouter."""

    engines: Sequence[Upstream]
    router: tuple[str, int]

    async def alone(self, call: Call) -> Seen:
        """What the engine alone answers."""
        return Seen(parsed(await self._received(self.engines[0].address, call), call.method), self._asked())

    async def through(self, call: Call) -> tuple[bytes, Seen]:
        """What comes through kvrouter, as it came and as it is read."""
        raw = await self._received(self.router, call)
        return raw, Seen(parsed(raw, call.method), self._asked())

    async def _received(self, address: tuple[str, int], call: Call) -> bytes:
        for engine in self.engines:
            engine.script = call.script
            engine.asked.clear()
        return await received(address, call)

    def _asked(self) -> Sequence[Asked]:
        return [asked for engine in self.engines for asked in engine.asked]


@asynccontextmanager
async def both_ways() -> AsyncIterator[Ways]:
    """The router before two engines of one model, whose errors leave no trace from one call to the next."""
    async with upstream() as first, upstream() as second:
        groups = "".join(
            f"  - {{name: w{number}, engine: {{kind: vllm, url: '{engine.url}', kv_events: false}}}}\n"
            for number, engine in enumerate((first, second))
        )
        fleet = fleet_file(f"version: 1\nmodels: [{{name: {MODEL}, tokenizer: mock}}]\nworkers:\n{groups}")
        async with mock_server(fleet, router=KvRouterConfig(circuit_failures=0)) as here:
            yield Ways((first, second), here.system.address)


def explained(
    call: Call, alone: Seen, through: Seen, table: Iterable[Difference] = DIFFERENCES
) -> tuple[list[Difference], list[Found]]:
    """The rows that say why these ways differ, and what no row does."""
    rows, others = [], []
    for found in differences(alone, through):
        row = next((row for row in table if row.field == found.field and row.holds(call, alone, found)), None)
        if row is None:
            others.append(found)
        else:
            rows.append(row)
    return rows, others


@dataclass
class Tally:
    """What became of calls that were made twice."""

    same: list[str] = field(default_factory=list)
    by_table: list[str] = field(default_factory=list)
    different: dict[str, list[Found]] = field(default_factory=dict)
    rows: Counter[Difference] = field(default_factory=Counter)

    def add(self, call: Call, alone: Seen, through: Seen) -> None:
        """Count one call."""
        rows, others = explained(call, alone, through)
        self.rows.update(set(rows))
        if others:
            self.different[call.name] = others
        elif any(row.field not in HEADERS_OF_ALL for row in rows):
            self.by_table.append(call.name)
        else:
            self.same.append(call.name)

    def __str__(self) -> str:
        n = len(self.same) + len(self.by_table) + len(self.different)
        lines = [
            f"{n} calls: {len(self.same)} same, {len(self.by_table)} different by the table, "
            f"{len(self.different)} different"
        ]
        lines += [f"{count:>6}  {row.field}: {row.calls}" for row, count in self.rows.most_common()]
        for name, others in self.different.items():
            lines.append(f"different: {name}")
            for found in others:
                lines += [
                    f"    {found.field}",
                    f"      alone   {found.alone!r:.2400}",
                    f"      through {found.through!r:.2400}",
                ]
        return "\n".join(lines)


HEADERS_OF_ALL = frozenset(
    row.field
    for row in DIFFERENCES
    if row.field.startswith(("header x-request", "header x-kv", "header vary"))
)
"""Headers in which every answer differs: with these alone it counts as the same."""
