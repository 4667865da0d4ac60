"""One mock engine: batching, chunks, cache hits, memory, refusals, end of sequence, credit."""

from array import array
from collections.abc import Iterable

import pytest

from kvrouter.core.columns import count_hashes
from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.core.events import Removed, Stored
from kvrouter.core.ids import DpRank, ModelName, RequestId, WorkerId
from kvrouter.core.requests import Bootstrap, EngineRequest, FinishReason, Leg, Sampling
from kvrouter.core.workers import LoadReport, Role
from kvrouter.mock import EngineFull, MockConfig, MockEngine, Outputs, Timing
from kvrouter.mock.engine import KvWanted
from kvrouter.mock.sequence import sequence_key

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


def request(
    name: str,
    tokens: Iterable[int],
    *,
    max_tokens: int = 1,
    leg: Leg = Leg.AGGREGATED,
    sampling: Sampling | None = None,
    dp_rank: int = 0,
    bootstrap: Bootstrap | None = None,
    cache_namespace: str | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        attempt=0,
        leg=leg,
        model=ModelName("m"),
        token_ids=array("I", tokens),
        sampling=sampling or Sampling(max_tokens=max_tokens),
        dp_rank=DpRank(dp_rank),
        bootstrap=bootstrap,
        cache_namespace=cache_namespace,
    )


def tokens_of(outputs: Outputs, name: str) -> tuple[int, ...]:
    return tuple(t for key, chunk in outputs.chunks if key.startswith(f"{name}#") for t in chunk.token_ids)


def cached_tokens_of(outputs: Outputs, name: str) -> list[int]:
    chunks = [chunk for key, chunk in outputs.chunks if key.startswith(f"{name}#")]
    return [chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None]


def test_timing_is_the_formula_with_the_documented_figures() -> None:
    timing = Timing()
    assert timing.prefill_ms(0) == 0.0
    assert timing.prefill_ms(8192) == pytest.approx(4.209989e-7 * 8192**2 + 1.518344e-2 * 8192 + 16.50142)
    assert timing.decode_ms(0.5) == pytest.approx(-25.74 * 0.25 + 54.01 * 0.5 + 5.74)
    assert Timing(decode_base=0.0).decode_ms(0.0) == 1.0


def test_chunked_prefill_and_decode_take_the_time_that_one_computes_by_hand() -> None:
    mock = engine(config())
    mock.submit(0.0, request("x", range(70), max_tokens=3))
    # Chunks of 32, 32 and 6 tokens: 132 + 132 + 106 ms, and then the first token is there.
    mock.advance(0.3699)
    assert tokens_of(mock.take_outputs(), "x") == ()
    assert mock.next_time() == pytest.approx(0.370)
    mock.advance(0.3701)
    assert len(tokens_of(mock.take_outputs(), "x")) == 1
    assert mock.next_time() == pytest.approx(0.380)
    mock.advance(0.3901)
    outputs = mock.take_outputs()
    assert len(tokens_of(outputs, "x")) == 2
    assert outputs.chunks[-1][1].finish is FinishReason.LENGTH
    assert mock.next_time() is None
    assert mock.idle


def test_a_step_decodes_and_prefills_at_once() -> None:
    mock = engine(config())
    mock.submit(0.0, request("a", range(10), max_tokens=5))
    mock.advance(0.1101)
    mock.submit(0.115, request("b", range(50, 70)))
    # Decode 10 ms until 0.120; then one token of a and twenty of b: 100 + 20 + 10 ms.
    mock.advance(0.1201)
    assert mock.next_time() == pytest.approx(0.250)
    mock.advance(0.2501)
    assert len(tokens_of(mock.take_outputs(), "b")) == 1


def test_requests_of_one_moment_share_a_step() -> None:
    mock = engine(config())
    for name in "abc":
        mock.submit(0.0, request(name, [ord(name)] * 10))
    mock.advance(0.1301)
    assert len(mock.take_outputs().chunks) == 3


def test_seats_are_limited() -> None:
    mock = engine(config(max_num_seqs=2))
    for name in "abc":
        mock.submit(0.0, request(name, [ord(name)] * 5))
    mock.advance(0.111)
    assert {key[0] for key, _ in mock.take_outputs().chunks} == {"a", "b"}


