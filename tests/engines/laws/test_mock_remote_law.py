"""Two processes that hand KV over: with an instant way between them they do what one does; with a slow one
that breaks, everything still ends, and nobody keeps what nobody comes for.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineRequest, FinishReason, KvLoss, Leg
from kvrouter.core.workers import LoadReport, Role
from kvrouter.engines.mock_engine.config import KvLoadFailurePolicy, MockConfig
from kvrouter.engines.mock_engine.fabric import Fabric
from kvrouter.engines.mock_engine.handoff import LegId, RemoteSink
from kvrouter.engines.mock_engine.remote import Failed, Peer, PullId, SinkMessage, SourceMessage, ToSource
from kvrouter.engines.mock_engine.sequence import sequence_key
from kvrouter.kernel.topology.link_table import Link
from tests.testing.mock_engine import TIMING, leg, zone_links

PREFILL, DECODE, FAR_DECODE = WorkerId(1), WorkerId(2), WorkerId(3)
HERE = Peer("10.0.0.1", 99)
# Odd latencies keep a transfer's end off the moments at which steps end: of one moment, any order is right.
LINKS = zone_links(same=Link(0.00712345, 5_000.0), cross=Link(0.10198765, 900.0))
EXPIRY_S = 7.7
FOREVER_S = 1_000.0


class Act(NamedTuple):
    """After ``gap_s``, something happens to request ``which``."""

    gap_s: float
    what: str
    which: int


@dataclass
class Request:
    """One request of the script: how its legs meet, where it decodes, and what it asks."""

    bootstrap: bool
    decode_at: WorkerId
    prompt: list[int]


class Answer(NamedTuple):
    """What a leg was answered: each chunk's second, its tokens and how it ended."""

    at_s: float
    tokens: tuple[int, ...]
    finish: FinishReason | None


class Said(NamedTuple):
    """A word that is under way: words that arrive at one moment are heard in the order of ``number``."""

    heard_s: float
    number: int
    hear: Callable[[], None]


@dataclass
class Way:
    """The words of one pull that are under way; they keep their order."""

    sink: RemoteSink
    to_source: deque[Said] = field(default_factory=deque)
    to_sink: deque[Said] = field(default_factory=deque)


