"""One mock engine: batching, chunks, cache hits, memory, load reports, ranks."""

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.core.events import Removed, Stored, count_hashes
from kvrouter.core.ids import DpRank
from kvrouter.core.requests import Bootstrap, FinishReason, Leg
from kvrouter.core.timing import Timing
from kvrouter.core.workers import LoadReport, Role
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.mock_engine.engine import KvWanted, MockEngine, Outputs
from kvrouter.engines.mock_engine.network import Arrived
from tests.testing.engine_requests import plain_leg
from tests.testing.mock_engine import cached_tokens_of, config, engine, tokens_of


def test_timing_is_the_formula_with_the_documented_figures() -> None:
    timing = Timing()
    assert timing.prefill_ms(0) == 0.0
    assert timing.prefill_ms(8192) == pytest.approx(4.209989e-7 * 8192**2 + 1.518344e-2 * 8192 + 16.50142)
    assert timing.decode_ms(0.5) == pytest.approx(-25.74 * 0.25 + 54.01 * 0.5 + 5.74)
    assert Timing(decode_base=0.0).decode_ms(0.0) == 1.0


def test_measured_timing_figures_add_to_the_formula() -> None:
    timing = Timing(
        prefill_attention=0.5,
        decode_base=3.0,
        decode_sequence=2.0,
        decode_kv_token=0.25,
        mixed_kv_token=0.125,
    )
    assert timing.prefill_ms(100, attended=40) == pytest.approx(Timing().prefill_ms(100) + 20.0)
    assert timing.decode_ms(0.0, 3, 40) == 3.0 + 6.0 + 10.0
    assert timing.mixed_ms(40) == 5.0


def measured(*, async_scheduling: bool) -> MockEngine:
    timing = Timing(
        prefill_quadratic=0.0,
        prefill_linear=1.0,
        prefill_base=100.0,
        prefill_attention=0.01,
        decode_linear=0.0,
        decode_quadratic=0.0,
        decode_base=10.0,
        decode_sequence=2.0,
        decode_kv_token=0.1,
        mixed_kv_token=0.05,
    )
    return engine(replace(config(), timing=timing, async_scheduling=async_scheduling))


def test_step_time_includes_kv_read_and_tokens_attended() -> None:
    mock = measured(async_scheduling=False)
    mock.submit(0.0, plain_leg("x", range(40), max_tokens=9))
    # 32 tokens attend to 32 · 33 / 2 = 528, and 8 more to 8 · 32 + 8 · 9 / 2 = 292.
    assert mock.next_time() == 0.0
    mock.advance(0.0)
    assert mock.next_time() == pytest.approx(0.13728)
    mock.advance(0.1373)
    assert mock.next_time() == pytest.approx(0.13728 + 0.11092)
    mock.advance(0.2483)
    # One decodes over 40 tokens of KV: 10 + 2 + 4 ms.
    assert mock.next_time() == pytest.approx(0.2482 + 0.016)
    mock.submit(0.25, plain_leg("y", range(100, 110)))
    mock.advance(0.2643)
    # It reads 41 tokens while 10 are computed: 110 + 0.55 ms, 10 + 2 + 4.1 ms, and 2.05 ms as both are there.
    assert mock.next_time() == pytest.approx(0.2642 + 0.1287)


def test_request_after_a_planned_step_waits_one_step_more() -> None:
    first_s, scheduled_s = [], []
    for async_scheduling in (False, True):
        mock = engine(replace(config(), async_scheduling=async_scheduling))
        mock.submit(0.0, plain_leg("x", range(8), max_tokens=30))
        mock.advance(0.1235)  # its prefill took 108 ms, and a step that decodes 10: another is under way
        mock.take_outputs()
        mock.submit(0.1235, plain_leg("y", range(50, 58)))
        while (time := mock.next_time()) is not None:
            mock.advance(time)
            outputs = mock.take_outputs()
            scheduled_s += [at_s for key, at_s in outputs.scheduled if key.startswith("y-")]
            if tokens_of(outputs, "y"):
                first_s.append(time)
    assert scheduled_s == [pytest.approx(0.128), pytest.approx(0.128)]
    # The next step is its own, with 108 + 10 ms; where that was planned before it came, the one after.
    assert first_s == [pytest.approx(0.246), pytest.approx(0.256)]


