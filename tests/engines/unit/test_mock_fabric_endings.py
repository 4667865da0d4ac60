"""Every way in which a handoff ends early: cancelled, expired, an engine that dies."""

import pytest

from kvrouter.core.requests import FinishReason, KvLoss
from kvrouter.core.workers import Role
from kvrouter.engines.mock_engine.config import KvLoadFailurePolicy, MockConfig
from tests.testing.mock_engine import D2, PREFILL_S, TIMING, D, Fleet, P, aggregated_tokens

# Moments of a request's life at which its client may leave: before, during and after each stage.
MOMENTS = [0.0, 0.05, 0.2, 0.6, 1.111, 1.115, 1.3]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("order", [(0,), (1,), (0, 1), (1, 0)])
def test_handoff_cancelled_at_any_stage_leaves_nothing(moment: float, order: tuple[int, ...]) -> None:
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


def test_kv_of_a_cancelled_decode_leg_does_not_wait() -> None:
    fleet = Fleet()
    prefill, decode = fleet.prefill(room=3), fleet.decode(room=3)
    fleet.until(0.05)
    fleet.cancel(decode)
    fleet.until(PREFILL_S + 0.001)
    assert fleet.last(prefill).finish is FinishReason.LENGTH
    fleet.assert_idle()


def test_unpulled_kv_expires() -> None:
    fleet = Fleet(expiry_s=20.0)
    prefill = fleet.prefill()
    fleet.until(20.0)
    assert not fleet.fabric.idle
    fleet.until(20.2)
    fleet.assert_idle()
    late = fleet.decode(params=fleet.params(prefill))
    fleet.until(30.0)
    assert fleet.last(late).finish is FinishReason.ERROR


def test_decode_leg_without_a_prefill_leg_fails_after_the_expiry() -> None:
    fleet = Fleet(expiry_s=20.0)
    decode = fleet.decode(room=5)
    fleet.until(19.9)
    assert decode not in fleet.answers
    fleet.until(20.1)
    assert fleet.last(decode).finish is FinishReason.ERROR
    fleet.assert_idle()


def test_cancelled_prefill_leg_frees_its_kv_unless_a_decode_leg_came() -> None:
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
def test_decode_leg_fails_or_recomputes_after_prefill_engine_death(
    policy: KvLoadFailurePolicy, moment: float
) -> None:
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


def test_another_decode_engine_gets_the_kv_after_the_first_dies() -> None:
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


@pytest.mark.parametrize("policy", list(KvLoadFailurePolicy))
def test_a_decode_engine_of_another_handshake_refuses_the_kv_and_another_gets_it(
    policy: KvLoadFailurePolicy,
) -> None:
    fleet = Fleet(policy=policy, d2_handshake="other")
    prefill = fleet.prefill()
    fleet.until(1.0)
    refused = fleet.decode(at=D2, params=fleet.params(prefill))
    fleet.until(1.5)
    if policy is KvLoadFailurePolicy.FAIL:
        last = fleet.last(refused)
        assert (last.finish, last.kv_lost) == (FinishReason.ERROR, KvLoss.REFUSED)
        assert last.error == "KV transfer failed: handshake refused: other here, none there"
    fleet.until(10.0)
    taken = fleet.decode(params=fleet.params(prefill))
    fleet.until(30.0)
    assert fleet.tokens(taken) == aggregated_tokens()
    if policy is KvLoadFailurePolicy.RECOMPUTE:
        assert fleet.tokens(refused) == aggregated_tokens()
    assert fleet.fabric.network.carried().keys() == {("a", "a")}
    fleet.assert_idle()


def test_restarted_prefill_engine_has_no_kv_of_its_earlier_start() -> None:
    fleet = Fleet()
    prefill = fleet.prefill()
    fleet.until(1.0)
    params = fleet.params(prefill)
    fleet.fabric.remove(fleet.now, P)
    fleet.fabric.add(
        MockConfig(role=Role.PREFILL, block_size=4, timing=TIMING), worker_id=P, domains={"zone": "a"}
    )
    decode = fleet.decode(params=params)
    fleet.until(9.0)
    assert fleet.last(decode).finish is FinishReason.ERROR
