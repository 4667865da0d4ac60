"""What a client may teach a placer: first tokens that are none, pins, and one client among others."""

from array import array
from collections import Counter, deque
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from random import Random

import pytest
from msgspec import structs

from kvrouter.core.constraints import Pin, RouterMode
from kvrouter.core.ids import Epoch, Slot, WorkerId
from kvrouter.core.requests import CallRoute, ClientCall, GenerateRequest
from kvrouter.core.workers import Role
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.placement import Draw, Placement
from kvrouter.kernel.routing.interface import RoutingSettings
from kvrouter.kernel.topology.link_table import LinkTable
from tests.testing.placement_events import A_DRAW, RecordedPlacementEvents, first_attempt, plain_placer
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card, generate_request

HONEST_TOKENS, HONEST_ANSWER, HONEST_PER_S = 2200, 8, 14.0
ATTACKER, ATTACKERS, ATTACKER_TOKENS = 7, 2, 1200
PROMPT_TOKEN_S, TOKEN_S = 11e-6, 0.015
PHASE_S = 30.0


def request_of(
    number: int, tokens: int, *, stream: bool = True, pin: int | None = None, client: int = 0
) -> GenerateRequest:
    return structs.replace(
        generate_request(request_id=f"r{number}"),
        token_ids=array("I", range(number, number + tokens)),
        call=ClientCall(CallRoute.COMPLETION, b"{}", stream=stream, resumable=False),
        pin=None if pin is None else Pin(WorkerId(pin)),
        client=client,
    )


class Engines:
    """Two equal engines on a clock that a test turns: each computes one prompt at a time."""

    def __init__(self, *roles: Role, cost: str = "time") -> None:
        fleet = Fleet(MODEL, BLOCK_SIZE)
        for worker_id, role in enumerate(roles or (Role.BOTH, Role.BOTH), start=1):
            joins = card(worker_id, role, zone="a")
            config = structs.replace(
                joins.runtime_config, kv_bytes_per_token=100_000, max_num_seqs=64, total_kv_blocks=20_000
            )
            fleet.join(structs.replace(joins, runtime_config=config))
        self.events = RecordedPlacementEvents()
        settings = RoutingSettings(cost=cost, links=LinkTable())
        self.placer = plain_placer(fleet, settings=settings, events=self.events)
        self.now_s = 0.0
        self._free_s = Counter[int]()
        self._numbers = count()
        self._due: list[tuple[float, int, str, Placement, int, bool, int]] = []

    def place(self, request: GenerateRequest) -> Placement:
        turn = next(self._numbers)
        return self.placer.place(
            first_attempt(request), Draw(Random(turn).getrandbits(64), turn, turn), now_s=self.now_s
        )

    def send(self, tokens: int, answer: int, *, stream: bool, pin: int | None = None, client: int = 0) -> int:
        """Send one request; return the worker that takes it. Its end comes by :meth:`run`."""
        request = request_of(next(self._numbers), tokens, stream=stream, pin=pin, client=client)
        placement = self.place(request)
        worker = placement.decision.decode.rank.worker_id
        first_s = max(self.now_s, self._free_s[worker]) + PROMPT_TOKEN_S * tokens
        self._free_s[worker] = first_s  # type: ignore[assignment]
        end_s = first_s + TOKEN_S * answer
        heappush(
            self._due,
            (first_s if stream else end_s, next(self._numbers), "first", placement, answer, stream, client),
        )
        heappush(self._due, (end_s, next(self._numbers), "end", placement, answer, stream, client))
        return worker

    def queued(self, now_s: float) -> int:
        """Return the prompt tokens that wait at the first worker then."""
        self.now_s = now_s
        probe = self.place(request_of(2, BLOCK_SIZE))
        tokens = int(self.placer.ledger.columns().prefill_tokens[Slot(0)]) - BLOCK_SIZE
        self.placer.release(probe, now_s=now_s)
        return tokens

    def shares(self, seconds: float, *, stream: bool | None, pin: int | None = 1) -> tuple[float, int]:
        """Serve honest requests beside attackers that stream, do not, or are not there; return the share of
        the honest ones that worker 1 got, and how many they were.
        """
        rng, until_s = Random(5), self.now_s + seconds
        got = Counter[int]()
        running = 0
        next_s = self.now_s
        while self.now_s < until_s:
            while stream is not None and running < ATTACKERS:
                self.send(ATTACKER_TOKENS, 14, stream=stream, pin=pin, client=ATTACKER)
                running += 1
            if self._due and self._due[0][0] <= next_s:
                self.now_s, _, what, placement, answer, _, client = heappop(self._due)
                if what == "first":
                    self.placer.first_token(placement, now_s=self.now_s)
                else:
                    self.placer.release(placement, now_s=self.now_s, tokens=answer)
                    running -= client == ATTACKER
                continue
            self.now_s = next_s
            got[self.send(HONEST_TOKENS, HONEST_ANSWER, stream=True, client=1 + rng.randrange(3))] += 1
            next_s += rng.expovariate(HONEST_PER_S)
        return got[1] / got.total(), got.total()