def test_without_chunked_prefill_a_prompt_is_computed_whole_or_later() -> None:
    mock = engine(config(chunked_prefill=False))
    mock.submit(0.0, request("a", range(20)))
    mock.submit(0.0, request("b", range(100, 120)))
    mock.advance(0.1201)
    assert [key[0] for key, _ in mock.take_outputs().chunks] == ["a"]
    mock.advance(0.2401)
    assert [key[0] for key, _ in mock.take_outputs().chunks] == ["b"]
    with pytest.raises(InvalidRequest, match="one step of 32") as refused:
        mock.submit(1.0, request("c", range(33)))
    assert refused.value.param == "token_ids"


def test_cached_tokens_are_the_full_blocks_before_the_last_token() -> None:
    mock = engine(config())
    mock.submit(0.0, request("first", range(12)))
    mock.advance(1.0)
    assert cached_tokens_of(mock.take_outputs(), "first") == [0]
    for name, tokens, expected in (
        ("again", [*range(12)], 8),
        ("longer", [*range(13)], 12),
        ("other", [*range(6), 99, 99, 99], 4),
    ):
        mock.submit(1.0, request(name, tokens, max_tokens=2))
        mock.advance(2.0)
        assert cached_tokens_of(mock.take_outputs(), name) == [expected]


def test_blocks_filled_by_decoding_are_stored_and_hit() -> None:
    mock = engine(config())
    mock.submit(0.0, request("x", range(6), max_tokens=7))
    mock.advance(1.0)
    outputs = mock.take_outputs()
    stored = [event for _, events in outputs.events for event in events if isinstance(event, Stored)]
    # 6 prompt tokens and 6 of the 7 generated have KV: 3 blocks, one a step.
    assert [event.n_blocks for event in stored] == [1, 1, 1]
    mock.submit(1.0, request("y", [*range(6), *tokens_of(outputs, "x")]))
    mock.advance(2.0)
    assert cached_tokens_of(mock.take_outputs(), "y") == [12]


def test_a_chunk_of_many_blocks_is_one_event() -> None:
    mock = engine(config())
    mock.submit(0.0, request("x", range(32)))
    mock.advance(1.0)
    ((_, events),) = mock.take_outputs().events
    assert [event.n_blocks for event in events if isinstance(event, Stored)] == [8]


def test_namespaces_share_no_blocks() -> None:
    mock = engine(config())
    mock.submit(0.0, request("x", range(12)))
    mock.submit(1.0, request("y", range(13), cache_namespace="tenant"))
    mock.advance(2.0)
    assert cached_tokens_of(mock.take_outputs(), "y") == [0]


def test_without_prefix_caching_nothing_is_stored() -> None:
    mock = engine(config(prefix_caching=False))
    for name in "ab":
        mock.submit(0.0, request(name, range(12), max_tokens=9))
    mock.advance(5.0)
    outputs = mock.take_outputs()
    assert outputs.events == []
    assert cached_tokens_of(outputs, "b") == [0]
    assert len(tokens_of(outputs, "a")) == 9
    assert mock.check_integrity() == []


def test_who_was_admitted_last_gives_way_and_ends_the_same() -> None:
    alone = engine(config())
    alone.submit(0.0, request("b", range(50, 58), max_tokens=8))
    alone.advance(5.0)
    undisturbed = tokens_of(alone.take_outputs(), "b")

    mock = engine(config(total_kv_blocks=6))
    mock.submit(0.0, request("a", range(8), max_tokens=12))
    mock.submit(0.0, request("b", range(50, 58), max_tokens=8))
    outputs = Outputs()
    now = 0.0
    most_waiting = 0
    while not mock.idle:
        now += 0.01
        mock.advance(now)
        step = mock.take_outputs()
        outputs.chunks += step.chunks
        most_waiting = max([most_waiting, *(load.waiting_requests for load in step.loads)])
        assert mock.check_integrity() == []
    assert most_waiting == 1
    assert tokens_of(outputs, "b") == undisturbed
    assert len(tokens_of(outputs, "a")) == 12
    assert len(cached_tokens_of(outputs, "b")) == 1


