"""Scripts of what happens to one placer, and what came of each step: to compare two runs of one script.

As a program it prints a digest of many scripts, so that two processes can be compared too.
"""

import random
import sys
from array import array
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

from msgspec.structs import replace

from kvrouter.core.constraints import RouterConfigOverride, RouterMode, RoutingConstraints
from kvrouter.core.cost_rules import COST_RULES
from kvrouter.core.errors import RoutingRefused
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import DpRank, Epoch, LeaseKey, RequestId, RouterId, Slot, Taint, WorkerId, WorkerRank
from kvrouter.core.requests import DEFAULT_LEVEL, GenerateRequest, KvLoss, Leg, Sampling
from kvrouter.core.workers import Enforcement, LoadReport, Role
from kvrouter.kernel.fleet.circuit import Fault
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.index import NativeApproximateIndex
from kvrouter.kernel.journey import RetryPlan, Shape
from kvrouter.kernel.ledger.journal import Journal, SharedLedger
from kvrouter.kernel.ledger.port import NativeLedger
from kvrouter.kernel.ledger.replicas import Replicas, Replication
from kvrouter.kernel.placement.attempt_request import attempt_request, hash_prompt
from kvrouter.kernel.placement.cache_view import PredictedCacheView
from kvrouter.kernel.placement.placement import Draw, Placement
from kvrouter.kernel.placement.waiting_line import Ticket
from kvrouter.kernel.routing.interface import RoutingSettings
from tests.testing.placement_events import RecordedPlacementEvents, plain_placer
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card

WORKERS = 6
ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)
ENFORCEMENT = {3: Enforcement.PREFERRED, 6: Enforcement.FALLBACK}
TAINTS = ("gold", "green", "kvrouter.adapter/a", "west", "spot")
STEPS_OF_A_SCRIPT = 120


class Step(NamedTuple):
    """One thing that happens. What the numbers choose depends on ``what``."""

    what: int
    one: int
    two: int
    bits: int
    """64 random bits: a draw."""


