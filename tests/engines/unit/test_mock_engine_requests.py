"""What becomes of one request at a mock engine: refused, cancelled, ended, held back by its reader."""

import pytest

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.requests import Bootstrap, EngineRequest, FinishReason, Leg, Sampling
from kvrouter.core.workers import Role
from kvrouter.engines.mock_engine.engine import EngineFull
from kvrouter.engines.mock_engine.sequence import sequence_key
from tests.testing.engine_requests import plain_leg
from tests.testing.mock_engine import config, engine, tokens_of


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("token_ids", plain_leg("x", range(250), max_tokens=8)),
        ("token_ids", plain_leg("x", [])),
        ("leg", plain_leg("x", range(4), leg=Leg.PREFILL)),
        ("dp_rank", plain_leg("x", range(4), dp_rank=1)),
        ("max_tokens", plain_leg("x", range(4), max_tokens=0)),
        ("bootstrap", plain_leg("x", range(4), leg=Leg.DECODE)),
    ],
)
def test_unservable_request_is_refused_with_its_field(param: str, asked: EngineRequest) -> None:
    mock = engine(config())
    with pytest.raises(InvalidRequest) as refused:
        mock.submit(0.0, asked)
    assert refused.value.param == param
    assert mock.idle


def test_request_that_needs_exactly_all_memory_is_served() -> None:
    mock = engine(config())
    mock.submit(0.0, plain_leg("x", range(250), max_tokens=7))
    mock.advance(9.0)
    assert len(tokens_of(mock.take_outputs(), "x")) == 7


def test_prefill_leg_needs_one_token_and_the_rank_of_its_room() -> None:
    mock = engine(config(role=Role.PREFILL, dp_size=2, dp_start=4, bootstrap_port=9))

    def leg(room: int, dp_rank: int, max_tokens: int = 1) -> EngineRequest:
        return plain_leg(
            "x",
            range(4),
            leg=Leg.PREFILL,
            dp_rank=dp_rank,
            max_tokens=max_tokens,
            bootstrap=Bootstrap("10.0.0.1", 9, room),
        )

    for wrong, param in ((leg(7, 4), "bootstrap"), (leg(6, 5), "bootstrap"), (leg(7, 5, 2), "max_tokens")):
        with pytest.raises(InvalidRequest) as refused:
            mock.submit(0.0, wrong)
        assert refused.value.param == param
    mock.submit(0.0, leg(7, 5))
    assert not mock.idle


def test_full_queue_refuses_a_request() -> None:
    mock = engine(config(max_waiting_seqs=2))
    for n in range(2):
        mock.submit(0.0, plain_leg(f"r{n}", range(4)))
    with pytest.raises(EngineFull):
        mock.submit(0.0, plain_leg("one too many", range(4)))


def test_repeated_leg_is_refused() -> None:
    mock = engine(config())
    mock.submit(0.0, plain_leg("x", range(4)))
    with pytest.raises(InvalidRequest):
        mock.submit(0.0, plain_leg("x", range(4)))


def test_cancel_frees_at_once_and_ends_as_cancelled() -> None:
    mock = engine(config())
    running = mock.submit(0.0, plain_leg("a", range(40), max_tokens=50))
    mock.advance(0.3)
    mock.take_outputs()
    assert mock.cancel(0.3, running, "client left")
    assert not mock.cancel(0.3, running, "client left")
    outputs = mock.take_outputs()
    assert outputs.chunks[-1][1].finish is FinishReason.CANCELLED
    assert mock.check_integrity() == []
    mock.advance(9.0)
    assert mock.take_outputs().chunks == []


def test_stop_token_ends_the_answer_only_after_min_tokens() -> None:
    plain = engine(config())
    plain.submit(0.0, plain_leg("x", range(8), max_tokens=20))
    plain.advance(9.0)
    tokens = tokens_of(plain.take_outputs(), "x")
    stop = tokens[3]
    first_index = tokens.index(stop)
    for min_tokens, expected in ((0, first_index + 1), (10, 20 if stop not in tokens[10:] else None)):
        mock = engine(config())
        sampling = Sampling(max_tokens=20, min_tokens=min_tokens, stop_token_ids=(stop,))
        mock.submit(0.0, plain_leg("x", range(8), sampling=sampling))
        mock.advance(9.0)
        outputs = mock.take_outputs()
        if expected is not None:
            assert tokens_of(outputs, "x") == tokens[:expected]
        last = outputs.chunks[-1][1].finish
        assert last is (FinishReason.STOP if expected == first_index + 1 else FinishReason.LENGTH)


def test_end_of_sequence_ends_the_answer_unless_ignored() -> None:
    def ended(sampling: Sampling) -> tuple[int, FinishReason | None]:
        mock = engine(config(eos_every=5))
        mock.submit(0.0, plain_leg("x", range(8), sampling=sampling))
        mock.advance(99.0)
        outputs = mock.take_outputs()
        return len(tokens_of(outputs, "x")), outputs.chunks[-1][1].finish

    length, finish = ended(Sampling(max_tokens=100))
    assert length < 100
    assert finish is FinishReason.STOP
    assert ended(Sampling(max_tokens=100, ignore_eos=True)) == (100, FinishReason.LENGTH)
    length, _ = ended(Sampling(max_tokens=100, min_tokens=60))
    assert length > 60


def test_a_reader_without_credit_stops_its_own_sequence_only() -> None:
    mock = engine(config(max_num_seqs=1))
    slow = mock.submit(0.0, plain_leg("slow", range(8), max_tokens=10), credit_tokens=3)
    mock.submit(0.0, plain_leg("quick", range(50, 58), max_tokens=10))
    mock.advance(5.0)
    outputs = mock.take_outputs()
    assert len(tokens_of(outputs, "slow")) == 3
    assert len(tokens_of(outputs, "quick")) == 10
    assert mock.next_time() is None
    mock.give_credit(5.0, slow, 7)
    mock.advance(9.0)
    assert len(tokens_of(mock.take_outputs(), "slow")) == 7


def test_sequence_without_credit_gives_up_memory_and_ends_the_same() -> None:
    whole = engine(config())
    whole.submit(0.0, plain_leg("slow", range(8), max_tokens=10))
    whole.advance(9.0)
    expected = tokens_of(whole.take_outputs(), "slow")

    mock = engine(config(total_kv_blocks=6))
    slow = mock.submit(0.0, plain_leg("slow", range(8), max_tokens=10), credit_tokens=4)
    mock.advance(5.0)
    mock.submit(5.0, plain_leg("big", range(100, 120), max_tokens=4))
    mock.advance(6.0)
    outputs = mock.take_outputs()
    assert len(tokens_of(outputs, "big")) == 4
    mock.give_credit(6.0, slow, 100)
    mock.advance(9.0)
    assert tokens_of(outputs, "slow") + tokens_of(mock.take_outputs(), "slow") == expected
    assert mock.check_integrity() == []
    assert sequence_key(plain_leg("slow", [0])) == slow