def test_freed_seat_is_used_a_step_later_if_steps_are_planned_ahead() -> None:
    first_s = []
    for async_scheduling in (False, True):
        mock = engine(replace(config(max_num_seqs=2), async_scheduling=async_scheduling))
        mock.submit(0.0, plain_leg("x", range(8), max_tokens=3))
        mock.submit(0.0, plain_leg("z", range(90, 98), max_tokens=30))
        mock.submit(0.0, plain_leg("y", range(50, 58)))
        while (time := mock.next_time()) is not None:
            mock.advance(time)
            if tokens_of(mock.take_outputs(), "y"):
                first_s.append(time)
        assert mock.idle
    # Two prefills take 116 ms, two steps 20: then the seat is free, and its step takes 118, after one more.
    assert first_s == [pytest.approx(0.254), pytest.approx(0.264)]


def test_chunked_prefill_and_decode_take_the_time_computed_by_hand() -> None:
    mock = engine(config())
    mock.submit(0.0, plain_leg("x", range(70), max_tokens=3))
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
    mock.submit(0.0, plain_leg("a", range(10), max_tokens=5))
    mock.advance(0.1101)
    mock.submit(0.115, plain_leg("b", range(50, 70)))
    # Decode 10 ms until 0.120; then one token of a and twenty of b: 100 + 20 + 10 ms.
    mock.advance(0.1201)
    assert mock.next_time() == pytest.approx(0.250)
    mock.advance(0.2501)
    assert len(tokens_of(mock.take_outputs(), "b")) == 1


def test_requests_submitted_together_share_a_step() -> None:
    mock = engine(config())
    for name in "abc":
        mock.submit(0.0, plain_leg(name, [ord(name)] * 10))
    mock.advance(0.1301)
    assert len(mock.take_outputs().chunks) == 3


def test_running_sequences_are_limited_by_max_num_seqs() -> None:
    mock = engine(config(max_num_seqs=2))
    for name in "abc":
        mock.submit(0.0, plain_leg(name, [ord(name)] * 5))
    mock.advance(0.111)
    assert {key[0] for key, _ in mock.take_outputs().chunks} == {"a", "b"}


def test_prompt_is_computed_whole_or_later_without_chunked_prefill() -> None:
    mock = engine(config(chunked_prefill=False))
    mock.submit(0.0, plain_leg("a", range(20)))
    mock.submit(0.0, plain_leg("b", range(100, 120)))
    mock.advance(0.1201)
    assert [key[0] for key, _ in mock.take_outputs().chunks] == ["a"]
    mock.advance(0.2401)
    assert [key[0] for key, _ in mock.take_outputs().chunks] == ["b"]
    with pytest.raises(InvalidRequest, match="one step of 32") as refused:
        mock.submit(1.0, plain_leg("c", range(33)))
    assert refused.value.param == "token_ids"


def test_cached_tokens_are_the_full_blocks_before_the_last_token() -> None:
    mock = engine(config())
    mock.submit(0.0, plain_leg("first", range(12)))
    mock.advance(1.0)
    assert cached_tokens_of(mock.take_outputs(), "first") == [0]
    for name, tokens, expected in (
        ("again", [*range(12)], 8),
        ("longer", [*range(13)], 12),
        ("other", [*range(6), 99, 99, 99], 4),
    ):
        mock.submit(1.0, plain_leg(name, tokens, max_tokens=2))
        mock.advance(2.0)
        assert cached_tokens_of(mock.take_outputs(), name) == [expected]


def test_blocks_filled_by_decoding_are_stored_and_hit() -> None:
    mock = engine(config())
    mock.submit(0.0, plain_leg("x", range(6), max_tokens=7))
    mock.advance(1.0)
    outputs = mock.take_outputs()
    stored = [event for _, events in outputs.events for event in events if isinstance(event, Stored)]
    # 6 prompt tokens and 6 of the 7 generated have KV: 3 blocks, one a step.
    assert [event.n_blocks for event in stored] == [1, 1, 1]
    mock.submit(1.0, plain_leg("y", [*range(6), *tokens_of(outputs, "x")]))
    mock.advance(2.0)
    assert cached_tokens_of(mock.take_outputs(), "y") == [12]


