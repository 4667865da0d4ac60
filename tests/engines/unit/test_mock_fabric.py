"""Prefill and decode legs at mock engines: both handoffs, the links between them, and rooms."""

import pytest

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import DpRank
from kvrouter.core.requests import KvLoss, Leg
from kvrouter.core.workers import KvTransfers
from kvrouter.engines.mock_engine.config import KvLoadFailurePolicy, MockConfig
from tests.testing.engine_requests import plain_leg
from tests.testing.mock_engine import (
    D2,
    PREFILL_S,
    PROMPT,
    D,
    Fleet,
    P,
    aggregated_tokens,
    leg,
)


def test_synchronous_handoff_gives_the_aggregated_tokens() -> None:
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
def test_bootstrap_handoff_works_whichever_leg_comes_first(decode_first: bool) -> None:
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


def test_decode_engine_reports_its_kv_transfers_and_their_time() -> None:
    fleet = Fleet()
    for number, at in enumerate((D, D, D2)):
        prefill = fleet.prefill(f"x{number}")
        fleet.until(fleet.now + 30.0)
        fleet.decode(f"x{number}", at=at, params=fleet.params(prefill), prompt=[*PROMPT[:9], number])
        fleet.until(fleet.now + 30.0)
    # The second fetch at D lacks only the 2 tokens of the block that is not full.
    for engine, reported, seconds in ((D, (2, 1200, 0), 1.2), (D2, (1, 1000, 0), 11.0)):
        fetched = fleet.loads[engine].kv_transfers
        assert fetched is not None
        assert (fetched.transfers, fetched.bytes, fetched.failed) == reported
        assert fetched.seconds == pytest.approx(seconds)
    assert fleet.loads[P].kv_transfers is None


def test_decode_engine_reports_a_failed_kv_transfer() -> None:
    fleet = Fleet()
    fleet.decode(params={"remote_engine_id": "gone", "remote_request_id": "x"})
    fleet.until(30.0)
    assert fleet.loads[D].kv_transfers == KvTransfers(transfers=0, bytes=0, seconds=0.0, failed=1)


def test_a_transfer_takes_the_time_of_the_link_between_the_two_domains() -> None:
    fleet = Fleet()
    fleet.prefill(room=1)
    decode = fleet.decode(room=1, at=D2)
    fleet.until(30.0)
    assert fleet.first_at(decode) == pytest.approx(PREFILL_S + 1.0 + 10.0 + 0.010)
    ((pair, carried),) = fleet.fabric.network.carried().items()
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


def test_only_kv_that_the_decode_engine_lacks_is_moved() -> None:
    fleet = Fleet()
    for n, expected_bytes in ((0, 1_000), (1, 200), (2, 200)):
        before = sum(carried.arrived_bytes for carried in fleet.fabric.network.carried().values())
        fleet.prefill(f"r{n}", room=n)
        decode = fleet.decode(f"r{n}", room=n)
        fleet.until(fleet.now + 30.0)
        after = sum(carried.arrived_bytes for carried in fleet.fabric.network.carried().values())
        assert after - before == expected_bytes
        assert fleet.answers[decode][0][1].cached_tokens == (0 if n == 0 else 8)
        assert fleet.tokens(decode) == aggregated_tokens()
    fleet.assert_idle()


def test_handoffs_waiting_for_each_others_memory_all_end() -> None:
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


def test_third_leg_in_a_bootstrap_room_is_refused() -> None:
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


def test_worker_cannot_be_added_to_the_fabric_twice() -> None:
    fleet = Fleet()
    with pytest.raises(InvalidRequest):
        fleet.fabric.add(MockConfig(), worker_id=P, domains={"zone": "a"})


def test_advance_stops_after_moments_max() -> None:
    fleet = Fleet()
    fleet.fabric.submit(0.0, D, leg("x", Leg.AGGREGATED, PROMPT, max_tokens=20))
    reached = fleet.fabric.advance(9.0, moments_max=3)
    assert reached == pytest.approx(PREFILL_S + 0.020)
    assert fleet.fabric.advance(9.0) == 9.0


def test_request_for_an_unknown_dp_rank_is_refused() -> None:
    fleet = Fleet()
    with pytest.raises(InvalidRequest):
        fleet.fabric.submit(0.0, D, plain_leg("x", PROMPT, dp_rank=DpRank(3)))


def test_a_prefill_leg_fetches_kept_blocks_and_computes_the_rest() -> None:
    fleet = Fleet()
    kept = fleet.prefill("k", at=D, prompt=PROMPT[:8])
    fleet.until(1.0)
    prefill = fleet.prefill(params=fleet.params(kept))
    fleet.until(30.0)
    # 800 bytes over the link, and then a step of two tokens.
    assert fleet.first_at(prefill) == pytest.approx(1.0 + 0.8 + 0.102)
    assert fleet.answers[prefill][0][1].cached_tokens == 8
    decode = fleet.decode(params=fleet.params(prefill))
    fleet.until(60.0)
    assert fleet.tokens(decode) == aggregated_tokens()
    assert fleet.tokens(prefill) == fleet.tokens(decode)[:1]
    assert fleet.stored == {P: 2, D: 3}
    fetched = fleet.loads[P].kv_transfers
    assert fetched is not None
    assert (fetched.transfers, fetched.bytes) == (1, 800)
    fleet.assert_idle()


def test_a_prefill_leg_fetches_only_what_it_lacks() -> None:
    fleet = Fleet()
    before = fleet.prefill("b", prompt=PROMPT[:5])
    fleet.until(1.0)
    fleet.cancel(before)
    kept = fleet.prefill("k", at=D, prompt=PROMPT[:8])
    fleet.until(2.0)
    prefill = fleet.prefill(params=fleet.params(kept))
    fleet.until(30.0)
    assert fleet.first_at(prefill) == pytest.approx(2.0 + 0.4 + 0.102)
    fetched = fleet.loads[P].kv_transfers
    assert fetched is not None
    assert fetched.bytes == 400
    fleet.cancel(prefill)
    fleet.assert_idle()


@pytest.mark.parametrize("tokens", [None, 0, -1, "8", 2.5])
def test_a_prefill_leg_with_malformed_params_names_the_field(tokens: object) -> None:
    fleet = Fleet()
    params = {"remote_engine_id": "e", "remote_request_id": "r", "remote_num_tokens": tokens}
    with pytest.raises(InvalidRequest, match="remote_num_tokens") as refused:
        fleet.prefill(params=params)
    assert refused.value.param == "kv_transfer_params"
    fleet.assert_idle()


def test_a_prefill_leg_whose_kv_is_gone_fails_or_computes_by_the_policy() -> None:
    gone = {"remote_engine_id": "gone", "remote_request_id": "x", "remote_num_tokens": 8}
    fleet = Fleet()
    failed = fleet.prefill(params=gone)
    fleet.until(9.0)
    assert fleet.last(failed).kv_lost is KvLoss.UNKNOWN
    fleet.assert_idle()
    fleet = Fleet(policy=KvLoadFailurePolicy.RECOMPUTE)
    computed = fleet.prefill(params=gone)
    fleet.until(9.0)
    assert fleet.tokens(computed) == aggregated_tokens()[:1]
