"""Break the kernel in some twenty places, one at a time, and see that a test goes red each time.

    python -m scripts.mutations [NAME ...]

Each mutation is made in a copy of the sources; the named tests run against the copy. First they run against
an unchanged copy, where they must pass. A mutation that no test catches survives: that fails the run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS_FAILED = 1
"""What pytest exits with when a test failed; other codes are of errors, which catch nothing."""

CARGO_TEST_FAILED = 101
CORE = "kvrouter-core"
NATIVE = "native/core/src/"
KERNEL = "src/kvrouter/kernel/"
TARGET = ROOT / "native" / "target"
COPY = TARGET / "mutations"
"""Always the same folder, so that cargo compiles again only what was mutated."""

IGNORED = shutil.ignore_patterns("target", "__pycache__")


@dataclass(frozen=True)
class Mutation:
    """``old``, which ``path`` has once, becomes ``new``; one of ``tests`` must fail then.

    ``tests`` are files for pytest. Those of native code are cargo's own, of the module that is changed.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = ()

    @property
    def is_native(self) -> bool:
        return self.path.startswith(NATIVE)


MUTATIONS = (
    Mutation(
        "topology-unknown-worker-fails-open",
        KERNEL + "topology/policy.py",
        "if required_elsewhere is None else Required(required_elsewhere)",
        "if True else Required(str(required_elsewhere))",
        ("tests/kernel/unit/test_topology_policy.py",),
    ),
    Mutation(
        "topology-domains-make-no-taints",
        "src/kvrouter/core/taints.py",
        "return config.taints | {topology_taint(domain, value) for domain, value in config.domains.items()}",
        "return config.taints",
        ("tests/kernel/unit/test_topology_taints.py",),
    ),
    Mutation(
        "topology-distance-skips-a-differing-level",
        KERNEL + "topology/link_table.py",
        "        if value_a != value_b:\n            break",
        "        if value_a != value_b:\n            continue",
        ("tests/kernel/unit/test_topology_links.py",),
    ),
    Mutation(
        "topology-others-transfers-are-not-counted",
        KERNEL + "topology/link_table.py",
        "own.bytes + others.bytes",
        "own.bytes",
        ("tests/kernel/unit/test_link_updates.py", "tests/system/scenario/test_replica_links.py"),
    ),
    Mutation(
        "fleet-values-are-never-free-again",
        KERNEL + "fleet/columns.py",
        "if before != UNKNOWN_VALUE:",
        "if before == UNKNOWN_VALUE - 1:",
        ("tests/kernel/unit/test_fleet.py",),
    ),
    Mutation(
        "fleet-circuit-opens-one-failure-late",
        KERNEL + "fleet/circuit.py",
        "max(self._broken, self._unanswered) < self._settings.failures",
        "max(self._broken, self._unanswered) <= self._settings.failures",
        ("tests/kernel/unit/test_circuit.py",),
    ),
    Mutation(
        "fleet-half-open-circuit-lets-all-in",
        KERNEL + "fleet/circuit.py",
        "and not self._is_probed",
        "",
        ("tests/kernel/unit/test_circuit.py",),
    ),
    Mutation(
        "feed-lost-history-counts-as-live",
        KERNEL + "feed/track.py",
        "FeedState.LIVE if self.is_complete else FeedState.PARTIAL",
        "FeedState.LIVE",
        ("tests/kernel/unit/test_feed_table.py",),
    ),
    Mutation(
        "feed-repeated-events-apply-again",
        KERNEL + "feed/track.py",
        "events = events[repeated:]",
        "events = events[:]",
        ("tests/kernel/unit/test_feed_table.py", "tests/kernel/laws/test_feed_law.py"),
    ),
    Mutation(
        "feed-inbox-jumps-over-a-gap",
        KERNEL + "feed/inbox.py",
        "if batch.first_event_id > following:",
        "if batch.first_event_id > following + 1:",
        ("tests/kernel/laws/test_feed_inbox_law.py", "tests/kernel/unit/test_feed_table.py"),
    ),
    Mutation(
        "ledger-moved-lease-forgets-its-output",
        KERNEL + "ledger/journal.py",
        "structs.replace(request, output_blocks=old.output_blocks)",
        "structs.replace(request)",
        ("tests/kernel/unit/test_replica_leases.py", "tests/kernel/laws/test_replica_sync_law.py"),
    ),
    Mutation(
        "ledger-restarted-workers-old-leases-count",
        KERNEL + "ledger/replicas.py",
        "if location is None or location[1] != request.incarnation:",
        "if location is None:",
        ("tests/kernel/unit/test_replica_leases.py", "tests/kernel/laws/test_replica_sync_law.py"),
    ),
    Mutation(
        "journey-lost-worker-is-not-excluded",
        KERNEL + "journey.py",
        "self._excluded |= {event.worker_id}",
        "self._excluded |= set()",
        ("tests/kernel/laws/test_journey.py",),
    ),
    Mutation(
        "journey-resumed-answers-are-too-long",
        KERNEL + "journey.py",
        "self._sampling.max_tokens - len(self.generated)",
        "self._sampling.max_tokens",
        ("tests/kernel/laws/test_journey.py",),
    ),
    Mutation(
        "routing-excluded-workers-are-asked-again",
        KERNEL + "routing/masks.py",
        "passed[list(fleet.slots_of(worker_id))] = False",
        "passed[list(fleet.slots_of(worker_id))] = True",
        ("tests/kernel/unit/test_routing_refusals.py",),
    ),
    Mutation(
        "routing-required-falls-back",
        KERNEL + "routing/masks.py",
        "if isinstance(constraint.policy, Fallback) and not same.n_allowed:",
        "if not same.n_allowed:",
        ("tests/kernel/unit/test_routing_pairs.py",),
    ),
    Mutation(
        "placement-the-rest-of-a-line-is-not-called",
        KERNEL + "placement/waiting_line.py",
        "del later[TRIES_PER_TURN - n_head :]",
        "later.clear()",
        ("tests/kernel/unit/test_waiting_line.py",),
    ),
    Mutation(
        "native-index-forgets-the-parent",
        NATIVE + "index.rs",
        "block_hashes.iter().scan(parent, ",
        "block_hashes.iter().scan(parent.and(None), ",
    ),
    Mutation(
        "native-blocks-of-equal-leading-bits-are-one",
        NATIVE + "blocks.rs",
        "is_clear && has_slot;",
        "has_slot;",
    ),
    Mutation(
        "native-ledger-output-is-free",
        NATIVE + "ledger.rs",
        "blocks.n_own += i64::from(n);",
        "",
    ),
    Mutation(
        "native-approximate-blocks-live-on",
        NATIVE + "approximate.rs",
        "if touch.at_s <= over_s {",
        "if touch.at_s + self.ttl_s <= over_s {",
    ),
)


