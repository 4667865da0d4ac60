"""Whatever becomes of a request's legs, its driver books what attempts hold, and counts each failure once."""

from array import array
from collections import deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import RoutingRefused
from kvrouter.core.ids import RequestId, WorkerId
from kvrouter.core.requests import FinishReason, GenerateRequest, KvLoss, Leg, Sampling
from kvrouter.core.workers import Role
from kvrouter.kernel.fleet.circuit import Fault
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.journey import (
    Abandon,
    Command,
    End,
    Fail,
    Finished,
    LegLost,
    NotPlaced,
    Place,
    PrefillDone,
    SendDecode,
    SendPrefill,
    Shape,
    State,
)
from kvrouter.kernel.ledger.port import NativeLedger
from kvrouter.kernel.placement.attempt_request import attempt_request, prompt_of
from kvrouter.kernel.request_driver import Attempt, RequestDriver
from tests.testing.placement_events import A_DRAW, RecordedPlacementEvents, plain_placer
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card, decode_card, prefill_card

PROMPT = array("I", range(40))
REQUEST = GenerateRequest(RequestId("r"), MODEL, PROMPT, Sampling(max_tokens=100, temperature=0.0))
FLEETS = {
    Shape.AGGREGATED: [card(worker, Role.BOTH) for worker in (1, 2, 3)],
    Shape.SYNCHRONOUS: [prefill_card(1), prefill_card(2), decode_card(3), decode_card(4)],
    Shape.BOOTSTRAP: [prefill_card(1, bootstrap=True), prefill_card(2, bootstrap=True), decode_card(3)],
}

how_lost = st.sampled_from(["failed", "taken", "full", "repeated", "blameless", "leaves", "silent"])


class Drive:
    """One driver, to which everything happens at once; ``failures`` is what it should count."""

    def __init__(self, shape: Shape) -> None:
        fleet = Fleet(MODEL, BLOCK_SIZE)
        for each in FLEETS[shape]:
            fleet.join(each)
        self.now_s = 100.0
        self.events = RecordedPlacementEvents()
        self.placer = plain_placer(fleet, ledger=NativeLedger(), events=self.events, now_s=self.now_s)
        self.driver: RequestDriver[Attempt] = RequestDriver(REQUEST.sampling, self.placer, redispatches_max=2)
        self.failures: list[tuple[WorkerId, Fault]] = []
        self.ended: list[Command] = []
        self.has_tokens = 0

    @property
    def state(self) -> State:
        return self.driver.journey.state

    def perform(self, commands: Sequence[Command]) -> None:
        todo = deque(commands)
        while todo:
            match todo.popleft():
                case Place() as command:
                    todo.extend(self.place(command))
                case SendPrefill():
                    attempt = self.driver.current_attempt
                    attempt.prefill_sent_s = self.now_s
                    attempt.prefill_runs_in_parallel = attempt.placement.shape is Shape.BOOTSTRAP
                case SendDecode():
                    self.driver.current_attempt.last_sent_s = self.now_s
                    todo.extend(self.driver.decode_sent(self.driver.current_attempt, self.now_s))
                case Abandon():
                    if self.driver.attempt is not None:
                        assert self.driver.release(self.now_s) == self.has_tokens
                case End() | Fail() as command:
                    self.ended.append(command)
                    self.driver.end(self.now_s)

    def place(self, command: Place) -> Sequence[Command]:
        token_ids = PROMPT + array("I", self.driver.journey.generated)
        asked = attempt_request(
            REQUEST,
            prompt_of(REQUEST, token_ids, block_size=BLOCK_SIZE),
            token_ids,
            attempt=command.attempt,
            excluded=command.excluded,
            kv_lost_from=command.kv_lost_from,
            plans=command.plans,
        )
        self.has_tokens = 0
        try:
            placement = self.placer.place(asked, A_DRAW, now_s=self.now_s)
        except RoutingRefused as refused:
            return self.driver.journey.handle(NotPlaced(refused))
        return self.driver.placed(Attempt(placement, placed_s=self.now_s))

    def take(self, count: int) -> None:
        self.has_tokens += count
        self.driver.tokens(range(count), self.now_s)

    def lose(self, leg: Leg, how: str) -> None:
        attempt, state = self.driver.current_attempt, self.state
        decision = attempt.placement.decision
        pick = attempt.placement.prefill_pick if leg is Leg.PREFILL else decision.decode
        lost = LegLost(
            pick.leg,
            pick.rank.worker_id,
            "it failed",
            full=how == "full",
            repeated=how == "repeated",
            blameless=how in {"blameless", "leaves"},
            shutting_down=how == "leaves",
            taken=how == "taken",
        )
        if how == "silent":
            self.driver.silent("no token", self.now_s)
            self.failures.append((pick.rank.worker_id, Fault.SILENT))
            if state is State.DECODING and attempt.prefill_runs_in_parallel:
                self.failures.append((attempt.placement.prefill_pick.rank.worker_id, Fault.SILENT))
        elif how in {"failed", "taken"}:
            self.failures.append((pick.rank.worker_id, Fault.LOST))
        n_counted = len(self.events.failures)
        if leg is Leg.PREFILL:
            self.perform(self.driver.prefill_ended(attempt, lost, self.now_s))
        else:
            self.perform(self.driver.last_leg_lost(attempt, lost, self.now_s))
        is_sure = how in {"failed", "silent"} or (how == "taken" and state is State.STREAMING)
        assert not is_sure or len(self.events.failures) > n_counted, "nobody else has to fail it first"

    def lose_kv(self, loss: KvLoss) -> None:
        attempt, decode = self.driver.current_attempt, self.driver.current_attempt.placement.decision.decode
        event = self.driver.kv_loss(attempt, loss, "no way")
        lost = LegLost(decode.leg, decode.rank.worker_id, "no way")
        if event is None:
            self.failures.append((decode.rank.worker_id, Fault.LOST))
            self.perform(self.driver.last_leg_lost(attempt, lost, self.now_s))
        else:
            self.perform(self.driver.kv_lost(attempt, event, loss, lost, self.now_s))

    def check(self) -> None:
        """The ledger has what the attempt under way holds, and nothing is counted that did not happen."""
        attempt = self.driver.attempt
        columns, slots = self.placer.ledger.columns(), range(self.placer.fleet.n_slots)
        blocks = {slot: int(columns.active_blocks[slot]) for slot in slots if columns.active_blocks[slot]}
        if attempt is None:
            assert (len(self.placer.ledger), blocks) == (0, {})
        else:
            prompt, n_tokens = attempt.placement.prompt, self.has_tokens
            full = (prompt.isl_tokens + n_tokens) // BLOCK_SIZE - prompt.isl_tokens // BLOCK_SIZE
            assert blocks == {attempt.placement.decision.decode.slot: prompt.total_blocks + full}
        counted = list(self.events.failures)
        for failure in self.failures:
            if failure in counted:
                counted.remove(failure)
        assert counted == []


