"""Busy is judged on no less than what is there, and on no more once a report had the time to see it."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrouter.core.ids import Slot
from kvrouter.kernel.ledger.port import LedgerColumns
from kvrouter.kernel.placement.load_at_report import REPORT_AGE_S, LoadAtReport
from kvrouter.kernel.routing.masks import load_by_slot

SLOTS = 3
SLOT = st.integers(0, SLOTS - 1)
BLOCKS = st.integers(1, 9)


class BusyMachine(RuleBasedStateMachine):
    """A ledger whose slots are booked and freed, engines that others use too, and reports that take time."""

    @initialize(foreign=st.lists(st.integers(0, 9), min_size=SLOTS, max_size=SLOTS))
    def begin(self, foreign: list[int]) -> None:
        self.now_s = 100.0
        self.foreign = np.array(foreign, np.int64)
        self.booked = np.zeros(SLOTS, np.int64)
        self.leases: list[tuple[int, int]] = []
        self.changed_s = np.zeros(SLOTS)
        self.reported = np.full(SLOTS, -1, np.int64)
        self.is_settled = np.zeros(SLOTS, np.bool_)
        """Whether nothing of the slot changed for long before its report came, nor since."""
        self.on_the_way: list[tuple[float, int, int]] = []
        self.at_report = LoadAtReport(self.columns, now_s=self.now_s)

    @property
    def columns(self) -> LedgerColumns:
        return LedgerColumns(self.booked, self.booked, self.booked, self.booked)

    @rule(passed_s=st.sampled_from([0.001, 0.03, 0.09, 0.1, 0.25, 5.0]))
    def time_passes(self, passed_s: float) -> None:
        until_s = self.now_s + passed_s
        for due in [due for due in self.on_the_way if due[0] + REPORT_AGE_S <= until_s]:
            self.now_s = max(self.now_s, min(until_s, due[0] + 0.999 * REPORT_AGE_S))
            self.arrives(due)
        self.now_s = until_s

    @rule(slot=SLOT, blocks=BLOCKS)
    def book(self, slot: int, blocks: int) -> None:
        self.at_report.update(self.columns, now_s=self.now_s)
        self.booked[slot] += blocks
        self.leases.append((slot, blocks))
        self.changes(slot)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        slot, blocks = self.leases.pop(which % len(self.leases))
        self.booked[slot] -= blocks
        self.changes(slot)

    @rule(slot=SLOT)
    def report_is_taken(self, slot: int) -> None:
        self.on_the_way.append((self.now_s, slot, int(self.foreign[slot] + self.booked[slot])))

    @precondition(lambda self: self.on_the_way)
    @rule()
    def report_comes(self) -> None:
        self.arrives(self.on_the_way[0])

    def arrives(self, report: tuple[float, int, int]) -> None:
        self.on_the_way.remove(report)
        taken_s, slot, blocks = report
        assert self.now_s - taken_s <= REPORT_AGE_S
        self.reported[slot] = blocks
        self.at_report.reported(Slot(slot), self.columns, now_s=self.now_s)
        self.is_settled[slot] = self.now_s - self.changed_s[slot] > 4 * REPORT_AGE_S

    def changes(self, slot: int) -> None:
        self.changed_s[slot] = self.now_s

    @invariant()
    def no_less_than_there_is_and_no_more_when_the_report_saw_it(self) -> None:
        found = load_by_slot(self.booked, self.reported, self.at_report.active_blocks(SLOTS))
        reported_now = self.reported >= 0
        there = self.booked + self.foreign
        assert (found >= self.booked).all(), "what is booked always counts"
        assert (found[reported_now] >= there[reported_now]).all(), "nothing that is there is forgotten"
        assert (found[~reported_now] == self.booked[~reported_now]).all()
        exact = reported_now & self.is_settled
        assert (found[exact] == there[exact]).all(), "and nothing counts twice that the report has seen"


TestBusy = BusyMachine.TestCase
TestBusy.settings = settings(max_examples=150, stateful_step_count=40)