class PlacementScript:
    """One placer, to which steps are done. ``trace`` has what came of each."""

    def __init__(self, seed: int) -> None:
        self.now_s = 50.0
        self.fleet = Fleet(MODEL, BLOCK_SIZE)
        self.events = RecordedPlacementEvents()
        self.due: deque[Callable[[], None]] = deque()
        self.replicas = Replicas(RouterId("here"), silent_after_s=5.0, ask_again_s=1.0)
        self.journal = Journal(RouterId("here"), on_pending=lambda: None)
        modes, costs = tuple(RouterMode), tuple(COST_RULES)
        self.placer = plain_placer(
            self.fleet,
            cache=PredictedCacheView(NativeApproximateIndex(ttl_s=20.0)),
            settings=RoutingSettings(
                mode=modes[seed % len(modes)],
                cost=costs[seed // len(modes) % len(costs)],
                temperature=(seed >> 2) % 3 / 2.0,
                active_decode_blocks_threshold=0.05 if seed & 16 else None,
            ),
            circuit_seed=seed,
            events=self.events,
            call_soon=self.due.append,
            now_s=self.now_s,
            replication=Replication(self.journal, self.replicas),
        )
        self.other_journal = Journal(RouterId("other"), on_pending=lambda: None)
        self.other = SharedLedger(NativeLedger(64), self.fleet, self.other_journal)
        self.incarnations: dict[WorkerId, Epoch] = {}
        self.open: list[Placement] = []
        self.tickets: list[Ticket] = []
        self.n_requests = 0
        self.trace: list[str] = []

    def run(self, steps: list[Step]) -> str:
        """Do the steps and return all that came of them."""
        actions = (
            self.join,
            self.leave,
            self.place,
            self.place,
            self.place,
            self.explain,
            self.go_on,
            self.go_on,
            self.release,
            self.fail,
            self.report,
            self.hear,
            self.pass_time,
            self.set_thresholds,
        )
        for step in steps:
            actions[step.what % len(actions)](step)
            for _ in range(len(self.due)):
                self.due.popleft()()
            self.note_ledger()
        self.note(self.events.heard)
        return "\n".join(self.trace)

    def note(self, what: object) -> None:
        """Add to the trace."""
        self.trace.append(repr(what))

    def note_placement(self, placement: Placement) -> None:
        """Add a placement, with the names of the circuits that let it in."""
        self.note((replace(placement, tries=()), [subject for subject, _ in placement.tries]))

    def note_ledger(self) -> None:
        """Add the ledger as it is, and what the circuits let through."""
        columns = self.placer.ledger.columns()
        self.note(
            (len(self.placer.ledger), columns.prefill_tokens.tobytes(), columns.active_blocks.tobytes())
        )
        self.note([self.placer.circuits.state_of(worker, now_s=self.now_s) for worker in self.incarnations])
        self.note(list(self.placer.circuits.pairs(now_s=self.now_s)))
        self.note(list(self.journal.take()))

    def join(self, step: Step) -> None:
        """A worker joins, or comes back as another."""
        worker = WorkerId(1 + step.one % WORKERS)
        role = ROLES[worker % 3]
        self.incarnations[worker] = incarnation = Epoch(self.incarnations.get(worker, 0) + 1)
        change = self.fleet.join(
            card(
                worker,
                role,
                zone="ab"[step.two % 2],
                enforcement=ENFORCEMENT.get(worker),
                weight=0.7 if worker == 3 else None,
                bootstrap=worker % 2 == 0,
                dp_size=1 + worker % 2,
                incarnation=incarnation,
                taints=tuple(taint for n, taint in enumerate(TAINTS) if step.bits >> n & 1),
            )
        )
        self._freed(change.freed)

    def leave(self, step: Step) -> None:
        """A worker leaves."""
        worker = WorkerId(1 + step.one % WORKERS)
        if worker in self.incarnations:
            self._freed(self.fleet.leave(worker, self.incarnations[worker]))

    def _freed(self, slots: tuple[Slot, ...] | list[Slot]) -> None:
        for slot in slots:
            self.placer.freed(slot)
        self.placer.fleet_changed(now_s=self.now_s)

    def _request(self, step: Step) -> GenerateRequest:
        self.n_requests += 1
        tokens = array("I", [step.one % 3] * (step.two % 90 + 1))
        override = RouterConfigOverride(router_temperature=(None, 0.0, 1.5)[step.two % 3])
        preferred = {Taint(taint): (n - 2) / 3 for n, taint in enumerate(TAINTS)} if step.one % 2 else {}
        return GenerateRequest(
            request_id=RequestId(f"request-{self.n_requests}"),
            model=MODEL,
            token_ids=tokens,
            sampling=Sampling(max_tokens=8),
            constraints=RoutingConstraints(preferred_taints=preferred),
            override=override,
        )

    def place(self, step: Step) -> None:
        """A request comes; one that nobody may take waits."""
        request = self._request(step)
        lost = frozenset(WorkerId(1 + n) for n in range(WORKERS) if step.bits >> (8 + n) & 1)
        asked = attempt_request(
            request,
            hash_prompt(request.token_ids, block_size=BLOCK_SIZE),
            request.token_ids,
            attempt=step.two % 2,
            excluded=frozenset([WorkerId(1 + step.two % WORKERS)]) if step.one % 5 == 0 else frozenset(),
            kv_lost_from=lost if step.one % 4 == 0 else frozenset(),
            plans=(RetryPlan.OTHER_PREFILL, RetryPlan.AGGREGATED, RetryPlan.USUAL)[step.one % 3 :],
        )
        draw = Draw(step.bits, self.n_requests, step.bits ^ 0x5A5A)
        try:
            placement = self.placer.place(asked, draw, now_s=self.now_s)
        except RoutingRefused as refused:
            self.note((type(refused), str(refused), refused.refusals, refused.role, refused.domain))
            line, wait_s = self.placer.waiting.line_for(refused)
            if wait_s and not line.is_full:
                number = self.n_requests
                self.tickets.append(
                    line.enter(lambda: self.note(("called", number)), DEFAULT_LEVEL, now_s=self.now_s)
                )
            return
        self.note_placement(placement)
        self.open.append(placement)

    def explain(self, step: Step) -> None:
        """Somebody asks where a request would go."""
        try:
            self.note(self.placer.explain(self._request(step), Draw(step.bits, 0, 0), now_s=self.now_s))
        except RoutingRefused as refused:
            self.note((type(refused), str(refused), refused.refusals, refused.role, refused.domain))

    def go_on(self, step: Step) -> None:
        """An attempt goes on."""
        if not self.open:
            return
        placement = self.open[step.one % len(self.open)]
        match step.two % 4:
            case 0 if placement.prefill_address:
                self.placer.prefill_done(placement, now_s=self.now_s)
            case 1:
                self.placer.first_token(placement, now_s=self.now_s)
            case 2:
                self.placer.output_blocks(placement, 1 + step.two % 3, now_s=self.now_s)
            case 3 if placement.shape is Shape.SYNCHRONOUS:
                try:
                    self.placer.pick_decode_again(placement, now_s=self.now_s)
                except RoutingRefused as refused:
                    self.note(str(refused))
                self.note_placement(placement)

    def release(self, step: Step) -> None:
        """An attempt ends, or somebody stops waiting."""
        if step.two % 4 == 0 and self.tickets:
            self.tickets.pop(step.one % len(self.tickets)).leave()
        elif self.open:
            self.placer.release(self.open.pop(step.one % len(self.open)), now_s=self.now_s)

    def fail(self, step: Step) -> None:
        """A leg fails, or KV is lost."""
        if not self.open:
            return
        placement = self.open.pop(step.one % len(self.open))
        circuits, since_s = self.placer.circuits, self.now_s - 0.5
        if step.two % 3 == 0:
            loss = KvLoss.REFUSED if step.two % 4 == 0 else KvLoss.BROKEN
            circuits.kv_lost(placement, loss, since_s=since_s, now_s=self.now_s)
        else:
            leg = (
                Leg.PREFILL
                if step.two % 3 == 1 and placement.prefill_address
                else placement.decision.decode.leg
            )
            circuits.failed(placement, leg, Fault.LOST, since_s=since_s, now_s=self.now_s)
        self.placer.release(placement, now_s=self.now_s)

    def report(self, step: Step) -> None:
        """A worker rank reports its load."""
        rank = WorkerRank(WorkerId(1 + step.one % WORKERS), DpRank(0))
        slot = self.fleet.slot_of(rank)
        if slot is not None:
            self.placer.reported(LoadReport(rank, step.two % 200, 1024), slot, now_s=self.now_s)

    def hear(self, step: Step) -> None:
        """Another router books at a rank."""
        rank = WorkerRank(WorkerId(1 + step.one % WORKERS), DpRank(0))
        slot = self.fleet.slot_of(rank)
        if slot is None:
            return
        self.n_requests += 1
        self.other.book(
            key=LeaseKey(RouterId("other"), RequestId(f"other-{self.n_requests}"), 1),
            slot=slot,
            prompt=Prompt([step.two % 3] * 40, block_size=BLOCK_SIZE),
            prefill_tokens=40,
            track_blocks=True,
        )
        for message in self.other_journal.take():
            self.replicas.on_message(message, now_s=self.now_s)

    def pass_time(self, step: Step) -> None:
        """Time passes."""
        self.now_s += (0.01, 0.2, 1.0, 7.0)[step.one % 4]
        self.replicas.tick(now_s=self.now_s)

    def set_thresholds(self, step: Step) -> None:
        """The operator changes who is busy."""
        self.placer.set_busy_thresholds(
            decode_blocks=(None, 0.02, 0.5)[step.one % 3],
            prefill_tokens=(None, 64)[step.two % 2],
            now_s=self.now_s,
        )


def script(seed: int) -> list[Step]:
    """Return a random script that begins with a fleet."""
    chance = random.Random(seed)
    bits = chance.getrandbits
    fleet = [Step(0, worker, bits(4), bits(64)) for worker in range(WORKERS)]
    return fleet + [Step(bits(8), bits(8), bits(8), bits(64)) for _ in range(STEPS_OF_A_SCRIPT)]


def main(n_scripts: int) -> None:
    """Print the digest of so many scripts' traces."""
    digest = sha256()
    for seed in range(n_scripts):
        digest.update(PlacementScript(seed).run(script(seed)).encode())
    print(digest.hexdigest())


if __name__ == "__main__":
    main(int(sys.argv[1]))
