"""One mock engine with round figures, and what its outputs say of one request; and a prefill engine and two
decode engines over links with round figures.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrouter.core.events import Stored, count_hashes
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import Bootstrap, EngineChunk, EngineRequest, Leg
from kvrouter.core.timing import Timing
from kvrouter.core.workers import LoadReport, Role
from kvrouter.engines.mock_engine.config import KvLoadFailurePolicy, MockConfig
from kvrouter.engines.mock_engine.engine import MockEngine, Outputs
from kvrouter.engines.mock_engine.fabric import Fabric
from kvrouter.engines.mock_engine.handoff import LegId
from kvrouter.engines.mock_engine.mock_links import Links, Place
from kvrouter.kernel.topology.link_table import ACROSS_LINK, Link, LinkTable
from tests.testing.engine_requests import plain_leg

SAME_LEVEL_LINK = Link(0.0005, 12.5e9)


def zone_links(
    *,
    same: Link = SAME_LEVEL_LINK,
    cross: Link = ACROSS_LINK,
    pairs: Mapping[tuple[str, str], Link] | None = None,
) -> Links:
    """Links inside a zone and between two; ``pairs`` holds two zones in either order, and wins."""
    measured = {("zone", one, other): link for (one, other), link in (pairs or {}).items()}
    table = LinkTable(by_level={"zone": same}, otherwise=cross, pairs=measured)
    return Links(table=table, levels=("zone",), report_level="zone")


def zone(name: str, worker_id: int = 0) -> Place:
    """A worker in a zone."""
    return Place({"zone": name}, WorkerId(worker_id))


# Round figures: a step takes 100 ms for its prefill part and 1 ms a token, and 10 ms for its decode part.
TIMING = Timing(
    prefill_quadratic=0.0,
    prefill_linear=1.0,
    prefill_base=100.0,
    decode_quadratic=0.0,
    decode_linear=0.0,
    decode_base=10.0,
)


def config(
    *,
    role: Role = Role.BOTH,
    block_size: int = 4,
    total_kv_blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_waiting_seqs: int = 16,
    prefix_caching: bool = True,
    chunked_prefill: bool = True,
    dp_size: int = 1,
    dp_start: int = 0,
    eos_every: int | None = None,
    bootstrap_port: int | None = None,
) -> MockConfig:
    return MockConfig(
        role=role,
        block_size=block_size,
        total_kv_blocks=total_kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting_seqs=max_waiting_seqs,
        prefix_caching=prefix_caching,
        chunked_prefill=chunked_prefill,
        dp_size=dp_size,
        dp_start=dp_start,
        eos_every=eos_every,
        bootstrap_host=None if bootstrap_port is None else "10.0.0.1",
        bootstrap_port=bootstrap_port,
        timing=TIMING,
    )


def engine(of: MockConfig) -> MockEngine:
    return MockEngine(of, worker_id=WorkerId(1), engine_id="mock-1")


def tokens_of(outputs: Outputs, name: str) -> tuple[int, ...]:
    return tuple(t for key, chunk in outputs.chunks if key.startswith(f"{name}-#") for t in chunk.token_ids)


def cached_tokens_of(outputs: Outputs, name: str) -> list[int]:
    chunks = [chunk for key, chunk in outputs.chunks if key.startswith(f"{name}-#")]
    return [chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None]


P, D, D2 = WorkerId(1), WorkerId(2), WorkerId(3)
PROMPT = list(range(10))
PREFILL_S = 0.110
# 10 tokens of 100 bytes: 1 s inside a domain, 10 s and 1 s latency between domains.
LINKS = zone_links(same=Link(0.0, 1_000.0), cross=Link(1.0, 100.0))


@dataclass
class Fleet:
    """A prefill engine in domain a, decode engines in a and b; remembers what each leg was answered."""

    policy: KvLoadFailurePolicy = KvLoadFailurePolicy.FAIL
    decode_blocks: int = 64
    prefill_blocks: int = 64
    expiry_s: float = 60.0
    d2_handshake: str = ""
    now: float = 0.0
    fabric: Fabric = field(default_factory=lambda: Fabric(LINKS))
    answers: dict[LegId, list[tuple[float, EngineChunk]]] = field(default_factory=dict)
    stored: dict[WorkerId, int] = field(default_factory=dict)
    loads: dict[WorkerId, LoadReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for worker_id, role, domain, blocks in (
            (P, Role.PREFILL, "a", self.prefill_blocks),
            (D, Role.DECODE, "a", self.decode_blocks),
            (D2, Role.DECODE, "b", self.decode_blocks),
        ):
            self.fabric.add(
                MockConfig(
                    role=role,
                    block_size=4,
                    total_kv_blocks=blocks,
                    kv_bytes_per_token=100,
                    timing=TIMING,
                    kv_load_failure_policy=self.policy,
                    kv_wait_expiry_s=self.expiry_s,
                    handshake=self.d2_handshake if worker_id == D2 else "",
                    bootstrap_host="10.0.0.1" if role is Role.PREFILL else None,
                    bootstrap_port=99 if role is Role.PREFILL else None,
                ),
                worker_id=worker_id,
                domains={"zone": domain},
            )

    def until(self, now: float) -> None:
        """Live moment by moment until ``now``."""
        while (time := self.fabric.next_time()) is not None and time <= now:
            self.fabric.advance(time)
            self._collect(time)
        self.now = now
        self._collect(now)

    def _collect(self, at: float) -> None:
        outputs = self.fabric.take_outputs()
        self.loads.update((load.rank.worker_id, load) for load in outputs.loads)
        for party, chunk in outputs.chunks:
            self.answers.setdefault(party, []).append((at, chunk))
        for rank, events in outputs.events:
            n_stored = sum(count_hashes(e.engine_hashes) for e in events if isinstance(e, Stored))
            self.stored[rank.worker_id] = self.stored.get(rank.worker_id, 0) + n_stored

    def prefill(
        self,
        name: str = "x",
        *,
        at: WorkerId = P,
        room: int | None = None,
        params: Mapping[str, object] | None = None,
        prompt: list[int] | None = None,
    ) -> LegId:
        fields: dict[str, Any] = {"room": room, "kv_transfer_params": params}
        return self.fabric.submit(
            self.now, at, leg(name, Leg.PREFILL, prompt or PROMPT, max_tokens=1, **fields)
        )

    def decode(
        self,
        name: str = "x",
        *,
        at: WorkerId = D,
        room: int | None = None,
        params: Mapping[str, object] | None = None,
        prompt: list[int] | None = None,
    ) -> LegId:
        asked = leg(name, Leg.DECODE, prompt or PROMPT, max_tokens=5, room=room, kv_transfer_params=params)
        return self.fabric.submit(self.now, at, asked)

    def cancel(self, party: LegId) -> None:
        self.fabric.cancel(self.now, party, "client left")

    def tokens(self, party: LegId) -> tuple[int, ...]:
        return tuple(t for _, chunk in self.answers.get(party, []) for t in chunk.token_ids)

    def first_at(self, party: LegId) -> float:
        return self.answers[party][0][0]

    def last(self, party: LegId) -> EngineChunk:
        return self.answers[party][-1][1]

    def params(self, party: LegId) -> Mapping[str, object]:
        params = self.last(party).kv_transfer_params
        assert params is not None
        return params

    def assert_idle(self) -> None:
        assert self.fabric.idle
        assert self.fabric.check_integrity() == []


def leg(
    name: str, which: Leg, prompt: Iterable[int], *, max_tokens: int, room: int | None = None, **fields: Any
) -> EngineRequest:
    """A leg that meets its other in ``room`` of the prefill engine."""
    bootstrap = None if room is None else Bootstrap("10.0.0.1", 99, room)
    return plain_leg(name, prompt, which, max_tokens=max_tokens, bootstrap=bootstrap, **fields)


def aggregated_tokens() -> tuple[int, ...]:
    fleet = Fleet()
    party = fleet.fabric.submit(0.0, D, leg("alone", Leg.AGGREGATED, PROMPT, max_tokens=5))
    fleet.until(9.0)
    return fleet.tokens(party)