@pytest.mark.parametrize("cost", ["time", "blocks"])
@pytest.mark.parametrize("pin", [1, 2, None])
def test_unstreamed_calls_of_a_client_shift_others_no_more_than_streams(pin: int | None, cost: str) -> None:
    streamed, unstreamed = Engines(cost=cost), Engines(cost=cost)
    for engines in (streamed, unstreamed):
        engines.shares(PHASE_S, stream=None)
    beside_streams, n_requests = streamed.shares(PHASE_S, stream=True, pin=pin)
    attacked, _ = unstreamed.shares(PHASE_S, stream=False, pin=pin)
    assert n_requests >= 400
    assert abs(attacked - beside_streams) <= 0.05


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pin", [1, 2, None])
def test_other_clients_are_placed_as_before_5_s_after_an_attack(pin: int | None, stream: bool) -> None:
    engines = Engines()
    before, _ = engines.shares(PHASE_S, stream=None)
    engines.shares(PHASE_S, stream=stream, pin=pin)
    engines.shares(5.0, stream=None)
    after, n_requests = engines.shares(PHASE_S, stream=None)
    assert n_requests >= 400
    assert abs(after - before) <= 0.05


def test_equal_ranks_have_equal_slowness_though_one_is_always_decoding() -> None:
    """Prompts do not wait for decode steps here, and the attacker's answers never end at worker 1."""
    engines = Engines()
    engines.shares(PHASE_S, stream=None)
    engines.shares(PHASE_S, stream=True)
    slowness = engines.placer.learned.speeds.speeds(2, now_s=engines.now_s).slowness
    assert slowness[0] == pytest.approx(slowness[1], rel=0.05)


def test_an_unstreamed_prefill_leaves_the_queue_at_its_expected_end() -> None:
    engines = Engines(Role.BOTH)
    placement = engines.place(request_of(1, HONEST_TOKENS, stream=False))
    ends_s = engines.placer.learned.prefill_ends_s(placement, now_s=0.0)

    assert engines.queued(0.9 * ends_s) == HONEST_TOKENS
    assert engines.queued(1.1 * ends_s) == 0
    engines.placer.first_token(placement, now_s=60.0)
    engines.placer.release(placement, now_s=60.0, tokens=1000)
    assert engines.events.came_s == []
    assert engines.placer.learned.speeds.reading(Slot(0)) is None