@given(st.data(), st.sampled_from(Shape))
def test_a_driver_books_each_lease_and_counts_each_failure_once(data: st.DataObject, shape: Shape) -> None:
    drive = Drive(shape)
    driver = drive.driver
    drive.perform(driver.journey.begin())
    for _ in range(12):
        drive.now_s += 1.0
        drive.check()
        if drive.state is State.DONE:
            break
        placement = driver.current_attempt.placement
        match drive.state:
            case State.PREFILLING:
                if data.draw(st.booleans()):
                    driver.prefilled(driver.current_attempt, drive.now_s)
                    done = PrefillDone(placement.prefill_pick.rank.worker_id, {})
                    drive.perform(driver.prefill_ended(driver.current_attempt, done, drive.now_s))
                else:
                    drive.lose(Leg.PREFILL, data.draw(how_lost))
            case State.DECODING:
                what = data.draw(st.sampled_from(["first", "lost", "kv"]))
                if what == "first":
                    driver.first_tokens(drive.now_s)
                    driver.prompt_computed(driver.current_attempt, drive.now_s)
                    drive.take(data.draw(st.integers(0, 40)))
                elif what == "lost":
                    drive.lose(Leg.DECODE, data.draw(how_lost))
                else:
                    drive.lose_kv(data.draw(st.sampled_from(KvLoss)))
            case _:
                what = data.draw(st.sampled_from(["more", "lost", "end"]))
                if what == "more":
                    drive.take(data.draw(st.integers(0, 40)))
                elif what == "lost":
                    drive.lose(Leg.DECODE, data.draw(how_lost))
                else:
                    drive.perform(driver.journey.handle(Finished(FinishReason.STOP)))
    else:
        return
    drive.check()
    assert len(drive.ended) == 1
    assert sorted(drive.events.failures) == sorted(drive.failures)
