"""An engine that leaps over steps in which nothing changes ends up where one that makes every step does."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import KvrouterError
from kvrouter.core.events import KvEvent
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.requests import Bootstrap, EngineChunk, FinishReason, Leg
from kvrouter.core.timing import Timing
from kvrouter.core.workers import LoadReport, Role
from kvrouter.engines.mock_engine.config import EngineHashing, KvLoadFailurePolicy, MockConfig
from kvrouter.engines.mock_engine.fabric import Fabric
from kvrouter.engines.mock_engine.handoff import LegId
from kvrouter.engines.mock_engine.mock_links import Links
from kvrouter.engines.mock_engine.sequence import LegStamps
from kvrouter.kernel.topology.link_table import Link
from tests.testing.engine_requests import plain_leg
from tests.testing.mock_engine import zone_links

PREFILL, DECODE, BOTH = WorkerId(1), WorkerId(2), WorkerId(3)
ROLES = {PREFILL: Role.PREFILL, DECODE: Role.DECODE, BOTH: Role.BOTH}

MEASURED = Timing(
    prefill_attention=1e-3, decode_linear=0.0, decode_sequence=0.3, decode_kv_token=0.07, mixed_kv_token=0.011
)
"""No two of its steps are alike."""


ANSWERED = frozenset({FinishReason.LENGTH, FinishReason.STOP})


class Step(NamedTuple):
    """What happens, and how long nothing else does after that: up to the very moment in which the fourth step
    from now ends where ``gap_s`` is -4.
    """

    what: str
    tokens: list[int]
    max_tokens: int
    credit: int
    which: int
    gap_s: float


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["aggregated", "aggregated", "pair", "credit", "cancel", "die"]),
        st.builds(lambda base, n, tail: [base] * n + tail, st.integers(0, 2), st.integers(1, 30),
                  st.lists(st.integers(0, 3), max_size=6)),
        st.integers(1, 40),
        st.sampled_from([1, 7, 1_000, 1_000]),
        st.integers(0, 7),
        st.sampled_from([0.0, 0.003, 0.0371, 0.21, 1.7, -1.0, -4.0, -7.0, -11.0]),
    ),
    max_size=14,
)  # fmt: skip


class Seen:
    """What came out of a fabric, in the form in which leaps and steps must agree."""

    def __init__(self) -> None:
        self.events: list[tuple[float, WorkerRank, KvEvent]] = []
        self.tokens: dict[LegId, list[int]] = {}
        self.first_s: dict[LegId, float] = {}
        self.ended: dict[LegId, tuple[float, EngineChunk]] = {}
        self.cached: dict[LegId, int] = {}
        self.loads: dict[WorkerRank, LoadReport] = {}
        self.legs: list[LegStamps] = []

    def take(self, fabric: Fabric, now: float) -> None:
        outputs = fabric.take_outputs()
        self.events += [(now, rank, event) for rank, events in outputs.events for event in events]
        self.loads.update((load.rank, load) for load in outputs.loads)
        for party, chunk in outputs.chunks:
            if chunk.token_ids:
                self.first_s.setdefault(party, now)
                self.tokens.setdefault(party, []).extend(chunk.token_ids)
            if chunk.cached_tokens is not None:
                self.cached[party] = chunk.cached_tokens
            if chunk.finish is not None:
                self.ended[party] = (now, EngineChunk(finish=chunk.finish, error=chunk.error))


def lived(
    steps: list[Step],
    *,
    leaps: bool,
    blocks: int,
    policy: KvLoadFailurePolicy,
    eos_every: int | None,
    chunked: bool,
    plans_ahead: bool,
    timing: Timing,
    moments: list[float],
) -> tuple[Seen, list[str]]:
    """Do the steps, moment by moment, until all is idle. ``moments`` are those of the steps: it is filled
    where they are not known yet.
    """
    fabric = Fabric(zone_links(same=Link(0.0, 1e6), cross=Link(0.01, 1e5)), leaps=leaps)
    for worker_id, role in ROLES.items():
        is_prefill = role is Role.PREFILL
        config = MockConfig(
            role=role,
            block_size=4,
            total_kv_blocks=blocks,
            max_num_seqs=3,
            max_num_batched_tokens=10 if chunked else 64,
            chunked_prefill=chunked,
            async_scheduling=plans_ahead,
            timing=timing,
            kv_bytes_per_token=1_000,
            kv_wait_expiry_s=5.0,
            kv_load_failure_policy=policy,
            engine_hashing=EngineHashing.DETERMINISTIC,
            eos_every=eos_every,
            dp_size=2 if worker_id == BOTH else 1,
            seed=int(worker_id),
            bootstrap_host="10.0.0.1" if is_prefill else None,
            bootstrap_port=99 if is_prefill else None,
        )
        fabric.add(config, worker_id=worker_id, domains={"zone": "b" if worker_id == DECODE else "a"})
    seen = Seen()
    fabric.watch_legs(seen.legs.append)
    parties: list[LegId] = []
    now = 0.0
    alive = set(ROLES)

    def live_until(end: float) -> None:
        while (time := fabric.next_time()) is not None and time < end:
            fabric.advance(time)
            seen.take(fabric, time)

    def moment_after(n_moments: int) -> float:
        time = now
        for at in range(n_moments):
            next_s = fabric.next_time()
            if next_s is None:
                return time + 0.001
            live_until(time := next_s)
            if at < n_moments - 1:
                fabric.advance(time)
                seen.take(fabric, time)
        return time

    for number, step in enumerate(steps):
        for worker_id in sorted(alive):
            if step.what == "die":
                fabric.catch_up(now, worker_id)
        seen.take(fabric, now)
        done(fabric, step, number, now, parties, alive)
        seen.take(fabric, now)
        if len(moments) == number:
            moments.append(now + step.gap_s if step.gap_s >= 0.0 else moment_after(int(-step.gap_s)))
        now = moments[number]
        live_until(now)
    while (time := fabric.next_time()) is not None:
        fabric.advance(time)
        seen.take(fabric, time)
        if time > 1e4:
            break
    return seen, fabric.check_integrity()


def done(
    fabric: Fabric, step: Step, number: int, now: float, parties: list[LegId], alive: set[WorkerId]
) -> None:
    def submit(
        worker_id: WorkerId, leg: Leg, max_tokens: int, bootstrap: Bootstrap | None, rank: int
    ) -> None:
        if worker_id not in alive:
            return
        request = plain_leg(
            f"r{number}", step.tokens, leg, max_tokens=max_tokens, dp_rank=DpRank(rank), bootstrap=bootstrap
        )
        try:
            parties.append(fabric.submit(now, worker_id, request, credit_tokens=step.credit))
        except KvrouterError:
            return

    match step.what:
        case "aggregated":
            where = BOTH if step.which % 2 else DECODE
            submit(where, Leg.AGGREGATED, step.max_tokens, None, step.which % 4 // 2 if where == BOTH else 0)
        case "pair":
            room = Bootstrap("10.0.0.1", 99, number)
            submit(PREFILL, Leg.PREFILL, 1, room, 0)
            submit(DECODE, Leg.DECODE, step.max_tokens, room, 0)
        case "credit" if parties:
            fabric.give_credit(now, parties[step.which % len(parties)], step.credit)
        case "cancel" if parties:
            fabric.cancel(now, parties[step.which % len(parties)], "its client left")
        case "die" if len(alive) > 1:
            worker_id = sorted(alive)[step.which % len(alive)]
            alive.discard(worker_id)
            fabric.remove(now, worker_id)


@given(
    steps=STEPS,
    blocks=st.integers(10, 24),
    policy=st.sampled_from(KvLoadFailurePolicy),
    eos_every=st.sampled_from([None, None, 9]),
    chunked=st.booleans(),
    plans_ahead=st.booleans(),
    timing=st.sampled_from([Timing(), MEASURED]),
)
@settings(max_examples=500)
def test_leaping_over_steps_equals_making_every_step(
    steps: list[Step],
    blocks: int,
    policy: KvLoadFailurePolicy,
    eos_every: int | None,
    chunked: bool,
    plans_ahead: bool,
    timing: Timing,
) -> None:
    moments: list[float] = []
    (stepped, problems), (leapt, problems_of_leaps) = (
        lived(
            steps,
            leaps=leaps,
            blocks=blocks,
            policy=policy,
            eos_every=eos_every,
            chunked=chunked,
            plans_ahead=plans_ahead,
            timing=timing,
            moments=moments,
        )
        for leaps in (False, True)
    )
    assert (problems, problems_of_leaps) == ([], [])
    assert leapt.events == stepped.events
    assert leapt.first_s == stepped.first_s
    assert leapt.ended == stepped.ended
    assert leapt.tokens == stepped.tokens
    assert leapt.cached == stepped.cached
    assert leapt.loads == stepped.loads
    assert leapt.legs == stepped.legs
    answered = {party: at for party, (at, last) in stepped.ended.items() if last.finish in ANSWERED}
    assert {(leg.worker_id, leg.first_s, leg.last_s) for leg in stepped.legs} == {
        (party.worker_id, stepped.first_s[party], at) for party, at in answered.items()
    }


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_long_answer_takes_fewer_than_40_leaps(plans_ahead: bool) -> None:
    config = MockConfig(block_size=64, total_kv_blocks=64, async_scheduling=plans_ahead, timing=MEASURED)
    counts = []
    for leaps in (False, True):
        fabric = Fabric(Links(), leaps=leaps)
        fabric.add(config, worker_id=BOTH, domains={})
        fabric.submit(0.0, BOTH, plain_leg("r", range(100), max_tokens=640))
        moments = 0
        while (time := fabric.next_time()) is not None:
            fabric.advance(time)
            moments += 1
        counts.append(moments)
    stepped, leapt = counts
    assert stepped > 640
    assert leapt < 40