def test_a_step_begins_with_the_first_queued_prompt_and_after_each_first_token() -> None:
    engines = Engines(Role.BOTH)

    def began_s() -> float:
        return engines.placer.learned.speeds.speeds(1, now_s=engines.now_s).step_began_s.item(0)

    assert began_s() == -inf
    engines.now_s = 1.0
    first = engines.place(request_of(1, HONEST_TOKENS))
    engines.now_s = 2.0
    engines.place(request_of(2, HONEST_TOKENS))
    assert began_s() == 1.0
    engines.placer.first_token(first, now_s=3.0)
    engines.place(request_of(3, HONEST_TOKENS))
    assert began_s() == 3.0
    engines.placer.freed(Slot(0))
    assert began_s() == -inf


def test_a_step_of_a_pairs_prompt_begins_and_ends_at_its_prefill_rank() -> None:
    engines = Engines(Role.PREFILL, Role.DECODE)
    placement = engines.place(request_of(1, HONEST_TOKENS))
    speeds = engines.placer.learned.speeds
    assert speeds.speeds(2, now_s=0.0).step_began_s.tolist() == [0.0, -inf]
    engines.placer.prefill_done(placement, now_s=1.0)
    engines.placer.first_token(placement, now_s=2.0)
    assert speeds.speeds(2, now_s=2.0).step_began_s.tolist() == [1.0, -inf]


def test_unstreamed_requests_released_early_are_dropped() -> None:
    engines = Engines(Role.BOTH)
    for number in range(1000):
        placement = engines.place(request_of(number, HONEST_TOKENS, stream=False))
        engines.placer.release(placement, now_s=0.0)
    unseen = engines.placer._unseen_prefills
    assert len(unseen._running) == 0
    assert len(unseen._ends) <= 65


def taught(*roles: Role, stream: bool = True, pin: int | None = None) -> tuple[int, int, bool]:
    """Serve twenty requests; return how many prompts and transfers taught something, and whether answers
    did.
    """
    engines = Engines(*roles)
    placer = engines.placer
    decode = Slot(len(roles) - 1)
    for number in range(20):
        engines.now_s = 100.0 * number
        placement = engines.place(request_of(number, HONEST_TOKENS, stream=stream, pin=pin))
        if len(roles) > 1:
            placer.prefill_done(placement, now_s=engines.now_s + 0.1)
        placer.first_token(placement, now_s=engines.now_s + 1.0)
        placer.release(placement, now_s=engines.now_s + 50.0, tokens=100)
    transfers = len(placer.transfers.learned.samples())
    return len(engines.events.came_s), transfers, placer.speeds.decode_slowness(decode) != 1.0


def test_unpinned_streams_and_unstreamed_prefill_legs_are_measured() -> None:
    pair = (Role.PREFILL, Role.DECODE)
    assert taught(Role.BOTH) == (20, 0, True)
    assert taught(*pair) == (20, 20, True)
    assert taught(Role.BOTH, pin=1) == taught(*pair, pin=2) == (0, 0, False)
    assert taught(Role.BOTH, stream=False) == (0, 0, False)
    assert taught(*pair, stream=False) == (20, 0, False)


def test_an_unstreamed_pairs_prefill_leaves_the_queue_with_its_leg() -> None:
    engines = Engines(Role.PREFILL, Role.DECODE)
    placement = engines.place(request_of(1, HONEST_TOKENS, stream=False))

    assert engines.queued(1000.0) == HONEST_TOKENS
    engines.placer.prefill_done(placement, now_s=1000.0)
    assert engines.queued(1000.0) == 0
    assert int(engines.placer.ledger.columns().waiting[Slot(1)]) == 1
    assert engines.queued(2000.0) == 0
    assert int(engines.placer.ledger.columns().waiting[Slot(1)]) == 0


CALLERS, WARM_S, COLD_S, ANSWER_TOKENS, STEP_S = 4, 0.02, 0.5, 100, 0.005


