"""How fast KV travels, by made-up engines: what is counted, and when a link is said to be slow."""

import math
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.core.ids import Slot
from kvrouter.core.workers import KvTransfers
from kvrouter.router.transfer_speed import (
    BUCKET_S,
    NOTHING,
    RECENT_S,
    WINDOW_BYTES,
    WINDOW_S,
    WINDOW_TRANSFERS,
    WINDOWS,
    NotedTransfers,
    SpeedVerdict,
    TransferSpeeds,
)

SLOT = Slot(5)
MIB = 1 << 20

counts = st.integers(0, 2**62)
sums = st.builds(
    KvTransfers, transfers=counts, bytes=counts, seconds=st.floats(0, 2**62), failed=counts, tokens=counts
)


@dataclass
class Engine:
    """An engine whose transfers take ``latency_s`` and what their bytes need, and that tells its sums."""

    latency_s: float = 0.001
    bytes_per_s: float = 10e9
    speeds: TransferSpeeds = field(default_factory=TransferSpeeds)
    now_s: float = 100.0
    reported: KvTransfers = KvTransfers(0, 0, 0.0)  # noqa: RUF009 - it cannot be written
    verdicts: list[SpeedVerdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tell()

    def tell(self) -> NotedTransfers | None:
        noted = self.speeds.note(SLOT, self.reported, now_s=self.now_s)
        if noted is not None and noted.verdict is not None:
            self.verdicts.append(noted.verdict)
        return noted

    def carry(self, sizes_bytes: list[int], *, after_s: float = 1.0) -> NotedTransfers | None:
        self.now_s += after_s
        before = self.reported
        self.reported = KvTransfers(
            before.transfers + len(sizes_bytes),
            before.bytes + sum(sizes_bytes),
            before.seconds + sum(self.latency_s + each / self.bytes_per_s for each in sizes_bytes),
        )
        return self.tell()

    def carry_windows(self, n: int, *, each_bytes: int = 64 * MIB) -> None:
        """So many full windows, and what the first of them finds begun."""
        for _ in range(n + 1):
            for _ in range(math.ceil(WINDOW_S) + 1):
                self.carry([each_bytes] * WINDOW_TRANSFERS)

    @property
    def slow(self) -> list[bool]:
        return [verdict.is_slow for verdict in self.verdicts]


@given(st.lists(sums, min_size=1, max_size=30), st.floats(0, 1e6))
def test_transfer_sums_are_never_negative_and_verdicts_alternate(
    reported_now: list[KvTransfers], step_s: float
) -> None:
    speeds, slow = TransferSpeeds(), [False]
    for number, each in enumerate(reported_now):
        noted = speeds.note(SLOT, each, now_s=number * step_s) or NotedTransfers(NOTHING, None)
        carried = noted.carried
        assert min(carried.transfers, carried.bytes, carried.seconds, carried.failed) >= 0
        if noted.verdict is not None:
            assert noted.verdict.is_slow is not slow[-1]
            slow.append(noted.verdict.is_slow)
        reading = speeds.reading(SLOT, now_s=number * step_s)
        assert reading is not None
        assert (reading.reported, reading.is_slow) == (each, slow[-1])


RESTART, TELL = (-1, -1), (-2, -2)
steps = st.one_of(st.just(RESTART), st.just(TELL), st.tuples(st.integers(0, 9), st.integers(0, 9)))
"""What an engine does: it restarts, tells its sums, or carries so many transfers and bytes."""


@given(st.lists(steps, max_size=40))
def test_reported_bytes_are_counted_once_across_engine_restarts(steps: list[tuple[int, int]]) -> None:
    """Never twice; and all of it, unless a start has overtaken the one before by its first word."""
    speeds, reported_now, last = TransferSpeeds(), KvTransfers(0, 0, 0.0), None
    counted, truth, began_again, was_overtaken = 0, 0, False, False
    for step in [*steps, TELL]:
        if step == RESTART:
            reported_now, began_again = KvTransfers(0, 0, 0.0), True
        elif step == TELL:
            noted = speeds.note(SLOT, reported_now, now_s=0.0)
            counted += 0 if noted is None else noted.carried.bytes
            if last is not None:
                is_less = reported_now.transfers < last.transfers or reported_now.bytes < last.bytes
                was_overtaken |= began_again and not is_less and last.bytes > 0
                truth += reported_now.bytes if began_again else reported_now.bytes - last.bytes
            last, began_again = reported_now, False
        else:
            transfers, n_bytes = step
            reported_now = KvTransfers(reported_now.transfers + transfers, reported_now.bytes + n_bytes, 0.0)
    assert counted <= truth
    assert counted == truth or was_overtaken


@given(
    latency_s=st.floats(1e-4, 0.1),
    bytes_per_s=st.floats(1e8, 1e12),
    phases=st.lists(st.tuples(st.integers(15, 30), st.integers(4, 2000)), min_size=2, max_size=6),
)
@example(latency_s=0.1, bytes_per_s=1e10, phases=[(30, 10), (20, 100)])
def test_a_link_of_constant_speed_is_never_slow(
    latency_s: float, bytes_per_s: float, phases: list[tuple[int, int]]
) -> None:
    """Whatever is carried: transfers of 32 KiB to 1 GiB, few or many."""
    engine = Engine(latency_s=latency_s, bytes_per_s=bytes_per_s)
    for exponent, n in phases:
        for _ in range(2 * WINDOWS + 1):
            engine.carry([2**exponent] * n, after_s=WINDOW_S)
    assert engine.verdicts == []


@given(factor=st.floats(4.5, 1e4), each_mib=st.integers(16, 512))
def test_a_slow_link_and_its_recovery_are_each_reported_once(factor: float, each_mib: int) -> None:
    engine, each_bytes = Engine(), each_mib * MIB
    engine.carry_windows(WINDOWS, each_bytes=each_bytes)
    for n in (1, 2):
        engine.latency_s, engine.bytes_per_s = engine.latency_s * factor, engine.bytes_per_s / factor
        engine.carry_windows(WINDOWS + 3, each_bytes=each_bytes)
        assert engine.slow == [True, False] * (n - 1) + [True]
        engine.latency_s, engine.bytes_per_s = engine.latency_s / factor, engine.bytes_per_s * factor
        engine.carry_windows(WINDOWS + 3, each_bytes=each_bytes)
        assert engine.slow == [True, False] * n
    slow, well = engine.verdicts[:2]
    assert slow.now.bytes_per_s * 4 < slow.shown.bytes_per_s
    assert well.now.bytes_per_s * 2 > well.shown.bytes_per_s


@given(st.floats(1.0, 3.5))
def test_a_link_up_to_3_5_times_slower_is_not_reported(factor: float) -> None:
    engine = Engine()
    engine.carry_windows(WINDOWS)
    engine.latency_s, engine.bytes_per_s = engine.latency_s * factor, engine.bytes_per_s / factor
    engine.carry_windows(WINDOWS + 3)
    assert engine.slow == []


def test_a_restarted_engine_with_a_slower_link_is_reported() -> None:
    engine = Engine()
    engine.carry_windows(WINDOWS)
    engine.reported = KvTransfers(0, 0, 0.0)
    assert engine.tell() == NotedTransfers(NOTHING, None)
    engine.bytes_per_s /= 20
    engine.carry_windows(WINDOWS)
    assert engine.slow == [True]


def test_single_slow_windows_are_not_reported() -> None:
    engine = Engine()
    engine.carry_windows(WINDOWS)
    fast = engine.bytes_per_s
    for _ in range(3):
        engine.bytes_per_s = fast / 20
        engine.carry([WINDOW_BYTES] * WINDOW_TRANSFERS, after_s=2 * RECENT_S)
        engine.carry([WINDOW_BYTES] * WINDOW_TRANSFERS, after_s=WINDOW_S)
        engine.bytes_per_s = fast
        engine.carry([WINDOW_BYTES] * WINDOW_TRANSFERS, after_s=2 * RECENT_S)
        engine.carry([WINDOW_BYTES] * WINDOW_TRANSFERS, after_s=WINDOW_S)
    assert engine.slow == []


def test_a_single_fast_window_does_not_make_later_speed_slow() -> None:
    engine = Engine()
    engine.carry_windows(WINDOWS)
    engine.bytes_per_s *= 20
    engine.carry([WINDOW_BYTES] * WINDOW_TRANSFERS, after_s=2 * RECENT_S)
    engine.carry([WINDOW_BYTES] * WINDOW_TRANSFERS, after_s=WINDOW_S)
    engine.bytes_per_s /= 20
    engine.carry_windows(WINDOWS + 3)
    assert engine.slow == []


def test_a_slow_link_at_a_third_of_its_speed_stays_slow() -> None:
    engine = Engine(latency_s=0.0)
    engine.carry_windows(WINDOWS)
    engine.bytes_per_s /= 10
    engine.carry_windows(WINDOWS + 1)
    engine.bytes_per_s *= 10 / 3
    engine.carry_windows(WINDOWS + 1)
    assert engine.slow == [True]
    engine.bytes_per_s *= 3 / 1.5
    engine.carry_windows(WINDOWS + 1)
    assert engine.slow == [True, False]


def test_few_or_small_transfers_are_not_judged() -> None:
    engine = Engine()
    engine.carry_windows(WINDOWS)
    engine.bytes_per_s /= 100
    for _ in range(50):
        engine.carry([WINDOW_BYTES], after_s=RECENT_S / (WINDOW_TRANSFERS - 2))
    engine.now_s += 2 * RECENT_S
    for _ in range(50):
        engine.carry([1000] * WINDOW_TRANSFERS)
    assert engine.slow == []


def test_the_recent_speed_covers_only_recent_transfers() -> None:
    engine = Engine(latency_s=0.0)

    def recent() -> float | None:
        reading = engine.speeds.reading(SLOT, now_s=engine.now_s)
        return None if reading is None else reading.recent_bytes_per_s

    assert recent() is None
    engine.carry([MIB])
    assert recent() == engine.bytes_per_s
    engine.bytes_per_s /= 2
    engine.carry([MIB])
    assert recent() == 2 * MIB / (3 * MIB / (2 * engine.bytes_per_s))
    engine.now_s += RECENT_S - 2 * BUCKET_S
    assert recent() is not None
    engine.now_s += 2 * BUCKET_S
    assert recent() is None


def test_sums_are_counted_from_an_engines_first_report_with_sums() -> None:
    speeds, reported_now = TransferSpeeds(), KvTransfers(1, 5, 0.5)
    for _ in range(2):
        assert speeds.note(SLOT, None, now_s=0.0) is None
        assert speeds.reading(SLOT, now_s=0.0) is None
    assert speeds.note(SLOT, reported_now, now_s=0.0) == NotedTransfers(reported_now, None)
    assert speeds.note(SLOT, reported_now, now_s=0.0) is None
    assert speeds.note(SLOT, None, now_s=0.0) is None
    reading = speeds.reading(SLOT, now_s=0.0)
    assert reading is not None
    assert reading.reported == reported_now


def test_a_freed_rank_drops_its_transfer_speeds() -> None:
    engine = Engine()
    engine.carry_windows(WINDOWS)
    engine.speeds.freed(SLOT)
    assert engine.speeds.reading(SLOT, now_s=engine.now_s) is None
    assert engine.tell() == NotedTransfers(NOTHING, None)
