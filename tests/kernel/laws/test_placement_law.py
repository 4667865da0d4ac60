"""The same inputs give the same decisions and the same ledger, byte for byte: in one process and in two."""

import os
import random
import subprocess
import sys
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.calls import MakeFail
from tests.testing.placement_script import WORKERS, PlacementScript, Step, script

BYTE = st.integers(0, 255)
BITS = st.integers(0, 2**64 - 1)
STEPS = st.lists(st.builds(Step, BYTE, BYTE, BYTE, BITS), max_size=60)


@settings(max_examples=60)
@given(seed=st.integers(0, 63), steps=STEPS)
def test_equal_steps_give_equal_decisions_and_ledgers(seed: int, steps: list[Step]) -> None:
    steps = script(seed)[:WORKERS] + steps
    assert PlacementScript(seed).run(steps) == PlacementScript(seed).run(steps)


def test_processes_with_different_hash_seeds_decide_and_book_equally() -> None:
    """A set of names is in another order in each process: no decision may depend on it."""
    digests = {
        subprocess.run(
            [sys.executable, "-m", "tests.testing.placement_script", "24"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2", "3")
    }
    assert len(digests) == 1


def test_placement_calls_no_clock_and_no_random_source(make_fail: MakeFail) -> None:
    """Time and draws are arguments: whatever else would be read is not there."""
    expected = [PlacementScript(seed).run(script(seed)) for seed in range(8)]
    steps = [script(seed) for seed in range(8)]
    clocks = ("time", "monotonic", "perf_counter")
    draws = (
        "random",
        "uniform",
        "getrandbits",
        "choice",
        "choices",
        "randrange",
        "randint",
        "shuffle",
        "sample",
    )
    for module, names in (
        (time, (*clocks, *(f"{clock}_ns" for clock in clocks))),
        (random, draws),
        (np.random, ("random", "rand", "randint", "choice", "default_rng", "permutation", "shuffle")),
        (os, ("urandom",)),
    ):
        for name in names:
            make_fail(module, name, AssertionError(f"{name} was called"))
    assert [PlacementScript(seed).run(steps[seed]) for seed in range(8)] == expected


def test_placement_scripts_cover_bootstrap_busy_circuits_and_fallback() -> None:
    """A law over scripts that never place, fail or wait would hold of anything."""
    traces = [PlacementScript(seed).run(script(seed)) for seed in range(24)]
    for word in (
        "Placement(",
        "Shape.BOOTSTRAP",
        "Shape.SYNCHRONOUS",
        "'called'",
        "AllWorkersBusy",
        "'opened'",
    ):
        assert any(word in trace for trace in traces), word
    for word in ("HALF_OPEN", "'pair_opened'", "Fault.CANNOT_TRANSFER", "fallback_used=True", "AddRequest"):
        assert any(word in trace for trace in traces), word