def test_a_restarted_engine_gets_calls_despite_slow_first_answers() -> None:
    """Few callers ask one call after the other, short ones that no cache holds: either engine alone could
    answer them all.
    """
    engines = Engines()
    placer = engines.placer
    got = [Counter[int]() for _ in range(3)]
    cold = {2}
    due: list[tuple[float, int, str, Placement | None]]
    due = [(0.0, caller, "call", None) for caller in range(CALLERS)]
    number = CALLERS
    starts_s, ends_s = 40.0, 100.0
    changes = deque([(20.0, True), (starts_s, False)])
    heapify(due)
    while due[0][0] < ends_s:
        if changes and changes[0][0] <= due[0][0]:
            engines.now_s, is_silent = changes.popleft()
            cold = {2}
            before = placer.fleet.card_at(Slot(1))
            assert before is not None
            placer.fleet.join(structs.replace(before, engine_silent=is_silent))
            placer.fleet_changed(now_s=engines.now_s)
            continue
        engines.now_s, _, what, placement = heappop(due)
        now_s, number = engines.now_s, number + 1
        if placement is None:
            placement = engines.place(request_of(100 * number, 20))
            worker = placement.decision.decode.rank.worker_id
            got[(now_s >= starts_s) + (now_s >= starts_s + 2.0)][worker] += 1
            heappush(due, (now_s + (COLD_S if worker in cold else WARM_S), number, "first", placement))
        elif what == "first":
            placer.first_token(placement, now_s=now_s)
            cold -= {placement.decision.decode.rank.worker_id}
            heappush(due, (now_s + ANSWER_TOKENS * STEP_S, number, "end", placement))
        else:
            placer.release(placement, now_s=now_s, tokens=ANSWER_TOKENS)
            heappush(due, (now_s, number, "call", None))
    _, at_once, behind = got
    assert at_once[2] > 0
    assert 0.4 <= behind[2] / behind.total() <= 0.6


@pytest.mark.parametrize("mode", [RouterMode.KV, RouterMode.ROUND_ROBIN])
@pytest.mark.parametrize("cost", ["blocks", "lmetric", "time"])
def test_a_first_token_at_any_of_24_ranks_is_handled(cost: str, mode: RouterMode) -> None:
    """Only some costs read what is learned, and so make room for it."""
    fleet = Fleet(MODEL, BLOCK_SIZE)
    for worker_id in range(1, 25):
        fleet.join(card(worker_id, Role.BOTH))
    placer = plain_placer(fleet, settings=RoutingSettings(mode=mode, cost=cost))
    for number in range(24):
        request = request_of(number, 64, pin=number + 1 if mode is RouterMode.KV else None)
        placement = placer.place(first_attempt(request), Draw(seed=number, turn=number, room=0), now_s=0.0)
        assert placement.decision.decode.slot == number
        placer.first_token(placement, now_s=0.1)


def test_a_first_token_after_its_rank_left_begins_no_step_of_the_next_rank() -> None:
    fleet = Fleet(MODEL, BLOCK_SIZE)
    fleet.join(card(1, Role.BOTH))
    placer = plain_placer(fleet, settings=RoutingSettings(cost="time"))
    late = placer.place(first_attempt(request_of(0, 64)), A_DRAW, now_s=0.0)
    for slot in fleet.leave(WorkerId(1), Epoch(1)):
        placer.freed(slot)
    fleet.join(card(2, Role.BOTH))
    placer.first_token(late, now_s=1.0)
    assert placer.learned.speeds.speeds(1, now_s=1.0).step_began_s.tolist() == [-inf]


def test_no_step_runs_at_an_engine_that_started_again() -> None:
    fleet = Fleet(MODEL, BLOCK_SIZE)
    fleet.join(card(1, Role.BOTH))
    placer = plain_placer(fleet, settings=RoutingSettings(cost="time"))
    placer.place(first_attempt(request_of(0, 64)), A_DRAW, now_s=1.0)
    assert placer.learned.speeds.speeds(1, now_s=1.0).step_began_s.tolist() == [1.0]
    placer.learned.speeds.forget(fleet.slots_of(WorkerId(1)))
    assert placer.learned.speeds.speeds(1, now_s=1.0).step_began_s.tolist() == [-inf]