class World:
    """The prefill engine and the decode engines, in one process or in two, and the ways between them."""

    def __init__(
        self,
        *,
        apart: bool,
        policy: KvLoadFailurePolicy,
        blocks: int,
        refuses: bool,
        delays: Iterator[float],
    ) -> None:
        self.now = 0.0
        self.source, self.sink = Fabric(LINKS), Fabric(LINKS)
        self.source.address = HERE
        if not apart:
            self.sink = self.source
        self.apart = apart
        self.delays = delays
        self.ways: dict[PullId, Way] = {}
        self.numbers = count(1)
        self.configs = {
            worker_id: MockConfig(
                role=role,
                block_size=4,
                total_kv_blocks=blocks,
                kv_bytes_per_token=100,
                timing=TIMING,
                kv_wait_expiry_s=EXPIRY_S,
                kv_load_failure_policy=policy,
                handshake="other" if refuses and worker_id == FAR_DECODE else "",
                bootstrap_host=HERE.host if role is Role.PREFILL else None,
                bootstrap_port=HERE.port if role is Role.PREFILL else None,
            )
            for worker_id, role in ((PREFILL, Role.PREFILL), (DECODE, Role.DECODE), (FAR_DECODE, Role.DECODE))
        }
        for worker_id in self.configs:
            self.begin(worker_id)
        self.answers: dict[LegId, list[Answer]] = {}
        self.loads: dict[tuple[float, WorkerId], LoadReport] = {}
        self.params: dict[str, object] = {}
        self.submitted: set[LegId] = set()
        self.dead: set[LegId] = set()

    def fabric_of(self, worker_id: WorkerId) -> Fabric:
        return self.source if worker_id == PREFILL else self.sink

    def begin(self, worker_id: WorkerId) -> None:
        domain = "b" if worker_id == FAR_DECODE else "a"
        self.fabric_of(worker_id).add(self.configs[worker_id], worker_id=worker_id, domains={"zone": domain})

    def die(self, worker_id: WorkerId) -> None:
        self.fabric_of(worker_id).remove(self.now, worker_id)
        self.dead |= {party for party in self.submitted if party.worker_id == worker_id}
        self.begin(worker_id)
        self.talk()

    def submit(self, worker_id: WorkerId, request: EngineRequest) -> None:
        fabric = self.fabric_of(worker_id)
        source_at = fabric.source_elsewhere(request) if self.apart else None
        assert (source_at == HERE) == (self.apart and request.leg is Leg.DECODE)
        self.submitted.add(fabric.submit(self.now, worker_id, request, source_at=source_at))
        self.talk()

    def cancel(self, party: LegId) -> None:
        self.fabric_of(party.worker_id).cancel(self.now, party, "client left")
        self.talk()

    def live(self, until: float) -> None:
        """Live moment by moment until ``until``."""
        while (time := self.next_time()) is not None and time <= until:
            self.now = time
            self.hear()
            for fabric in {self.source, self.sink}:
                fabric.advance(time)
            self.talk()
            self.collect()
        self.now = until
        self.collect()

    def next_time(self) -> float | None:
        times = [time for fabric in (self.source, self.sink) if (time := fabric.next_time()) is not None]
        for way in self.ways.values():
            times += [said.heard_s for said in (*way.to_source, *way.to_sink)]
        return min(times, default=None)

    def talk(self) -> None:
        """Send what is to be reported on its way, and hear what arrives at once."""
        while outputs := self.source.pulls.take_outputs() + (
            [] if not self.apart else self.sink.pulls.take_outputs()
        ):
            assert self.apart, "one process has nobody to talk to"
            for output in outputs:
                if not isinstance(output, ToSource):
                    for pull, way in self.ways.items():
                        if way.sink == output.sink:
                            self.say(way.to_sink, partial(self.to_sink, pull, output.message))
                elif output.message is None:
                    self.cut(output.pull, both=False)
                else:
                    way = self.ways.setdefault(output.pull, Way(RemoteSink(next(self.numbers))))
                    self.say(way.to_source, partial(self.to_source, way.sink, output.message))
            self.hear()

    def say(self, words: deque[Said], hear: Callable[[], None]) -> None:
        heard_s = self.now + next(self.delays)
        if words:
            heard_s = max(heard_s, words[-1].heard_s)
        words.append(Said(heard_s, next(self.numbers), hear))

    def to_source(self, sink: RemoteSink, word: SinkMessage) -> None:
        self.source.receive_from_sink(self.now, sink, word)

    def to_sink(self, pull: PullId, word: SourceMessage) -> None:
        self.sink.receive_from_source(self.now, pull, word)

    def hear(self) -> None:
        """Hear what has arrived, word by word."""
        while True:
            queues = [queue for way in self.ways.values() for queue in (way.to_source, way.to_sink) if queue]
            queue = min(queues, key=lambda queue: queue[0][:2], default=None)
            if queue is None or queue[0].heard_s > self.now:
                return
            queue.popleft().hear()

    def cut(self, pull: PullId, *, both: bool) -> None:
        """The way is lost; the sink's process knows already when it cut the way itself."""
        way = self.ways.pop(pull, None)
        if way is not None:
            self.source.receive_from_sink(self.now, way.sink, None)
            if both:
                self.sink.receive_from_source(self.now, pull, Failed(KvLoss.BROKEN, "the way is lost"))

    def collect(self) -> None:
        for fabric in {self.source, self.sink}:
            outputs = fabric.take_outputs()
            for load in outputs.loads:
                self.loads[round(self.now, 6), load.rank.worker_id] = load
            for party, chunk in outputs.chunks:
                answer = Answer(round(self.now, 6), chunk.token_ids, chunk.finish)
                self.answers.setdefault(party, []).append(answer)
                if chunk.kv_transfer_params is not None:
                    self.params[str(party.key)] = chunk.kv_transfer_params
            assert fabric.check_integrity() == []

    @property
    def idle(self) -> bool:
        return self.source.idle and self.sink.idle