class NotFair(Exception):
    """The mutation says nothing: its text is not there once, or its tests fail without it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutations; 1 when one survives or can't be tried."""
    parser = argparse.ArgumentParser(prog="mutations", description="Break the kernel; tests must notice.")
    parser.add_argument("names", nargs="*", help="mutations to try; all, unless stated")
    names = parser.parse_args(arguments).names
    chosen = [each for each in MUTATIONS if not names or each.name in names]
    if unknown := {*names} - {each.name for each in chosen}:
        parser.error(f"no such mutations: {', '.join(sorted(unknown))}")
    shutil.rmtree(COPY, ignore_errors=True)
    for folder in ("src", "native"):
        # with the time of copying: cargo takes a file for unchanged that is older than what it built
        shutil.copytree(ROOT / folder, COPY / folder, ignore=IGNORED, copy_function=shutil.copy)
    check_unchanged(chosen)
    survivors = [each.name for each in chosen if not is_caught(each)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} are caught")
    return 1 if survivors else 0


def check_unchanged(mutations: Sequence[Mutation]) -> None:
    """Run every test that is named on unchanged sources. Raises NotFair when one fails."""
    tests = tuple(dict.fromkeys(test for each in mutations for test in each.tests))
    if tests and _pytest(tests) != 0:
        raise NotFair("the tests fail on unchanged sources")
    for each in mutations:
        if each.is_native and _cargo_test(each) != 0:
            raise NotFair(f"{each.name}: its native tests fail on unchanged sources")


def is_caught(mutation: Mutation) -> bool:
    """Whether the tests notice the mutation. Raises NotFair when they can't run."""
    path = COPY / mutation.path
    source = path.read_text()
    started = time.monotonic()
    path.write_text(mutated(source, mutation))
    try:
        if mutation.is_native:
            code, failed = _cargo_test(mutation), CARGO_TEST_FAILED
        else:
            code, failed = _pytest(mutation.tests), TESTS_FAILED
    finally:
        path.write_text(source)
    if code not in (0, failed):
        raise NotFair(f"{mutation.name}: the tests do not run, exit code {code}")
    print(
        f"{time.monotonic() - started:5.1f} s  {'caught' if code else 'SURVIVES':8}  {mutation.name}",
        flush=True,
    )
    return code != 0


def mutated(source: str, mutation: Mutation) -> str:
    """The source with the mutation in it. Raises NotFair when its text is not there once."""
    if (n := source.count(mutation.old)) != 1:
        raise NotFair(f"{mutation.name}: {mutation.path} has its text {n} times, not once")
    return source.replace(mutation.old, mutation.new)


def _pytest(tests: Sequence[str]) -> int:
    environ = {**os.environ, "PYTHONPATH": str(COPY / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not nightly", "-p", "no:cacheprovider", *tests]
    return _run(command, environ)


def _cargo_test(mutation: Mutation) -> int:
    """Run the native tests of the module that is mutated."""
    environ = {**os.environ, "CARGO_TARGET_DIR": str(TARGET)}
    cargo = [
        "cargo",
        "test",
        "--release",
        "--manifest-path",
        str(COPY / "native/Cargo.toml"),
        "-p",
        CORE,
        "--lib",
    ]
    if (built := _run([*cargo, "--no-run"], environ)) != 0:
        return -built
    return _run([*cargo, "--", f"{Path(mutation.path).stem}::"], environ)


def _run(command: Sequence[str], environ: dict[str, str]) -> int:
    """Run a command and return its exit code; what it prints is shown only when it could not do its work."""
    done = subprocess.run(command, cwd=ROOT, env=environ, check=False, capture_output=True, text=True)
    if done.returncode not in (0, TESTS_FAILED, CARGO_TEST_FAILED):
        print(done.stdout[-4000:], done.stderr[-4000:])
    return done.returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotFair as error:
        sys.exit(f"mutations: {error}")
