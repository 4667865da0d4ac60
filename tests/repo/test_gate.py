"""The gate: its parts, their lanes and times; which tests are near to a change; the mutations' own texts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import fast_tests
from scripts.gate import FOLDER_VARIABLE, ROOT, STAGES, Result, file_seconds, report, run_stages
from scripts.gate import TestTime as TimeOfTest
from scripts.mutations import MUTATIONS, Mutation, NotFair, mutated

MAKEFILE = (ROOT / "Makefile").read_text()


def makefile(folder: Path, **targets: str) -> Path:
    """A folder with a Makefile of these targets."""
    rules = [f"{name}:\n\t@{command}\n" for name, command in targets.items()]
    (folder / "Makefile").write_text("".join(rules))
    (folder / "times").mkdir()
    return folder


def test_each_gate_part_is_a_documented_make_target() -> None:
    parts = [target for lanes in STAGES for lane in lanes for target in lane]
    assert [part for part in parts if not re.search(rf"^{part}: .*## ", MAKEFILE, re.M)] == []
    assert {
        *(
            "lint",
            "types",
            "test",
            "test-repo",
            "test-hostile",
            "test-chaos",
            "test-cluster",
            "bench-instructions",
        )
    } <= set(parts)
    assert "-m scripts.gate" in (ROOT / ".ci/run").read_text()


def test_lanes_run_side_by_side_and_their_times_are_measured(tmp_path: Path) -> None:
    """Each lane waits for a file that the other makes."""
    waits = "touch {0}; for i in $$(seq 400); do test -e {1} && exit 0; sleep 0.05; done; exit 1"
    root = makefile(tmp_path, left=waits.format("a", "b"), right=waits.format("b", "a"))
    parts = run_stages([[("left",), ("right",)]], root=root, times=root / "times")
    assert sorted((part.target, part.exit_code) for part in parts) == [("left", 0), ("right", 0)]
    assert all(part.wall_s >= 0.0 and part.cpu_s >= 0.0 for part in parts)


def test_a_failing_part_ends_its_lane_and_later_stages(tmp_path: Path) -> None:
    root = makefile(tmp_path, good="touch good", bad="exit 3", next="touch next", last="touch last")
    stages: list[list[tuple[str, ...]]] = [[("bad", "next"), ("good",)], [("last",)]]
    parts = run_stages(stages, root=root, times=root / "times")
    assert {part.target: part.exit_code for part in parts} == {"bad": 2, "good": 0}  # make's own code
    assert not (root / "next").exists()
    assert not (root / "last").exists()
    result = Result("gate", "", "", 2, (0.0, 0.0, 0.0), 61.0, parts, [TimeOfTest("t", 2.0, 0.5)], {})
    recorded = {"wall_s": 3600.0, "parts": [{"target": "good", "wall_s": 125.0}]}
    text = report(result, recorded)
    assert "make bad  FAILED (2)" in text
    assert "   2:05  make good" in text
    assert "  60:00  all" in text
    assert "   1:01" in report(result, None)
    assert "    2.0     0.5  t" in text


def test_test_times_separate_work_from_waiting(tmp_path: Path) -> None:
    """One test works, in a child too, and one waits."""
    (tmp_path / "test_two.py").write_text(
        "import subprocess, sys, time\n"
        "WORK = 'import time\\nwhile time.process_time() < 0.4: pass'\n"
        "def test_works(): subprocess.run([sys.executable, '-c', WORK], check=True)\n"
        "def test_waits(): time.sleep(0.4)\n"
    )
    # Modules by their path alone: what lies in the folders above is imported with none of them.
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", f"--rootdir={tmp_path}"]
    command += ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.testing.timings", str(tmp_path)]
    environ = {**os.environ, FOLDER_VARIABLE: str(tmp_path)}
    subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
    [written] = tmp_path.glob("*.jsonl")
    times = [TimeOfTest(**json.loads(line)) for line in written.read_text().splitlines()]
    works, waits = times
    assert works.test.endswith("test_works")
    assert works.cpu_s >= 0.4
    assert waits.wall_s >= 0.4 > waits.cpu_s
    [(path, wall_s)] = file_seconds(times).items()
    assert path.endswith("test_two.py")
    assert wall_s == pytest.approx(works.wall_s + waits.wall_s, abs=0.1)


def test_the_tests_nearest_to_a_change_come_first() -> None:
    nearest = fast_tests.nearest_tests(
        ["src/kvrouter/kernel/fleet/circuit.py", "tests/kernel/contract/test_index.py"]
    )
    assert nearest[0] == "tests/kernel/contract/test_index.py"  # it changed itself
    by_import = nearest.index("tests/kernel/unit/test_placer.py")
    assert nearest.index("tests/kernel/unit/test_circuit.py") < by_import  # it imports what changed
    assert "tests/router/unit/test_learned_file.py" not in nearest[:20]


def test_native_code_and_data_files_have_nearest_tests() -> None:
    native = fast_tests.nearest_tests(["native/core/src/json.rs"])
    assert "tests/core/laws/test_msgpack_bounds_law.py" in native
    assert "tests/repo/test_gate.py" in fast_tests.nearest_tests([".ci/run"])


def test_tests_are_chosen_only_within_the_time_budget() -> None:
    took_s = {"a": 60.0, "b": 60.0, "c": 30.0}
    assert fast_tests.choose(["a", "b", "c"], took_s) == (["a", "c"], 1)
    assert fast_tests.choose([], took_s) == ([], 0)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_the_text_of_each_mutation_occurs_in_its_source(mutation: Mutation) -> None:
    source = (ROOT / mutation.path).read_text()
    assert mutated(source, mutation) != source
    assert all((ROOT / test).is_file() for test in mutation.tests)
    assert mutation.tests or mutation.is_native


def test_a_mutation_whose_text_is_missing_is_refused_by_name() -> None:
    with pytest.raises(NotFair, match=f"{MUTATIONS[0].name}: .* 0 times"):
        mutated("", MUTATIONS[0])


def test_twenty_mutations_are_spread_over_the_kernel() -> None:
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS) >= 20
    parts = {each.name.partition("-")[0] for each in MUTATIONS}
    assert parts >= {"topology", "fleet", "feed", "ledger", "journey", "routing", "placement", "native"}
