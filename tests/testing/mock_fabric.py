"""A prefill engine and two decode engines over links with round figures."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrouter.core.events import Stored, count_hashes
from kvrouter.core.ids import ModelName, RequestId, WorkerId
from kvrouter.core.requests import Bootstrap, EngineChunk, EngineRequest, Leg, Sampling
from kvrouter.core.workers import LoadReport, Role
from kvrouter.engines.mock_engine.config import KvLoadFailurePolicy, MockConfig
from kvrouter.engines.mock_engine.fabric import Fabric
from kvrouter.engines.mock_engine.handoff import LegId
from kvrouter.kernel.topology.link_table import Link
from tests.testing.mock_engine import TIMING, zone_links

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

    def prefill(self, name: str = "x", *, room: int | None = None, prompt: list[int] | None = None) -> LegId:
        asked = leg(name, Leg.PREFILL, prompt or PROMPT, max_tokens=1, room=room)
        return self.fabric.submit(self.now, P, asked)

    def decode(
        self,
        name: str = "x",
        *,
        at: WorkerId = D,
        room: int | None = None,
        params: Mapping[str, object] | None = None,
        prompt: list[int] | None = None,
    ) -> LegId:
        asked = leg(name, Leg.DECODE, prompt or PROMPT, max_tokens=5, room=room, params=params)
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
    name: str,
    which: Leg,
    prompt: list[int],
    *,
    max_tokens: int,
    room: int | None = None,
    params: Mapping[str, object] | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        attempt=0,
        leg=which,
        model=ModelName("m"),
        token_ids=array("I", prompt),
        sampling=Sampling(max_tokens=max_tokens),
        bootstrap=None if room is None else Bootstrap("10.0.0.1", 99, room),
        kv_transfer_params=params,
    )


def aggregated_tokens() -> tuple[int, ...]:
    fleet = Fleet()
    party = fleet.fabric.submit(0.0, D, leg("alone", Leg.AGGREGATED, PROMPT, max_tokens=5))
    fleet.until(9.0)
    return fleet.tokens(party)
