"""The harness of the benchmarks: workload, sides, comparison, results. No duration is judged here."""

import gc
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from benchmarks import comparison
from benchmarks.comparison import SidesDisagree, measure_alone, measure_with
from benchmarks.markdown import markdown_of, markdown_of_runs
from benchmarks.measure import quantile, time_awaits, time_calls, time_fresh
from benchmarks.ours.__main__ import BENCHES
from benchmarks.report import open_console, print_result
from benchmarks.results import Line, measured, new_result, read_result, write_result
from benchmarks.rows import FRONT_DOOR, ROWS, Row, Variant, choose
from benchmarks.sides import Side, SideCommand, SideFailed
from benchmarks.workload import BLOCK_SIZE, DecisionLoad, FleetCaches, held_runs, random_tokens

OURS = SideCommand("ours", Path(sys.executable), "benchmarks.ours")
HASH = Row("hash", "hash", {"isl_tokens": 256}, "µs", (Variant("buffer", "list", 0.1),), calls=3, rounds=2)


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_tokens_depend_on_the_seed_alone() -> None:
    assert random_tokens(1, 100) == random_tokens(1, 100)
    assert random_tokens(1, 100) != random_tokens(2, 100)
    assert len(random_tokens(1, 100)) == 100
    assert max(random_tokens(3, 10_000)) < 131_072


def test_prompts_of_one_prefix_share_only_their_first_half() -> None:
    load = DecisionLoad(n_workers=2)
    first, again, other = load.prompt(0), load.prompt(load.n_prefixes), load.prompt(1)
    assert len(first) == load.isl_tokens
    assert first[:4096] == again[:4096]
    assert first[4096:] != again[4096:]
    assert first[:4096] != other[:4096]


def test_fleet_caches_hold_about_the_stated_blocks() -> None:
    caches = FleetCaches(n_blocks=20_000, n_shared=4)
    held = sum(each.n_blocks for each in caches.held())
    assert 20_000 - 128 < held <= 20_000


@pytest.mark.parametrize("shared", [False, True])
def test_held_runs_have_distinct_hashes(shared: bool) -> None:
    runs = list(held_runs(n_workers=4, n_blocks=2048, shared=shared))
    assert sum(run.n_blocks for run in runs) == 2048
    assert len({run.engine_hashes for run in runs}) == len(runs)
    assert len({run.block_hashes for run in runs}) == (len(runs) // 4 if shared else len(runs))


def test_quantiles_are_taken_from_the_samples() -> None:
    samples = [float(value) for value in range(1, 101)]
    random.Random(0).shuffle(samples)
    assert quantile(samples, 0.5) == 50.0
    assert quantile(samples, 0.99) == 99.0
    assert quantile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="samples"):
        quantile([], 0.5)


async def test_a_timing_loop_takes_one_sample_per_call() -> None:
    called: list[int] = []

    async def await_it(number: int) -> None:
        called.append(number)

    assert len(time_calls(called.append, 3)) == 3
    assert len(time_fresh(lambda i: i + 3, called.append, 3)) == 3
    assert len(await time_awaits(lambda i: i + 6, await_it, 3)) == 3
    assert called == list(range(9))


def test_a_side_measures_in_its_own_process() -> None:
    with Side(OURS) as side:
        assert "kvrouter" in side.versions()
        assert side.prepare("hash", {"isl_tokens": 256})["hashes"]
        assert len(side.round("buffer", 5)) == 5
        with pytest.raises(SideFailed, match="no such way"):
            side.round("no such way, at all", 1)
        assert len(side.round("prompt, list", 2)) == 2


def test_rows_are_measured_alone_and_with_a_peer() -> None:
    (alone,) = measure_alone(HASH, OURS)
    assert (alone.ours.samples, alone.theirs, len(alone.ours.round_p50s)) == (6, None, 2)
    (companion,) = measure_with(HASH, OURS, SideCommand("twin", OURS.python, OURS.module))
    assert companion.theirs is not None
    assert companion.peer == "twin"
    assert companion.ratio == companion.ours.p50 / companion.theirs.p50


def test_sides_with_different_facts_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Side):
        def prepare(self, bench: str, params: dict[str, int]) -> dict[str, object]:
            facts = super().prepare(bench, params)
            return {"hashes": [1, 2, 3]} if self.command.name == "other" else facts

    monkeypatch.setattr(comparison, "Side", Other)
    with pytest.raises(SidesDisagree, match="hashes"):
        measure_with(HASH, OURS, SideCommand("other", OURS.python, OURS.module))


