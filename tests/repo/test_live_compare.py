"""What live and replay are compared by goes red where they differ, and the prompts are the trace's."""

from array import array
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.live.compare import Choices, compare_choices, compare_latencies
from benchmarks.live.decisions import SeenDecision, decide_again, have_equal_views, rank_name
from benchmarks.live.observe import Observed, figures
from benchmarks.live.prompts import prompt_tokens
from benchmarks.live.replayed import observe_replay, simulation_of
from benchmarks.live.run import Load, Prepared, Run, apart
from benchmarks.live_replay import lines_of, parse_slices, problems, remarks
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import DpRank, RequestId, WorkerId, WorkerRank
from kvrouter.kernel.placement.placer import Placer
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.sim.replay.content import block_names
from kvrouter.sim.traces.trace_request import TraceRequest
from tests.testing.replays import TWO_ZONES, by_number, fleet, replayed, row

ROWS = [row(at, 0.05 * at, [at % 3, at % 3 + 10, at], output_tokens=30) for at in range(12)]
BLOCKS = "router: {router_cost: blocks}\n"
WORKERS = "workers: [{name: w, replicas: 2}]"
FLEETS = {"aggregated": fleet(BLOCKS + WORKERS), "pairs": fleet(BLOCKS + TWO_ZONES)}


@pytest.fixture(params=FLEETS)
def side(request: pytest.FixtureRequest) -> tuple[Observed, Placer]:
    """A replay as one side of a comparison, and the placer of another one."""
    file = FLEETS[request.param]
    return observe_replay(ROWS, file, speedup=1.0), simulation_of(ROWS, file, speedup=1.0).fleet.placer


def other_rank(seen: SeenDecision) -> WorkerRank:
    """A rank that was not picked."""
    ids = sorted(int(name.partition("/")[0]) for name in seen.readings)
    return next(
        WorkerRank(WorkerId(worker_id), DpRank(0))
        for worker_id in ids
        if worker_id != seen.choice.decode.worker_id
    )


def test_a_side_compared_with_itself_agrees(side: tuple[Observed, Placer]) -> None:
    observed, placer = side
    choices = compare_choices(observed, observed, placer)
    assert choices == Choices(len(ROWS), len(ROWS), len(ROWS), (), ())
    assert all(each.live_ms == each.replay_ms > 0.0 for each in compare_latencies(observed, observed))


def test_another_choice_from_an_equal_view_is_reported(side: tuple[Observed, Placer]) -> None:
    observed, placer = side
    seen = observed.decisions[4]
    wrong = replace(seen, choice=seen.choice._replace(decode=other_rank(seen)))
    live = replace(observed, decisions=[*observed.decisions[:4], wrong, *observed.decisions[5:]])
    choices = compare_choices(live, observed, placer)
    assert choices.broken == choices.not_again == ("r4/0",)
    assert (choices.equal_views, choices.equal_choices) == (len(ROWS), len(ROWS) - 1)


@pytest.mark.parametrize(
    "name", ["overlap_blocks", "prefill_tokens", "active_blocks", "not_active", "is_open"]
)
def test_views_differing_in_one_reading_are_not_equal(side: tuple[Observed, Placer], name: str) -> None:
    observed, placer = side
    seen = observed.decisions[4]
    rank = rank_name(seen.choice.decode)
    changed = replace(seen.readings[rank], **{name: not getattr(seen.readings[rank], name)})
    other = replace(seen, readings=seen.readings | {rank: changed})
    assert have_equal_views(seen, seen, placer.settings)
    assert not have_equal_views(seen, other, placer.settings)


def test_deciding_again_depends_on_the_given_view() -> None:
    observed = observe_replay(ROWS, FLEETS["aggregated"], speedup=1.0)
    placer = simulation_of(ROWS, FLEETS["aggregated"], speedup=1.0).fleet.placer
    seen = observed.decisions[0]
    picked = rank_name(seen.choice.decode)
    loaded = replace(seen.readings[picked], active_blocks=1000)
    elsewhere = decide_again(replace(seen, readings=seen.readings | {picked: loaded}), placer)
    assert elsewhere.decode == other_rank(seen)


@pytest.mark.parametrize(
    ("mode", "is_equal"),
    [(RouterMode.KV, True), (RouterMode.ROUND_ROBIN, False), (RouterMode.RANDOM, False)],
)
def test_draws_count_in_views_only_for_modes_that_read_them(mode: RouterMode, is_equal: bool) -> None:
    file = fleet().model_copy(update={"router": KvRouterConfig(router_mode=mode)})
    seen = observe_replay(ROWS, file, speedup=1.0).decisions[0]
    settings = simulation_of(ROWS, file, speedup=1.0).fleet.placer.settings
    other = replace(seen, seed=seen.seed ^ 1, turn=seen.turn + 1)
    assert have_equal_views(seen, other, settings) is is_equal


def test_views_and_settings_a_replay_cannot_repeat_are_refused(side: tuple[Observed, Placer]) -> None:
    observed, placer = side
    seen = observed.decisions[0]
    (name, reading), *rest = seen.readings.items()
    with pytest.raises(ValueError, match="took no requests"):
        decide_again(replace(seen, readings={name: replace(reading, is_open=False), **dict(rest)}), placer)
    with pytest.raises(ValueError, match="decided among"):
        decide_again(replace(seen, readings=dict(rest)), placer)
    with pytest.raises(ValueError, match="live decides with"):
        compare_choices(replace(observed, settings="other"), observed, placer)
    busy = fleet().model_copy(update={"router": KvRouterConfig(active_prefill_tokens_threshold=9)})
    with pytest.raises(ValueError, match="busy thresholds"):
        observe_replay(ROWS, busy, speedup=1.0)


