"""What ``kvrouter bench`` says of its figures: who loses, and why a difference is small."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from kvrouter.cli.bench.arms import BenchedFleet
from kvrouter.cli.bench.counters import CacheCounts
from kvrouter.cli.bench.load import ArmRound
from kvrouter.cli.bench.report import ArmRounds, BenchReport, report_of, show_report
from kvrouter.cli.bench.workload import Caches, WorkloadSize
from kvrouter.cli.timed_stream import TimedCompletion

NO_P99 = "TTFT p99 unknown: it needs 100 answers of an arm"
CACHES = Caches(number=2, cache_tokens=19_200, context_tokens=4_096, block_size=32)
FLEET = BenchedFleet(
    model="tiny",
    engines=2,
    caches=CACHES,
    concurrency=2,
    engine_urls=(),
    why_through=None,
    is_separate=False,
    running_requests=0,
    is_by_load=False,
    notes=(),
)


def arm(
    name: str,
    *,
    ttft_s: float = 0.1,
    cached: int | None = 500,
    failures: Sequence[str] = (),
    counted: CacheCounts | None = None,
    n: int = 4,
) -> ArmRounds:
    first_s = [ttft_s * (at + 1) for at in range(n)]
    answers = [TimedCompletion(0.0, each, each, 1_000, 16, cached, None) for each in first_s]
    return ArmRounds(name, f"through {name}", [ArmRound(answers, failures, 2.0, counted)])


def report(ours: ArmRounds, other: ArmRounds, fleet: BenchedFleet = FLEET) -> BenchReport:
    return report_of(fleet, WorkloadSize(12, 3264), [ours, other], ())


def shown(found: BenchReport) -> str:
    page = io.StringIO()
    show_report(found, Console(file=page, width=140, no_color=True))
    return page.getvalue()


def test_figures_are_those_of_the_answers() -> None:
    ours = report(arm("kvrouter"), arm("round-robin")).arms[0]
    assert ours.ttft_p50_ms == pytest.approx(250.0)
    assert ours.ttft_p99_ms is None, "four answers have none"
    many = report(arm("kvrouter", n=100), arm("round-robin")).arms[0]
    assert many.ttft_p99_ms == pytest.approx(9_901.0)
    assert NO_P99 in report(arm("kvrouter", n=100), arm("round-robin", n=99)).notes
    assert NO_P99 not in report(arm("kvrouter", n=100), arm("round-robin", n=100)).notes
    assert (ours.hit_rate, ours.cached_tokens, ours.prompt_tokens) == (0.5, 2_000, 4_000)
    assert (ours.output_tokens_per_s, ours.requests, ours.errors) == (32.0, 4, 0)


def test_where_ours_loses_stands_before_the_table() -> None:
    found = report(arm("kvrouter", ttft_s=0.2, cached=100), arm("round-robin"))
    assert found.losses == [
        "kvrouter loses to round-robin in TTFT p50: 500 ms against 250 ms",
        "kvrouter loses to round-robin in hit rate: 10.0 % against 50.0 %",
    ]
    page = shown(found)
    assert page.index("kvrouter loses to round-robin in hit rate") < page.index("kvrouter / round-robin")
    won = report(arm("kvrouter", cached=900), arm("round-robin"))
    assert not won.losses
    assert "loses in none" in shown(won)
    assert "+40.0 points" in shown(won)


def test_differences_within_two_percent_are_no_loss() -> None:
    assert not report(arm("kvrouter", ttft_s=0.101, cached=495), arm("round-robin")).losses


def test_counters_of_engines_stand_in_for_answers_that_count_nothing() -> None:
    counted = CacheCounts(4_000, 1_000)
    found = report(
        arm("kvrouter", cached=None, counted=counted), arm("round-robin", cached=None, counted=counted)
    )
    assert (found.arms[0].hit_rate, found.arms[0].cached_tokens) == (0.25, 1_000)
    unknown = report(arm("kvrouter", cached=None), arm("round-robin", cached=None))
    assert unknown.arms[0].hit_rate is None
    no_p99, note = unknown.notes
    assert no_p99 == NO_P99
    assert note.startswith("hit rate unknown: some answers do not say cached tokens")
    assert "--enable-prompt-tokens-details" in note
    assert "unknown" in shown(unknown)


def test_hit_rates_of_two_sources_are_not_compared() -> None:
    counted = CacheCounts(4_000, 1_000)
    found = report(arm("kvrouter", cached=900, counted=counted), arm("round-robin", cached=None))
    assert (found.hit_rate_source, [each.hit_rate for each in found.arms]) == (None, [None, None])
    found = report(
        arm("kvrouter", cached=900, counted=counted), arm("round-robin", cached=None, counted=counted)
    )
    assert (found.hit_rate_source, [each.hit_rate for each in found.arms]) == (
        "counters",
        [0.25, 0.25],
    )


@pytest.mark.parametrize("prompt_tokens", [2_000, 9_000])
def test_counters_that_counted_other_prompts_are_no_source(prompt_tokens: int) -> None:
    mixed = arm("kvrouter", cached=None, counted=CacheCounts(prompt_tokens, 1_000))
    found = report(mixed, arm("round-robin", cached=None, counted=CacheCounts(4_000, 1_000)))
    assert [each.hit_rate for each in found.arms] == [None, None]
    assert any(note.startswith("hit rate unknown") for note in found.notes)


def test_a_counter_that_began_anew_is_no_count() -> None:
    assert CacheCounts(500, 100).since(CacheCounts(400, 80)) == CacheCounts(100, 20)
    assert CacheCounts(500, 100).since(CacheCounts(4_000, 80)) is None
    half = arm("kvrouter", cached=None, counted=CacheCounts(4_000, 1_000))
    half.rounds.append(half.rounds[0]._replace(counted=None))
    assert report(half, arm("round-robin")).arms[0].counted is None


def test_answers_of_decode_do_not_count_what_prefill_had_cached() -> None:
    found = report(arm("kvrouter"), arm("round-robin"), FLEET._replace(is_separate=True))
    assert found.arms[0].hit_rate is None
    assert any("what decode had cached" in note for note in found.notes)


def test_requests_of_others_are_seen_in_the_counters() -> None:
    quiet = report(arm("kvrouter", counted=CacheCounts(4_000, 2_000)), arm("round-robin"))
    assert not [note for note in quiet.notes if "others used" in note]
    busy = report(arm("kvrouter", counted=CacheCounts(9_000, 2_000)), arm("round-robin"))
    assert [note for note in busy.notes if "others used the engines during kvrouter" in note]


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        (FLEET._replace(engines=2, caches=CACHES._replace(number=1)), "one KV cache: every rule"),
        (FLEET._replace(caches=CACHES._replace(cache_tokens=None)), "does not know how much KV"),
        (FLEET._replace(caches=CACHES._replace(cache_tokens=10**6)), "one cache holds 1,000,000 tokens"),
        (FLEET, "round-robin over two caches"),
        (FLEET._replace(running_requests=3), "3 requests of others ran at the start"),
    ],
)
def test_a_small_difference_is_explained(fleet: BenchedFleet, said: str) -> None:
    notes = report(arm("kvrouter", cached=700), arm("round-robin"), fleet).notes
    assert any(said in note for note in notes), notes


def test_a_router_that_looks_at_no_cache_needs_no_other_explanation() -> None:
    by_load = FLEET._replace(is_by_load=True, notes=("by load",))
    found = report(arm("kvrouter", cached=300), arm("round-robin", cached=300), by_load)
    assert found.notes == ["by load", NO_P99]


def test_eight_ranks_of_one_worker_are_eight_caches() -> None:
    ranks = FLEET._replace(engines=1, caches=CACHES._replace(number=8), concurrency=8)
    found = report(arm("kvrouter", cached=700), arm("round-robin"), ranks)
    assert (found.engines, found.concurrency) == (1, 8)
    assert not any("one KV cache" in note or "two caches" in note for note in found.notes)


def test_engines_without_a_single_hit_are_explained() -> None:
    unknown, note = report(arm("kvrouter", cached=0), arm("round-robin", cached=0)).notes
    assert unknown == NO_P99
    assert "is prefix caching off there" in note
    assert "block of 32 tokens" in note


def test_the_first_failure_is_told_and_bounded() -> None:
    found = report(arm("kvrouter", failures=["x" * 5_000, "y"]), arm("round-robin"))
    assert (found.arms[0].requests, found.arms[0].errors) == (6, 2)
    assert found.losses == ["kvrouter loses to round-robin in errors: 2 against 0"]
    (note,) = [each for each in found.notes if "failed" in each]
    assert note.startswith("kvrouter: 2 of 6 requests failed, the first: xxx")
    assert len(note) < 500


def test_an_arm_without_an_answer_has_no_figures() -> None:
    found = report(arm("kvrouter", n=0, failures=["down"]), arm("round-robin"))
    assert (found.arms[0].ttft_p50_ms, found.arms[0].hit_rate) == (None, None)
    assert "unknown" in shown(found)
    assert "loses in none" not in shown(report(arm("kvrouter"), arm("round-robin", n=0)))