def test_who_gives_way_to_nobody_lets_a_sequence_with_its_kv_go_on() -> None:
    """The only running sequence has no room to grow, because KV that arrived meanwhile waits for its seat."""
    mock = engine(config(role=Role.DECODE, total_kv_blocks=3, max_num_seqs=1))
    mock.submit(0.0, request("a", range(3), max_tokens=8))
    mock.advance(0.05)
    arriving = mock.submit(
        0.05, request("b", range(50, 58), max_tokens=4, leg=Leg.DECODE, bootstrap=Bootstrap("10.0.0.1", 9, 0))
    )
    mock.advance(0.1031)
    assert [type(notice) for notice in mock.take_notices()] == [KvWanted]
    mock.kv_arrived(0.1031, arriving)
    mock.advance(9.0)
    outputs = mock.take_outputs()
    assert len(tokens_of(outputs, "a")) == 8
    assert len(tokens_of(outputs, "b")) == 4
    assert mock.idle


def test_eviction_is_told() -> None:
    mock = engine(config(total_kv_blocks=4))
    for n in range(2):
        mock.submit(float(n), request(f"r{n}", range(n * 100, n * 100 + 12)))
        mock.advance(n + 0.9)
    events = [event for _, events in mock.take_outputs().events for event in events]
    removed = [event for event in events if isinstance(event, Removed)]
    assert [count_hashes(event.engine_hashes) for event in removed] == [2]
    assert mock.check_integrity() == []


def test_load_reports_count_blocks_requests_and_prompt_tokens_left() -> None:
    mock = engine(config(max_num_seqs=1))
    mock.submit(0.0, request("a", range(40), max_tokens=3))
    mock.submit(0.0, request("b", range(100, 110)))
    mock.advance(0.0)
    (load,) = mock.take_outputs().loads
    assert load == LoadReport(
        rank=load.rank,
        active_blocks=10,
        total_blocks=64,
        active_prefill_tokens=50,
        running_requests=1,
        waiting_requests=1,
    )
    mock.advance(0.1321)
    (load,) = mock.take_outputs().loads
    assert load.active_prefill_tokens == 18
    mock.advance(9.0)
    (load,) = mock.take_outputs().loads
    assert (load.active_blocks, load.active_prefill_tokens, load.running_requests) == (0, 0, 0)
    assert mock.take_outputs().loads == []


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("token_ids", request("x", range(250), max_tokens=8)),
        ("token_ids", request("x", [])),
        ("leg", request("x", range(4), leg=Leg.PREFILL)),
        ("dp_rank", request("x", range(4), dp_rank=1)),
        ("max_tokens", request("x", range(4), max_tokens=0)),
        ("bootstrap", request("x", range(4), leg=Leg.DECODE)),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_field(param: str, asked: EngineRequest) -> None:
    mock = engine(config())
    with pytest.raises(InvalidRequest) as refused:
        mock.submit(0.0, asked)
    assert refused.value.param == param
    assert mock.idle


def test_exactly_all_of_the_memory_is_enough() -> None:
    mock = engine(config())
    mock.submit(0.0, request("x", range(250), max_tokens=7))
    mock.advance(9.0)
    assert len(tokens_of(mock.take_outputs(), "x")) == 7