def play(world: World, requests: list[Request], acts: list[Act]) -> None:
    """Let the script happen; what cannot happen (a leg that is there, KV that is not ready) does not."""
    for act in acts:
        world.live(world.now + act.gap_s)
        which = act.which % len(requests)
        wanted = requests[which]
        room = which if wanted.bootstrap else None
        prefill = leg(f"r{which}", Leg.PREFILL, wanted.prompt, max_tokens=1, room=room)
        source = LegId(PREFILL, sequence_key(prefill))
        params = world.params.get(str(source.key))
        decode = leg(
            f"r{which}",
            Leg.DECODE,
            wanted.prompt,
            max_tokens=5,
            room=room,
            kv_transfer_params=params if isinstance(params, dict) else None,
        )
        sink = LegId(wanted.decode_at, sequence_key(decode))
        may_decode = sink not in world.submitted and (wanted.bootstrap or params is not None)
        if act.what in ("prefill", "both") and source not in world.submitted:
            world.submit(PREFILL, prefill)
        if act.what in ("decode", "both") and may_decode:
            world.submit(wanted.decode_at, decode)
        match act.what:
            case "cancel prefill":
                world.cancel(source)
            case "cancel decode":
                world.cancel(sink)
            case "prefill dies":
                world.die(PREFILL)
            case "decode dies":
                world.die(wanted.decode_at)
            case "cut" if world.ways:
                world.cut(sorted(world.ways)[act.which % len(world.ways)], both=True)
                world.talk()
    world.live(world.now + FOREVER_S)


REQUESTS = st.lists(
    st.builds(
        Request,
        bootstrap=st.booleans(),
        decode_at=st.sampled_from([DECODE, FAR_DECODE]),
        prompt=st.builds(
            lambda base, length: [base] * length + [99, base], st.integers(0, 2), st.integers(1, 24)
        ),
    ),
    min_size=2,
    max_size=4,
)
LIKELY = ["both"] * 4 + ["prefill", "decode"]
ENDINGS = ["cancel prefill", "cancel decode", "prefill dies", "decode dies"]


def acts_of(kinds: list[str]) -> st.SearchStrategy[list[Act]]:
    gaps_s = st.sampled_from([0.0, 0.0137, 0.1093, 0.1671, 0.3371, 1.2713, 9.1301])
    act = st.builds(Act, gaps_s, st.sampled_from(kinds), st.integers(0, 3))
    return st.lists(act, min_size=3, max_size=16)


POLICIES = st.sampled_from(KvLoadFailurePolicy)
BLOCKS = st.integers(8, 24)


@settings(deadline=None, max_examples=150)
@given(
    requests=REQUESTS, acts=acts_of(LIKELY + ENDINGS), policy=POLICIES, blocks=BLOCKS, refuses=st.booleans()
)
@example(  # the blocks that a decode leg is given while its KV is still to come are load
    requests=[
        Request(True, DECODE, [0] * 17),
        Request(False, DECODE, [0, 99, 0]),
        Request(True, DECODE, [0] * 13),
    ],
    acts=[Act(0.0, "both", 1), Act(0.0, "decode", 0), Act(0.0, "both", 2)],
    policy=KvLoadFailurePolicy.FAIL,
    blocks=8,
    refuses=False,
)
def test_handoff_between_two_processes_equals_one_process(
    requests: list[Request], acts: list[Act], policy: KvLoadFailurePolicy, blocks: int, refuses: bool
) -> None:
    at_once = iter(lambda: 0.0, None)
    one = World(apart=False, policy=policy, blocks=blocks, refuses=refuses, delays=at_once)
    two = World(apart=True, policy=policy, blocks=blocks, refuses=refuses, delays=at_once)
    for world in (one, two):
        play(world, requests, acts)
        assert world.idle
    assert two.answers == one.answers
    assert two.loads == one.loads
    assert two.source.network.carried() == {}
    assert two.sink.network.carried() == one.source.network.carried()


@settings(deadline=None, max_examples=150)
@given(
    requests=REQUESTS,
    acts=acts_of([*LIKELY, *ENDINGS, "cut"]),
    policy=POLICIES,
    blocks=BLOCKS,
    refuses=st.booleans(),
    delays_s=st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.7]), min_size=1, max_size=20),
)
def test_every_handoff_ends_whatever_the_delays_and_breaks(
    requests: list[Request],
    acts: list[Act],
    policy: KvLoadFailurePolicy,
    blocks: int,
    refuses: bool,
    delays_s: list[float],
) -> None:
    rounds = count()
    delays = iter(lambda: delays_s[next(rounds) % len(delays_s)], None)
    world = World(apart=True, policy=policy, blocks=blocks, refuses=refuses, delays=delays)
    play(world, requests, acts)
    assert world.idle
    for party in world.submitted - world.dead:
        assert world.answers[party][-1].finish is not None
