"""Laws of the mock engines: honest books, true events, and tokens that no circumstance changes."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvrouter.core.events import KvEvent, Removed, Stored, unpack_hashes
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, EngineRequest, KvTransferParams, Leg
from kvrouter.core.workers import Role
from kvrouter.engines.mock_engine.config import EngineHashing, KvLoadFailurePolicy, MockConfig
from kvrouter.engines.mock_engine.fabric import Fabric, FabricOutputs
from kvrouter.engines.mock_engine.handoff import LegId
from kvrouter.engines.mock_engine.mock_links import Links
from kvrouter.kernel.topology.link_table import Link
from tests.testing.mock_engine import leg, zone_links

PREFILL, DECODE, BOTH = WorkerId(1), WorkerId(2), WorkerId(3)
ROLES = {PREFILL: Role.PREFILL, DECODE: Role.DECODE, BOTH: Role.BOTH}
DOMAINS = {PREFILL: "a", DECODE: "a", BOTH: "b"}
PROMPTS = st.builds(
    lambda base, length, tail: [base] * length + tail,
    st.integers(0, 2),
    st.integers(1, 24),
    st.lists(st.integers(0, 3), max_size=6),
)


class Cache:
    """What a router that applies every event believes: each block with its parent. Strict about nonsense."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, int]] = {}

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, Stored):
            parent: int | None = event.parent
            assert parent is None or parent in self.blocks, "stored under a parent that is not there"
            hashes = unpack_hashes(event.block_hashes)
            for name, block_hash in zip(unpack_hashes(event.engine_hashes), hashes, strict=True):
                assert name not in self.blocks, "stored twice"
                self.blocks[name] = (parent, block_hash)
                parent = name
        elif isinstance(event, Removed):
            for name in unpack_hashes(event.engine_hashes):
                del self.blocks[name]
                assert all(parent != name for parent, _ in self.blocks.values()), "not a leaf"


class MockFleetMachine(RuleBasedStateMachine):
    """Any mix of legs, cancels, slow readers, deaths and time, on engines with little memory."""

    @initialize(
        policy=st.sampled_from(KvLoadFailurePolicy),
        hashing=st.sampled_from(EngineHashing),
        blocks=st.integers(12, 24),
        chunked=st.booleans(),
        plans_ahead=st.booleans(),
    )
    def begin(
        self,
        policy: KvLoadFailurePolicy,
        hashing: EngineHashing,
        blocks: int,
        chunked: bool,
        plans_ahead: bool,
    ) -> None:
        self.now = 0.0
        self.fabric = Fabric(zone_links(same=Link(0.0, 1e6), cross=Link(0.01, 1e5)))
        self.configs = {
            worker_id: MockConfig(
                role=role,
                block_size=4,
                total_kv_blocks=blocks,
                max_num_seqs=3,
                max_num_batched_tokens=32 if not chunked else 10,
                chunked_prefill=chunked,
                async_scheduling=plans_ahead,
                kv_bytes_per_token=1_000,
                kv_wait_expiry_s=5.0,
                kv_load_failure_policy=policy,
                engine_hashing=hashing,
                seed=int(worker_id),
                bootstrap_host="10.0.0.1" if role is Role.PREFILL else None,
                bootstrap_port=99 if role is Role.PREFILL else None,
            )
            for worker_id, role in ROLES.items()
        }
        self.caches: dict[WorkerRank, Cache] = {}
        for worker_id in ROLES:
            self.add(worker_id)
        self.parties: list[LegId] = []
        self.params: list[KvTransferParams] = []
        self.prompts: dict[str, list[int]] = {}
        self.wanted: dict[LegId, int] = {}
        self.got: dict[LegId, int] = {}
        self.ended: set[LegId] = set()
        self.dead: set[LegId] = set()
        self.n_submitted = 0

    def add(self, worker_id: WorkerId) -> None:
        self.fabric.add(self.configs[worker_id], worker_id=worker_id, domains={"zone": DOMAINS[worker_id]})
        self.caches[WorkerRank(worker_id, DpRank(0))] = Cache()

    def submit(self, worker_id: WorkerId, request: EngineRequest, credit_tokens: int = 1_000) -> None:
        party = self.fabric.submit(self.now, worker_id, request, credit_tokens=credit_tokens)
        self.parties.append(party)
        self.wanted[party] = request.sampling.max_tokens

    def name(self) -> str:
        self.n_submitted += 1
        return f"r{self.n_submitted}"

    @rule(
        tokens=PROMPTS,
        max_tokens=st.integers(1, 12),
        credit=st.integers(1, 20),
        where=st.sampled_from([DECODE, BOTH]),
    )
    def submit_aggregated(self, tokens: list[int], max_tokens: int, credit: int, where: WorkerId) -> None:
        self.submit(where, leg(self.name(), Leg.AGGREGATED, tokens, max_tokens=max_tokens), credit)

    @rule(
        tokens=PROMPTS,
        max_tokens=st.integers(1, 12),
        decode_first=st.booleans(),
        where=st.sampled_from([DECODE, BOTH]),
        legs=st.sampled_from(["both", "prefill", "decode"]),
    )
    def submit_pair(
        self, tokens: list[int], max_tokens: int, decode_first: bool, where: WorkerId, legs: str
    ) -> None:
        name = self.name()
        room = self.n_submitted
        pair = [
            (PREFILL, leg(name, Leg.PREFILL, tokens, max_tokens=1, room=room)),
            (where, leg(name, Leg.DECODE, tokens, max_tokens=max_tokens, room=room)),
        ]
        kept = {"both": pair, "prefill": pair[:1], "decode": pair[1:]}[legs]
        for worker_id, request in reversed(kept) if decode_first else kept:
            self.submit(worker_id, request)

    @rule(tokens=PROMPTS)
    def submit_prefill(self, tokens: list[int]) -> None:
        name = self.name()
        self.prompts[name] = tokens
        self.submit(PREFILL, leg(name, Leg.PREFILL, tokens, max_tokens=1))

    @rule(which=st.integers(0, 100), where=st.sampled_from([DECODE, BOTH]), max_tokens=st.integers(1, 12))
    def submit_decode(self, which: int, where: WorkerId, max_tokens: int) -> None:
        if self.params:
            params = self.params.pop(which % len(self.params))
            name = str(params["remote_request_id"]).split("-#")[0]
            request = leg(
                name, Leg.DECODE, self.prompts[name], max_tokens=max_tokens, kv_transfer_params=params
            )
            self.submit(where, request)

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        if self.parties:
            self.fabric.cancel(self.now, self.parties[which % len(self.parties)], "client left")

    @rule(which=st.integers(0, 100), tokens=st.integers(1, 20))
    def give_credit(self, which: int, tokens: int) -> None:
        if self.parties:
            self.fabric.give_credit(self.now, self.parties[which % len(self.parties)], tokens)

    @rule(worker_id=st.sampled_from(sorted(ROLES)))
    def die_and_restart(self, worker_id: WorkerId) -> None:
        self.collect()
        self.fabric.remove(self.now, worker_id)
        self.dead |= {party for party in self.parties if party.worker_id == worker_id}
        self.parties = [party for party in self.parties if party.worker_id != worker_id]
        self.add(worker_id)

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.1, 1.0, 6.0]))
    def live(self, seconds: float) -> None:
        self.now += seconds
        self.fabric.advance(self.now)

    @invariant()
    def books_are_honest_and_events_tell_the_truth(self) -> None:
        assert self.fabric.check_integrity() == []
        self.collect()
        for rank, cache in self.caches.items():
            held = Cache()
            for event in self.fabric.engine(rank.worker_id).snapshot(rank.dp_rank):
                held.apply(event)
            assert held.blocks == cache.blocks

    def collect(self) -> None:
        outputs = self.fabric.take_outputs()
        for rank, events in outputs.events:
            for event in events:
                self.caches[rank].apply(event)
        for party, chunk in outputs.chunks:
            self.read(party, chunk)

    def read(self, party: LegId, chunk: EngineChunk) -> None:
        assert party not in self.ended, "a chunk after the last"
        self.got[party] = self.got.get(party, 0) + len(chunk.token_ids)
        assert self.got[party] <= self.wanted[party]
        if chunk.finish is not None:
            self.ended.add(party)
        if chunk.kv_transfer_params is not None:
            self.params.append(chunk.kv_transfer_params)

    def teardown(self) -> None:
        """Give every reader credit and wait: everything ends by itself and leaves nothing behind."""
        if not hasattr(self, "fabric"):
            return
        self.collect()
        for party in self.parties:
            self.fabric.give_credit(self.now, party, 1_000)
        self.fabric.advance(self.now + 1_000.0)
        self.collect()
        assert self.fabric.idle
        assert self.fabric.check_integrity() == []
        assert self.ended | self.dead >= set(self.parties)