def test_a_prefill_leg_generates_one_token_and_room_decides_its_rank() -> None:
    mock = engine(config(role=Role.PREFILL, dp_size=2, dp_start=4, bootstrap_port=9))

    def leg(room: int, dp_rank: int, max_tokens: int = 1) -> EngineRequest:
        return request(
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


def test_a_full_queue_refuses() -> None:
    mock = engine(config(max_waiting_seqs=2))
    for n in range(2):
        mock.submit(0.0, request(f"r{n}", range(4)))
    with pytest.raises(EngineFull):
        mock.submit(0.0, request("one too many", range(4)))


def test_the_same_leg_twice_is_refused() -> None:
    mock = engine(config())
    mock.submit(0.0, request("x", range(4)))
    with pytest.raises(InvalidRequest):
        mock.submit(0.0, request("x", range(4)))


def test_cancel_frees_at_once_and_says_so() -> None:
    mock = engine(config())
    running = mock.submit(0.0, request("a", range(40), max_tokens=50))
    mock.advance(0.3)
    mock.take_outputs()
    assert mock.cancel(0.3, running, "client left")
    assert not mock.cancel(0.3, running, "client left")
    outputs = mock.take_outputs()
    assert outputs.chunks[-1][1].finish is FinishReason.CANCELLED
    assert mock.check_integrity() == []
    mock.advance(9.0)
    assert mock.take_outputs().chunks == []


def test_stop_tokens_and_min_tokens() -> None:
    plain = engine(config())
    plain.submit(0.0, request("x", range(8), max_tokens=20))
    plain.advance(9.0)
    tokens = tokens_of(plain.take_outputs(), "x")
    stop = tokens[3]
    first_index = tokens.index(stop)
    for min_tokens, expected in ((0, first_index + 1), (10, 20 if stop not in tokens[10:] else None)):
        mock = engine(config())
        sampling = Sampling(max_tokens=20, min_tokens=min_tokens, stop_token_ids=(stop,))
        mock.submit(0.0, request("x", range(8), sampling=sampling))
        mock.advance(9.0)
        outputs = mock.take_outputs()
        if expected is not None:
            assert tokens_of(outputs, "x") == tokens[:expected]
        last = outputs.chunks[-1][1].finish
        assert last is (FinishReason.STOP if expected == first_index + 1 else FinishReason.LENGTH)


def test_end_of_sequence_unless_ignored() -> None:
    def ended(sampling: Sampling) -> tuple[int, FinishReason | None]:
        mock = engine(config(eos_every=5))
        mock.submit(0.0, request("x", range(8), sampling=sampling))
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
    slow = mock.submit(0.0, request("slow", range(8), max_tokens=10), credit_tokens=3)
    mock.submit(0.0, request("quick", range(50, 58), max_tokens=10))
    mock.advance(5.0)
    outputs = mock.take_outputs()
    assert len(tokens_of(outputs, "slow")) == 3
    assert len(tokens_of(outputs, "quick")) == 10
    assert mock.next_time() is None
    mock.give_credit(5.0, slow, 7)
    mock.advance(9.0)
    assert len(tokens_of(mock.take_outputs(), "slow")) == 7


def test_a_reader_without_credit_gives_its_memory_to_others_and_ends_the_same() -> None:
    whole = engine(config())
    whole.submit(0.0, request("slow", range(8), max_tokens=10))
    whole.advance(9.0)
    expected = tokens_of(whole.take_outputs(), "slow")

    mock = engine(config(total_kv_blocks=6))
    slow = mock.submit(0.0, request("slow", range(8), max_tokens=10), credit_tokens=4)
    mock.advance(5.0)
    mock.submit(5.0, request("big", range(100, 120), max_tokens=4))
    mock.advance(6.0)
    outputs = mock.take_outputs()
    assert len(tokens_of(outputs, "big")) == 4
    mock.give_credit(6.0, slow, 100)
    mock.advance(9.0)
    assert tokens_of(outputs, "slow") + tokens_of(mock.take_outputs(), "slow") == expected
    assert mock.check_integrity() == []
    assert sequence_key(request("slow", [0])) == slow


def test_ranks_are_apart() -> None:
    mock = engine(config(dp_size=2))
    mock.submit(0.0, request("a", range(13), dp_rank=0))
    mock.advance(1.0)
    mock.submit(1.0, request("b", range(13), dp_rank=1))
    mock.advance(2.0)
    outputs = mock.take_outputs()
    assert cached_tokens_of(outputs, "b") == [0]
    assert [rank for rank, _ in outputs.events] == [0, 1]
    assert len(mock.snapshot(DpRank(1))) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"kv_wait_expiry_s": 0.0},
        {"bootstrap_host": "h"},
        {"allowed_token_ids": (1, 40_000)},
        {"allowed_token_ids": ()},
        {"eos_every": 0},
    ],
)
def test_a_config_that_cannot_be_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        MockConfig(**settings)  # type: ignore[arg-type]


def test_timing_that_cannot_be_is_refused() -> None:
    for wrong in ({"prefill_base": float("nan")}, {"prefill_linear": -1.0}, {"decode_min": 0.0}):
        with pytest.raises(ConfigError):
            Timing(**wrong)