def test_a_chunk_of_many_blocks_is_one_event() -> None:
    mock = engine(config())
    mock.submit(0.0, plain_leg("x", range(32)))
    mock.advance(1.0)
    ((_, events),) = mock.take_outputs().events
    assert [event.n_blocks for event in events if isinstance(event, Stored)] == [8]


def test_namespaces_share_no_blocks() -> None:
    mock = engine(config())
    mock.submit(0.0, plain_leg("x", range(12)))
    mock.submit(1.0, plain_leg("y", range(13), cache_namespace="tenant"))
    mock.advance(2.0)
    assert cached_tokens_of(mock.take_outputs(), "y") == [0]


def test_nothing_is_stored_without_prefix_caching() -> None:
    mock = engine(config(prefix_caching=False))
    for name in "ab":
        mock.submit(0.0, plain_leg(name, range(12), max_tokens=9))
    mock.advance(5.0)
    outputs = mock.take_outputs()
    assert outputs.events == []
    assert cached_tokens_of(outputs, "b") == [0]
    assert len(tokens_of(outputs, "a")) == 9
    assert mock.check_integrity() == []


def test_last_admitted_sequence_is_preempted_and_ends_the_same() -> None:
    alone = engine(config())
    alone.submit(0.0, plain_leg("b", range(50, 58), max_tokens=8))
    alone.advance(5.0)
    undisturbed = tokens_of(alone.take_outputs(), "b")

    mock = engine(config(total_kv_blocks=6))
    mock.submit(0.0, plain_leg("a", range(8), max_tokens=12))
    mock.submit(0.0, plain_leg("b", range(50, 58), max_tokens=8))
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


def test_sequence_without_room_lets_one_with_arrived_kv_go_on() -> None:
    """The only running sequence has no room to grow, because KV that arrived meanwhile waits for its seat."""
    mock = engine(config(role=Role.DECODE, total_kv_blocks=3, max_num_seqs=1))
    mock.submit(0.0, plain_leg("a", range(3), max_tokens=8))
    mock.advance(0.05)
    arriving = mock.submit(
        0.05,
        plain_leg("b", range(50, 58), max_tokens=4, leg=Leg.DECODE, bootstrap=Bootstrap("10.0.0.1", 9, 0)),
    )
    mock.advance(0.1031)
    assert [type(notice) for notice in mock.take_notices()] == [KvWanted]
    mock.kv_arrived(0.1031, arriving, Arrived(0.1031, "b", 800, 0.01))
    mock.advance(9.0)
    outputs = mock.take_outputs()
    assert len(tokens_of(outputs, "a")) == 8
    assert len(tokens_of(outputs, "b")) == 4
    assert mock.idle


def test_evicted_blocks_are_reported_as_removed() -> None:
    mock = engine(config(total_kv_blocks=4))
    for n in range(2):
        mock.submit(float(n), plain_leg(f"r{n}", range(n * 100, n * 100 + 12)))
        mock.advance(n + 0.9)
    events = [event for _, events in mock.take_outputs().events for event in events]
    removed = [event for event in events if isinstance(event, Removed)]
    assert [count_hashes(event.engine_hashes) for event in removed] == [2]
    assert mock.check_integrity() == []


def test_load_reports_count_blocks_requests_and_prompt_tokens_left() -> None:
    mock = engine(config(max_num_seqs=1))
    mock.submit(0.0, plain_leg("a", range(40), max_tokens=3))
    mock.submit(0.0, plain_leg("b", range(100, 110)))
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


def test_ranks_have_separate_caches() -> None:
    mock = engine(config(dp_size=2))
    mock.submit(0.0, plain_leg("a", range(13), dp_rank=0))
    mock.advance(1.0)
    mock.submit(1.0, plain_leg("b", range(13), dp_rank=1))
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
def test_invalid_mock_config_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        MockConfig(**settings)  # type: ignore[arg-type]


def test_invalid_timing_is_refused() -> None:
    for wrong in (
        {"prefill_base": float("nan")},
        {"prefill_linear": -1.0},
        {"decode_min": 0.0},
        {"mixed_kv_token": -1.0},
    ):
        with pytest.raises(ConfigError):
            Timing(**wrong)