TestMockFleet = MockFleetMachine.TestCase
TestMockFleet.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def generate(
    prompt: list[int], max_tokens: int, *, others: int = 0, chunks_s: float = 1e9, **sizes: int
) -> tuple[int, ...]:
    """Run one request among ``others``, looking every ``chunks_s`` seconds; return its tokens."""
    fabric = Fabric(Links())
    fabric.add(MockConfig(**sizes), worker_id=BOTH, domains={"zone": "a"})  # type: ignore[arg-type]
    for n in range(others):
        fabric.submit(0.0, BOTH, leg(f"other{n}", Leg.AGGREGATED, [n] * 9, max_tokens=20))
    fabric.submit(0.0, BOTH, leg("x", Leg.AGGREGATED, prompt, max_tokens=max_tokens))
    chunks: list[tuple[LegId, EngineChunk]] = []
    now = 0.0
    while not fabric.idle:
        now += chunks_s
        fabric.advance(now)
        outputs: FabricOutputs = fabric.take_outputs()
        chunks += outputs.chunks
    return tuple(t for party, chunk in chunks if party.key.startswith("x-#") for t in chunk.token_ids)


@given(
    prompt=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    max_tokens=st.integers(1, 40),
    others=st.integers(0, 5),
    chunks_s=st.sampled_from([0.003, 0.05, 1.0, 1e6]),
    block_size=st.integers(1, 20),
    max_num_batched_tokens=st.integers(1, 50),
    max_num_seqs=st.integers(1, 4),
    spare_blocks=st.integers(0, 10),
    async_scheduling=st.booleans(),
)
def test_tokens_do_not_depend_on_load_and_scheduling(
    prompt: list[int],
    max_tokens: int,
    others: int,
    chunks_s: float,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    spare_blocks: int,
    async_scheduling: bool,
) -> None:
    longest = max(len(prompt) + max_tokens, 29)
    tokens = generate(
        prompt,
        max_tokens,
        others=others,
        chunks_s=chunks_s,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        total_kv_blocks=-(-longest // block_size) + spare_blocks,
        async_scheduling=async_scheduling,
    )
    assert len(tokens) == max_tokens
    assert tokens == generate(prompt, max_tokens)


@given(
    prompt=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    max_tokens=st.integers(2, 100),
    data=st.data(),
)
def test_resumed_answer_equals_the_undisturbed_one(
    prompt: list[int], max_tokens: int, data: st.DataObject
) -> None:
    undisturbed = generate(prompt, max_tokens)
    n = data.draw(st.integers(1, max_tokens - 1))
    assert generate(prompt + list(undisturbed[:n]), max_tokens - n) == undisturbed[n:]
