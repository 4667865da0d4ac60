"""Prefill and decode legs at two mock engines: both handoffs, links, and every way to end early."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from kvrouter.core.columns import count_hashes
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.events import Stored
from kvrouter.core.ids import DpRank, ModelName, RequestId, WorkerId
from kvrouter.core.requests import Bootstrap, EngineChunk, EngineRequest, FinishReason, Leg, Sampling
from kvrouter.core.workers import Role
from kvrouter.mock import Fabric, KvLoadFailurePolicy, Links, MockConfig, Party, Timing
from kvrouter.topology.links import Link

P, D, D2 = WorkerId(1), WorkerId(2), WorkerId(3)
PROMPT = list(range(10))
PREFILL_S = 0.110
# 10 tokens of 100 bytes: 1 s inside a domain, 10 s and 1 s latency between domains.
LINKS = Links(same=Link(0.0, 1_000.0), cross=Link(1.0, 100.0))
TIMING = Timing(
    prefill_quadratic=0.0,
    prefill_linear=1.0,
    prefill_base=100.0,
    decode_quadratic=0.0,
    decode_linear=0.0,
    decode_base=10.0,
)


@dataclass
class Fleet:
    """A prefill engine in domain a, decode engines in a and b; remembers what each leg was answered."""

    policy: KvLoadFailurePolicy = KvLoadFailurePolicy.FAIL
    decode_blocks: int = 64
    prefill_blocks: int = 64
    expiry_s: float = 60.0
    now: float = 0.0
    fabric: Fabric = field(default_factory=lambda: Fabric(LINKS))
    answers: dict[Party, list[tuple[float, EngineChunk]]] = field(default_factory=dict)
    stored: dict[WorkerId, int] = field(default_factory=dict)

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
                domain=domain,
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
        for party, chunk in outputs.chunks:
            self.answers.setdefault(party, []).append((at, chunk))
        for rank, events in outputs.events:
            n_stored = sum(count_hashes(e.engine_hashes) for e in events if isinstance(e, Stored))
            self.stored[rank.worker_id] = self.stored.get(rank.worker_id, 0) + n_stored

    def prefill(self, name: str = "x", *, room: int | None = None, prompt: list[int] | None = None) -> Party:
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
    ) -> Party:
        asked = leg(name, Leg.DECODE, prompt or PROMPT, max_tokens=5, room=room, params=params)
        return self.fabric.submit(self.now, at, asked)

    def cancel(self, party: Party) -> None:
        self.fabric.cancel(self.now, party, "client left")

    def tokens(self, party: Party) -> tuple[int, ...]:
        return tuple(t for _, chunk in self.answers.get(party, []) for t in chunk.token_ids)

    def first_at(self, party: Party) -> float:
        return self.answers[party][0][0]

    def last(self, party: Party) -> EngineChunk:
        return self.answers[party][-1][1]

    def params(self, party: Party) -> Mapping[str, object]:
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


def test_synchronous_handoff() -> None:
    fleet = Fleet()
    prefill = fleet.prefill()
    fleet.until(1.0)
    assert fleet.first_at(prefill) == pytest.approx(PREFILL_S)
    assert not fleet.fabric.idle
    decode = fleet.decode(params=fleet.params(prefill))
    fleet.until(30.0)
    # One second for the bytes, and a decode step for the first token: none comes before its KV.
    assert fleet.first_at(decode) == pytest.approx(1.0 + 1.0 + 0.010)
    assert fleet.tokens(decode) == aggregated_tokens()
    assert fleet.tokens(prefill) == fleet.tokens(decode)[:1]
    assert fleet.stored == {P: 2, D: 3}
    fleet.assert_idle()


@pytest.mark.parametrize("decode_first", [True, False])
def test_bootstrap_handoff_whoever_comes_first(decode_first: bool) -> None:
    fleet = Fleet()
    first, second = (fleet.decode, fleet.prefill) if decode_first else (fleet.prefill, fleet.decode)
    one = first(room=7)
    fleet.until(0.05)
    two = second(room=7)
    fleet.until(30.0)
    prefill, decode = (two, one) if decode_first else (one, two)
    prefilled_at = fleet.first_at(prefill)
    assert prefilled_at == pytest.approx(PREFILL_S + (0.05 if decode_first else 0.0))
    assert fleet.last(prefill).kv_transfer_params is None
    assert fleet.first_at(decode) == pytest.approx(prefilled_at + 1.0 + 0.010)
    assert fleet.tokens(decode) == aggregated_tokens()
    fleet.assert_idle()


def test_a_transfer_takes_the_time_of_the_link_between_the_two_domains() -> None:
    fleet = Fleet()
    fleet.prefill(room=1)
    decode = fleet.decode(room=1, at=D2)
    fleet.until(30.0)
    assert fleet.first_at(decode) == pytest.approx(PREFILL_S + 1.0 + 10.0 + 0.010)
    ((pair, carried),) = fleet.fabric.carried().items()
    assert pair == ("a", "b")
    assert (carried.transfers, carried.arrived_bytes) == (1, 1_000)


def test_concurrent_transfers_share_their_link() -> None:
    fleet = Fleet()
    parties = []
    for n in range(3):
        prompt = [n, *PROMPT[1:]]
        fleet.prefill(f"r{n}", room=n, prompt=prompt)
        parties.append(fleet.decode(f"r{n}", room=n, prompt=prompt))
    fleet.until(60.0)
    # One step of thirty tokens, then 3,000 bytes over one link.
    assert [fleet.first_at(party) for party in parties] == [pytest.approx(0.130 + 3.0 + 0.010)] * 3


def test_only_what_the_decode_engine_lacks_is_moved() -> None:
    fleet = Fleet()
    for n, expected_bytes in ((0, 1_000), (1, 200), (2, 200)):
        before = sum(carried.arrived_bytes for carried in fleet.fabric.carried().values())
        fleet.prefill(f"r{n}", room=n)
        decode = fleet.decode(f"r{n}", room=n)
        fleet.until(fleet.now + 30.0)
        after = sum(carried.arrived_bytes for carried in fleet.fabric.carried().values())
        assert after - before == expected_bytes
        assert fleet.answers[decode][0][1].cached_tokens == (0 if n == 0 else 8)
        assert fleet.tokens(decode) == aggregated_tokens()
    fleet.assert_idle()


# Moments of a request's life at which its client may leave: before, during and after each stage.
MOMENTS = [0.0, 0.05, 0.2, 0.6, 1.111, 1.115, 1.3]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("order", [(0,), (1,), (0, 1), (1, 0)])
def test_cancelled_at_any_stage_nothing_is_left(moment: float, order: tuple[int, ...]) -> None:
    fleet = Fleet()
    legs = (fleet.prefill(room=3), fleet.decode(room=3))
    fleet.until(moment)
    for which in order:
        fleet.cancel(legs[which])
    if len(order) == 2:
        fleet.assert_idle()
    fleet.until(200.0)
    fleet.assert_idle()
    for party in legs:
        assert fleet.last(party).finish is not None


@pytest.mark.parametrize("policy", list(KvLoadFailurePolicy))
def test_a_cancelled_prefill_leg_fails_its_decode_leg_or_has_it_recompute(
    policy: KvLoadFailurePolicy,
) -> None:
    fleet = Fleet(policy=policy)
    prefill, decode = fleet.prefill(room=3), fleet.decode(room=3)
    fleet.until(0.05)
    fleet.cancel(prefill)
    fleet.until(9.0)
    if policy is KvLoadFailurePolicy.FAIL:
        assert fleet.last(decode).finish is FinishReason.ERROR
        assert "client left" in (fleet.last(decode).error or "")
    else:
        assert fleet.tokens(decode) == aggregated_tokens()
    fleet.assert_idle()


def test_kv_that_its_decode_leg_no_longer_wants_does_not_wait() -> None:
    fleet = Fleet()
    prefill, decode = fleet.prefill(room=3), fleet.decode(room=3)
    fleet.until(0.05)
    fleet.cancel(decode)
    fleet.until(PREFILL_S + 0.001)
    assert fleet.last(prefill).finish is FinishReason.LENGTH
    fleet.assert_idle()


def test_kv_that_nobody_pulls_expires() -> None:
    fleet = Fleet(expiry_s=20.0)
    prefill = fleet.prefill()
    fleet.until(20.0)
    assert not fleet.fabric.idle
    fleet.until(20.2)
    fleet.assert_idle()
    late = fleet.decode(params=fleet.params(prefill))
    fleet.until(30.0)
    assert fleet.last(late).finish is FinishReason.ERROR


def test_a_decode_leg_whose_prefill_leg_never_comes_fails_in_the_end() -> None:
    fleet = Fleet(expiry_s=20.0)
    decode = fleet.decode(room=5)
    fleet.until(19.9)
    assert decode not in fleet.answers
    fleet.until(20.1)
    assert fleet.last(decode).finish is FinishReason.ERROR
    fleet.assert_idle()


def test_a_finished_prefill_leg_that_is_cancelled_gives_up_its_kv_unless_someone_came() -> None:
    fleet = Fleet()
    prefill = fleet.prefill()
    fleet.until(1.0)
    fleet.cancel(prefill)
    fleet.assert_idle()

    prefill = fleet.prefill("y")
    fleet.until(2.0)
    decode = fleet.decode("y", params=fleet.params(prefill))
    fleet.cancel(prefill)
    fleet.until(30.0)
    assert len(fleet.tokens(decode)) == 5
    fleet.assert_idle()


@pytest.mark.parametrize("policy", list(KvLoadFailurePolicy))
@pytest.mark.parametrize("moment", [0.05, 0.5])
def test_a_prefill_engine_dies_before_its_kv_arrived(policy: KvLoadFailurePolicy, moment: float) -> None:
    fleet = Fleet(policy=policy)
    fleet.prefill(room=3)
    decode = fleet.decode(room=3)
    fleet.until(moment)
    fleet.fabric.remove(fleet.now, P)
    fleet.until(30.0)
    if policy is KvLoadFailurePolicy.FAIL:
        assert fleet.last(decode).finish is FinishReason.ERROR
        assert "is gone" in (fleet.last(decode).error or "")
    else:
        assert fleet.tokens(decode) == aggregated_tokens()
    fleet.assert_idle()


def test_a_decode_engine_dies_and_another_comes_for_the_kv() -> None:
    fleet = Fleet()
    prefill = fleet.prefill()
    fleet.until(1.0)
    fleet.decode(params=fleet.params(prefill))
    fleet.until(1.5)
    fleet.fabric.remove(fleet.now, D)
    again = fleet.decode(at=D2, params=fleet.params(prefill))
    fleet.until(30.0)
    assert fleet.tokens(again) == aggregated_tokens()
    fleet.assert_idle()


def test_a_restarted_prefill_engine_does_not_answer_for_its_earlier_life() -> None:
    fleet = Fleet()
    prefill = fleet.prefill()
    fleet.until(1.0)
    params = fleet.params(prefill)
    fleet.fabric.remove(fleet.now, P)
    fleet.fabric.add(MockConfig(role=Role.PREFILL, block_size=4, timing=TIMING), worker_id=P, domain="a")
    decode = fleet.decode(params=params)
    fleet.until(9.0)
    assert fleet.last(decode).finish is FinishReason.ERROR


def test_engines_that_wait_for_each_others_memory_go_on_in_the_end() -> None:
    # Each engine has room for one request: decode's waits for b's prefill, prefill's for a's decode.
    fleet = Fleet(decode_blocks=4, prefill_blocks=4, expiry_s=20.0)
    legs = [fleet.decode("b", room=1), fleet.prefill("a", room=0)]
    legs += [fleet.prefill("b", room=1), fleet.decode("a", room=0)]
    fleet.until(200.0)
    fleet.assert_idle()
    assert all(fleet.last(party).finish is not None for party in legs)
    assert len(fleet.tokens(legs[0])) == 5


def test_a_prefill_leg_that_waits_for_memory_goes_on_when_kv_was_pulled() -> None:
    fleet = Fleet(prefill_blocks=4)
    fleet.prefill("a", room=0)
    waiting = fleet.prefill("b", room=1, prompt=PROMPT[::-1])
    fleet.decode("a", room=0)
    fleet.until(9.0)
    assert fleet.first_at(waiting) == pytest.approx(PREFILL_S + 1.0 + PREFILL_S)


def test_a_room_takes_two_legs() -> None:
    fleet = Fleet()
    fleet.prefill(room=3)
    fleet.decode(room=3)
    for third in (fleet.prefill, fleet.decode):
        with pytest.raises(InvalidRequest, match="already"):
            third("other", room=3)
    fleet.until(30.0)
    fleet.assert_idle()


def test_unknown_transfer_params_fail() -> None:
    fleet = Fleet()
    decode = fleet.decode(params={"remote_engine_id": "nobody", "remote_request_id": "x"})
    fleet.until(1.0)
    assert "no KV waits" in (fleet.last(decode).error or "")
    fleet.assert_idle()


def test_a_worker_is_in_the_fabric_once() -> None:
    fleet = Fleet()
    with pytest.raises(InvalidRequest):
        fleet.fabric.add(MockConfig(), worker_id=P, domain="a")


def test_advance_stops_after_so_many_moments() -> None:
    fleet = Fleet()
    fleet.fabric.submit(0.0, D, leg("x", Leg.AGGREGATED, PROMPT, max_tokens=20))
    reached = fleet.fabric.advance(9.0, moments_max=3)
    assert reached == pytest.approx(PREFILL_S + 0.020)
    assert fleet.fabric.advance(9.0) == 9.0


def test_dp_rank_is_kept_apart() -> None:
    fleet = Fleet()
    with pytest.raises(InvalidRequest):
        fleet.fabric.submit(
            0.0,
            D,
            EngineRequest(
                request_id=RequestId("x"),
                attempt=0,
                leg=Leg.AGGREGATED,
                model=ModelName("m"),
                token_ids=array("I", PROMPT),
                sampling=Sampling(max_tokens=1),
                dp_rank=DpRank(3),
            ),
        )