def test_a_result_is_written_and_read_back(tmp_path: Path) -> None:
    line = Line("row", "variant", "µs", measured([[1.0, 3.0], [2.0]]), "peer", measured([[4.0]]), 0.5, 0.6)
    result = new_result("peers", versions={"b": "2", "a": "1"}, lines=[line], load_average=(0.1, 0.2, 0.3))
    path = write_result(result, tmp_path)
    assert path.name == f"peers-{result.commit.id}.json"
    assert read_result(path) == result
    again = write_result(result, tmp_path)
    assert (again.name, path.exists()) == (f"peers-{result.commit.id}-2.json", True)
    assert list(result.versions) == ["a", "b"]
    assert line.ours.p50 == 2.0
    console = open_console()
    with console.capture() as printed:
        print_result(result, console)
    assert all(text in printed.get() for text in ("row", "peer", "0.500", "≤ 0.6", result.machine.cpu))


def test_rows_are_chosen_by_their_names() -> None:
    assert choose(None).rows == ROWS
    assert choose(None).front_door
    assert {row.bench for row in choose("memory").rows} == {"memory"}
    assert not choose("memory").front_door
    assert choose(FRONT_DOOR).rows == ()
    with pytest.raises(click.UsageError, match="nothing like it"):
        choose("nothing like it")


def test_every_row_names_an_existing_bench() -> None:
    assert {row.bench for row in ROWS} == set(BENCHES)


@pytest.mark.parametrize(
    ("bench", "params", "variants"),
    [
        ("overlap", {"n_blocks": 10_000, "n_shared": 4}, ["shared", "one", "nobody"]),
        ("apply", {"n_workers": 2}, ["128", "16", "1", "128, from bytes", "1, from bytes"]),
        ("memory", {"n_workers": 2, "n_blocks": 2560, "shared": 1}, ["held", "dropped"]),
    ],
)
async def test_every_bench_measures_its_variants(
    bench: str, params: dict[str, int], variants: list[str]
) -> None:
    side = BENCHES[bench](params)
    await side.prepare()
    for variant in variants:
        assert len(await side.round(variant, 2)) == 2
    with pytest.raises((KeyError, ValueError)):
        await side.round("no such way", 1)
    await side.close()


async def test_the_overlap_bench_finds_the_held_blocks() -> None:
    side = BENCHES["overlap"]({"n_blocks": 10_000, "n_shared": 4})
    found = (await side.prepare())["found"]
    one = 4 + 7 * 7919 % FleetCaches(n_blocks=10_000, n_shared=4).n_private
    assert found == {
        "shared": [8 * (worker + 1) for worker in range(16)],
        "one": [128 * (worker == one % 16) for worker in range(16)],
        "nobody": [0] * 16,
    }


async def test_the_decision_bench_has_the_held_blocks_and_bookings() -> None:
    load = DecisionLoad(n_workers=4)
    side = BENCHES["decision"]({"n_workers": 4})
    facts = await side.prepare()
    depth = {(held.prompt, held.worker): held.n_blocks for held in load.held()}
    assert facts["overlap"] == [
        [depth.get((prompt, worker), 0) for worker in range(4)] for prompt in range(8)
    ]
    blocks = load.running_tokens // BLOCK_SIZE  # two of the four running requests share half of theirs
    assert facts["load"] == [[2 * load.running_tokens, 4 * blocks - blocks // 2]] * 4
    for variant in ("decide, buffer", "decide, list", "decide, book and free, buffer"):
        assert len(await side.round(variant, 3)) == 3
    await side.close()


def test_a_result_is_rendered_as_a_markdown_table() -> None:
    alone = Line("row", "alone", "µs", measured([[1.0]]))
    companion = Line("row", "with", "µs", measured([[1.0, 3.0]]), "peer", measured([[4.0]]), 0.25, 0.6)
    result = new_result("peers", versions={"a": "1"}, lines=[alone, companion], load_average=(0.1, 0.2, 0.3))
    text = markdown_of(result)
    assert "| row | alone | µs | 1.00 |  |  |  |  |  |  |" in text
    assert "| row | with | µs | 1.00 | 3.00 | peer | 4.00 |  | 0.250 | ≤ 0.6 |" in text
    assert result.commit.id in text


def test_several_runs_are_rendered_as_median_and_spread() -> None:
    runs = [
        new_result("peers", versions={}, lines=[_with(ours, ratio)], load_average=(0.1, 0.2, 0.3))
        for ours, ratio in ((1.0, 0.25), (9.0, 0.3), (2.0, 0.5))
    ]
    text = markdown_of_runs(runs)
    row = "| row | with | µs | 2.00 (1.00–9.00) | peer | 4.00 (4.00–4.00) | 0.300 (0.250–0.500) | ≤ 0.6 |"
    assert row in text
    other = new_result("peers", versions={}, lines=[_with(1.0, 0.1, row="other")], load_average=(0, 0, 0))
    with pytest.raises(ValueError, match="the runs differ"):
        markdown_of_runs([runs[0], other])


def _with(ours: float, ratio: float, *, row: str = "row") -> Line:
    return Line(row, "with", "µs", measured([[ours]]), "peer", measured([[4.0]]), ratio, 0.6)