def test_stamps_equal_the_replays_outcomes() -> None:
    for file in FLEETS.values():
        outcomes = {f"r{each.number}": each for each in by_number(replayed(ROWS, file))}
        stamped = figures(observe_replay(ROWS, file, speedup=1.0))
        assert stamped.keys() == outcomes.keys()
        for name, outcome in outcomes.items():
            of = stamped[RequestId(name)]
            assert of.output_tokens == outcome.generated_tokens
            assert of.cached_tokens == outcome.cached_tokens
            assert of.ttft_s == pytest.approx(outcome.ttft_s)
            assert of.itl_s == pytest.approx(outcome.itl_s)


PIECES = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(
    PIECES, PIECES, st.integers(0, 31), st.integers(0, 31),
    st.sampled_from([(32, 16), (32, 32), (16, 32)]),
)  # fmt: skip
def test_prompts_share_the_blocks_that_a_replays_rows_share(
    one: list[int], other: list[int], short: int, shorter: int, sizes: tuple[int, int]
) -> None:
    piece_tokens, block_size = sizes

    def request(number: int, pieces: list[int], lacking: int) -> TraceRequest:
        return TraceRequest(
            number=number,
            at_s=0.0,
            input_tokens=piece_tokens * len(pieces) - lacking % piece_tokens,
            output_tokens=1,
            piece_tokens=piece_tokens,
            pieces=array("Q", pieces),
        )

    def shared(left: list[object], right: list[object]) -> int:
        at = 0
        while at < min(len(left), len(right)) and left[at] == right[at]:
            at += 1
        return at

    rows = request(0, one, short), request(1, other, shorter)
    tokens = [prompt_tokens(each) for each in rows]
    assert [len(each) for each in tokens] == [each.input_tokens for each in rows]
    cut = [
        [tuple(of[at : at + block_size]) for at in range(0, len(of) - block_size + 1, block_size)]
        for of in tokens
    ]
    named = [
        [*block_names(of.pieces, piece_tokens, n_tokens=of.input_tokens, block_size=block_size)]
        for of in rows
    ]
    assert shared([*cut[0]], [*cut[1]]) == shared([*named[0]], [*named[1]])


def test_an_unnamed_tail_is_unique_to_its_row() -> None:
    ones = [prompt_tokens(row(number, 0.0, [5], input_tokens=80)) for number in range(2)]
    assert ones[0][:64] == ones[1][:64]
    assert ones[0][64:] != ones[1][64:]
    assert [len(each) for each in ones] == [80, 80]


TRACE = Path(__file__).parents[2] / "data" / "mooncake-conversation-sample.jsonl"
FLEET = Path(__file__).parents[2] / "benchmarks" / "live" / "fleet.yaml"


def test_a_slice_is_prepared_and_summarized_by_medians(tmp_path: Path) -> None:
    (of,) = parse_slices(click.Context(click.Command("")), click.Argument(["of"]), [f"m={TRACE},5,10"])
    prepared = Prepared(of, FLEET)
    assert len(prepared.rows) == len(prepared.requests) == 5
    assert prepared.requests[1].due_s == pytest.approx(3.0, abs=0.01)
    assert b"x-request-id: r1\r\n" in prepared.requests[1].content
    replay = observe_replay(prepared.rows, prepared.fleet, speedup=10.0)
    placer = simulation_of(prepared.rows, prepared.fleet, speedup=10.0).fleet.placer
    load = Load(server=0.2, client=0.1, late_ms=1.0, slipped_s=0.0, load_average=1.0)
    latencies = tuple(compare_latencies(replay, replay))
    fine = Run(compare_choices(replay, replay, placer), latencies, 0.5, 0.5, load, 1.0)
    assert problems(prepared, [fine]) == remarks(prepared, [fine]) == []
    late = tuple(replace(each, live_ms=2.0 * each.live_ms) for each in latencies)
    slow = replace(fine, latencies=late, load=replace(load, server=0.5))
    ratios = {line.row: line.ratio for line in lines_of(prepared, [slow, slow, fine])}
    assert ratios["TTFT p50"] == ratios["ITL p99"] == 2.0
    assert len(remarks(prepared, [slow, slow, fine])) == len(latencies) + 1
    broken = replace(fine, choices=replace(fine.choices, broken=("r1/0",)))
    assert problems(prepared, [fine, broken]) == ["m: unequal choices from equal views: r1/0"]
    fast = tmp_path / "fast.yaml"
    fast.write_text(FLEET.read_text() + "speedup: 2.0\n")
    with pytest.raises(ConfigError, match="real clock"):
        Prepared(of, fast)


@given(st.lists(st.floats(0.0, 100.0), max_size=20), st.floats(0.0, 10.0))
def test_rows_are_moved_apart_only_to_the_least_distance(times: list[float], least_s: float) -> None:
    rows = [row(at, at_s, [at]) for at, at_s in enumerate(sorted(times))]
    moved = [*apart(rows, least_s)]
    assert [(each.number, each.pieces) for each in moved] == [(each.number, each.pieces) for each in rows]
    for at, each in enumerate(moved):
        before_s = moved[at - 1].at_s + least_s if at else 0.0
        assert each.at_s == max(rows[at].at_s, before_s)


@pytest.mark.parametrize(
    "text", ["m", "=x", "m=", "m=x,a", "m=x,1,b", "m=x,1,2,3", "m=x,0", "m=x,1,0", "m=x,1,inf", "m=x,1,nan"]
)
def test_an_invalid_slice_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_slices(click.Context(click.Command("")), click.Argument(["of"]), [text])
