"""The figures of a replay, how they are judged, and the table that shows them."""

import io
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.http_replay.client import Answer
from benchmarks.http_replay.machine import Commit, Machine, this_machine
from benchmarks.http_replay.observe import FleetWorker, Handoffs, crossings, fleet_workers, handoffs
from benchmarks.http_replay.result import ModeResult, Observed, Report, percentile, problems, remarks, sum_up
from benchmarks.http_replay.table import lines, markdown, rich_table
from kvrouter.core.constraints import RouterMode
from kvrouter.core.workers import Role
from kvrouter.telemetry import Telemetry


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 1.0), (0.2, 1.0), (0.5, 3.0), (0.6, 3.0), (0.61, 4.0), (0.99, 5.0), (1.0, 5.0)],
)
def test_percentiles_are_nearest_rank(share: float, expected: float) -> None:
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], share) == expected


def test_no_values_have_no_percentile() -> None:
    assert math.isnan(percentile([], 0.5))


@given(st.lists(st.floats(allow_nan=False), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_value_covering_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) * (1 - 1e-12)
    assert sum(value < found for value in values) < share * len(values) * (1 + 1e-12)


def answer(number: int, *, error: str | None = None, cached_tokens: int = 40) -> Answer:
    return Answer(
        conversation=number,
        turn=0,
        late_s=0.001,
        ttft_s=0.1 * (number + 1),
        itl_s=0.01,
        prompt_tokens=100,
        output_tokens=10,
        cached_tokens=cached_tokens,
        prefill_worker=f"{number % 2}/0",
        decode_worker="9/0",
        error=error,
    )


INSIDE = {("a", "a"): 3, ("b", "b"): 1}
WORKERS = (
    *(FleetWorker(worker_id=number, role=Role.PREFILL, domains={"zone": "a"}) for number in (0, 1, 2)),
    FleetWorker(worker_id=9, role=Role.DECODE, domains={"zone": "a"}),
)


def observed(handoffs: Handoffs = INSIDE, *, workers: tuple[FleetWorker, ...] = WORKERS) -> Observed:
    return Observed(duration_s=1.5, handoffs=handoffs, workers=workers, domain="zone")


def result(mode: RouterMode, *, cached_tokens: int = 40, cross: int = 0, slower: float = 1.0) -> ModeResult:
    answers = [answer(number, cached_tokens=cached_tokens) for number in range(4)]
    for each in answers:
        each.ttft_s = (each.ttft_s or 0.0) * slower
    return sum_up(mode, answers, observed(INSIDE | ({("a", "b"): cross} if cross else {})))


def report(*modes: ModeResult, required: bool = True, ceiling: float = 0.5) -> Report:
    return Report(
        commit=Commit(id="abc123", changed=False),
        machine=Machine(cpu="a cpu", cores=2, system="Linux x86_64", python="3.11.7"),
        rows=4,
        conversations=4,
        speedup=10.0,
        compression=60.0,
        ceiling=ceiling,
        domain="zone",
        required=required,
        modes=modes,
    )


KV = result(RouterMode.KV)
ROUND_ROBIN = result(RouterMode.ROUND_ROBIN, cached_tokens=20, slower=2.0)


def test_a_mode_is_summed_up_over_its_answered_requests() -> None:
    answers = [answer(0), answer(1), answer(2, error="503"), answer(3)]
    summed = sum_up(RouterMode.KV, answers, observed({("a", "a"): 2, ("a", "b"): 1}))
    assert (summed.requests, summed.errors, summed.error_examples) == (4, 1, ("503",))
    assert summed.ttft.p50_ms == pytest.approx(200)
    assert summed.ttft.p99_ms == pytest.approx(400)
    assert (summed.prompt_tokens, summed.cached_tokens, summed.output_tokens) == (300, 120, 30)
    assert summed.cached_share == 0.4
    assert summed.handoffs == {"a → a": 2, "a → b": 1}
    assert (summed.crossed_handoffs, summed.crossed_answers) == (1, 0)
    assert summed.prefill_share == {"0": 1 / 3, "1": 2 / 3, "2": 0.0}
    assert summed.decode_share == {"9": 1.0}


def test_kv_winning_within_its_zones_has_no_problems() -> None:
    assert problems(report(KV, ROUND_ROBIN)) == []


@pytest.mark.parametrize(
    ("bad", "reported"),
    [
        (
            report(result(RouterMode.KV, cross=2)),
            "kv: 2 transfers by the metrics and 0 by the headers crossed",
        ),
        (report(KV, result(RouterMode.ROUND_ROBIN, slower=2.0)), "cached share 40.0% is not above"),
        (report(KV, result(RouterMode.ROUND_ROBIN, cached_tokens=20)), "TTFT p99 400 ms is not below"),
        (report(KV, ceiling=0.3), "above the ceiling 30.0%"),
        (
            report(sum_up(RouterMode.RANDOM, [answer(0, error="x")] * 4, observed())),
            "random: 4 errors: x",
        ),
        (report(sum_up(RouterMode.KV, [answer(0)], observed())), "1 of 4 requests"),
        (report(sum_up(RouterMode.KV, [answer(0)] * 4, observed({}))), "0 handoffs for 4"),
    ],
)
def test_each_problem_is_reported_with_its_numbers(bad: Report, reported: str) -> None:
    assert any(reported in problem for problem in problems(bad))


def test_a_late_client_is_a_remark_and_no_problem() -> None:
    late = report(msgspec.structs.replace(KV, late=msgspec.structs.replace(KV.late, p99_ms=80.0)))
    assert remarks(report(KV)) == []
    (remark,) = remarks(late)
    assert "80 ms late (p99), against a TTFT of 400 ms" in remark
    assert problems(late) == []


def test_domain_crossings_are_counted_from_the_answers_workers() -> None:
    away = FleetWorker(worker_id=9, role=Role.DECODE, domains={"zone": "b"})
    answers = [answer(0), answer(1)]
    assert crossings(answers, WORKERS, "zone") == 0
    assert crossings(answers, (*WORKERS[:3], away), "zone") == 2
    assert crossings(answers, WORKERS[:3], "zone") == 2
    assert crossings(answers, WORKERS, "rack") == 2
    moved = sum_up(RouterMode.KV, [answer(0)] * 4, observed(workers=(*WORKERS[:3], away)))
    assert any("0 transfers by the metrics and 4 by the headers" in each for each in problems(report(moved)))


def test_workers_are_read_from_the_fleet_page() -> None:
    body = b"""{"workers": [{"worker_id": 4, "role": "decode", "domains": {"zone": "b"}, "load": 1}]}"""
    assert fleet_workers(body) == (FleetWorker(worker_id=4, role=Role.DECODE, domains={"zone": "b"}),)


def test_crossing_is_no_problem_if_no_domain_is_required() -> None:
    assert problems(report(result(RouterMode.KV, cross=2), required=False)) == []


def test_the_table_shows_fleet_time_and_measured_time() -> None:
    shown = {name: cells for name, *cells in lines(report(KV, ROUND_ROBIN))}
    assert shown[""] == ["kv", "round-robin"]
    assert shown["TTFT p50 / p99, measured ms"] == ["200 / 400", "400 / 800"]
    assert shown["TTFT p50 / p99, fleet ms"] == ["2000 / 4000", "4000 / 8000"]
    assert shown["ITL p50, fleet ms"] == ["100.0", "100.0"]
    assert shown["cached tokens (ceiling 50.0%)"] == ["40.0%", "20.0%"]
    assert shown["transfers across a zone"] == ["0 of 4", "0 of 4"]
    assert shown["share per prefill worker"] == ["3: 0% – 50%", "3: 0% – 50%"]


def test_markdown_is_a_table_with_its_caption() -> None:
    header, rule, *rest = markdown(report(KV, ROUND_ROBIN)).splitlines()
    assert header == "|  | kv | round-robin |"
    assert rule == "| --- | ---: | ---: |"
    assert rest[0] == "| requests | 4 | 4 |"
    assert rest[-1].startswith("4 rows in 4 conversations, 60 s of the trace in 1 s")
    assert "abc123" in rest[-1]


def test_the_table_is_plain_text_without_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(rich_table(report(KV, ROUND_ROBIN)))
    assert "\x1b" not in out.getvalue()
    assert "2000 / 4000" in out.getvalue()


def test_a_report_decodes_as_encoded() -> None:
    written = report(KV, ROUND_ROBIN)
    assert msgspec.json.decode(msgspec.json.encode(written), type=Report) == written


def test_a_machine_names_its_processor() -> None:
    machine = this_machine()
    assert machine.cores >= 1
    assert machine.cpu


def test_handoffs_are_read_by_domain_pair() -> None:
    telemetry = Telemetry()
    assert handoffs(telemetry.render().decode()) == {}
    telemetry.handoffs.inc("a", "a", by=7)
    telemetry.handoffs.inc("a", "b")
    assert handoffs(telemetry.render().decode()) == {("a", "a"): 7, ("a", "b"): 1}
