"""An upgrade by zones ends, and changes one zone after another, whatever the fleet is like."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from kvrouter.kube.objects import Manifest
from kvrouter.operator.labels.pods import Pod
from kvrouter.operator.plan.manifest import TEMPLATE_HASH
from kvrouter.operator.plan.workload import pods_at_a_time
from kvrouter.operator.reconcile.upgrades import Serving, WorkerGroup, next_step
from tests.testing.planned_deployments import at, deployment, has

ZONE = "zone"
BEGIN = datetime(2026, 11, 30, tzinfo=UTC)
WARM_UP_S, TICK_S = 60, 20
TICKS_MAX = 2_000
COMPONENTS = {each.name: each for each in deployment().spec.components if each.type.is_worker}


@dataclass
class Worker:
    """One pod: it loads until ``ready_s``."""

    name: str
    zone: str
    is_new: bool
    ready_s: int
    cost: str | None = None


@dataclass
class Component:
    """A Deployment and its pods, as their controllers handle them."""

    name: str
    workers: list[Worker]
    made: int = 0
    at_a_time: int = 0
    """How many workers the Deployment replaces at a time; 0 while it is paused."""

    def group(self, now_s: int) -> WorkerGroup:
        """Return what the operator sees."""
        metadata: JsonValue = {"annotations": {TEMPLATE_HASH: "new"}}
        pods = [(each.is_new, _pod(each, now_s)) for each in self.workers]
        old, new = ([pod for is_new, pod in pods if is_new is wanted] for wanted in (False, True))
        spec: JsonValue = {"replicas": len(self.workers), "paused": not self.at_a_time}
        return WorkerGroup(
            COMPONENTS[self.name],
            {"metadata": metadata, "spec": {}},
            {"metadata": metadata, "spec": spec},
            old,
            new,
            WARM_UP_S,
            deadline_s=10_000,
        )

    def replace(self, now_s: int, load_s: int) -> list[str]:
        """Replace as many old workers as the Deployment may now; return their zones."""
        n_missing = sum(each.ready_s + WARM_UP_S > now_s for each in self.workers)
        old = [each for each in self.workers if not each.is_new]
        old.sort(key=lambda each: (int(each.cost or 0), -int(each.name)))
        gone = old[: max(0, self.at_a_time - n_missing)]
        for each in gone:
            self.made += 1
            new = Worker(str(1000 + self.made), each.zone, is_new=True, ready_s=now_s + load_s)
            self.workers[self.workers.index(each)] = new
        return [each.zone for each in gone]


def _pod(worker: Worker, now_s: int) -> Pod:
    return Pod(
        worker.name,
        labels={ZONE: worker.zone},
        is_ready=worker.ready_s <= now_s,
        created=BEGIN.isoformat(),
        ready_since=(BEGIN + timedelta(seconds=worker.ready_s)).isoformat(),
        deletion_cost=worker.cost,
    )


def n_replaced(workload: Manifest | None) -> int:
    """Return how many workers a staged Deployment replaces; all others have no old ones."""
    if workload is None or has(spec := at(workload, "spec"), "paused"):
        return 0
    found = at(spec, "strategy", "rollingUpdate", "maxUnavailable")
    assert isinstance(found, int)
    return found


@st.composite
def fleets(draw: st.DrawFn) -> list[Component]:
    """Prefill and decode components whose workers are spread over up to four zones."""
    zones = st.lists(st.sampled_from("abcd"), max_size=9)

    def workers() -> list[Worker]:
        return [
            Worker(str(number), zone, is_new=False, ready_s=-1000) for number, zone in enumerate(draw(zones))
        ]

    return [Component(name, workers()) for name in ("prefill", "decode")]


@given(fleets(), st.integers(0, 200), st.integers(1, 3))
def test_an_upgrade_ends_and_changes_one_zone_after_another(
    fleet: Sequence[Component], load_s: int, acts: int
) -> None:
    order: list[str] = []
    for tick in range(TICKS_MAX):
        now_s = tick * TICK_S
        now = BEGIN + timedelta(seconds=now_s)
        step = next_step([each.group(now_s) for each in fleet], "zone", ZONE, Serving(), now)
        if step.finding is None:
            break
        is_warm = all(each.ready_s + WARM_UP_S <= now_s for one in fleet for each in one.workers)
        costs = {(pod.labels[ZONE], pod.name): cost for pod, cost in step.costs}
        for each in fleet:
            each.at_a_time = n_replaced(step.workloads.get(each.name))
            for worker in each.workers:
                worker.cost = costs.get((worker.zone, worker.name), worker.cost)
            for _ in range(acts):
                began = each.replace(now_s, load_s)
                assert len(began) <= pods_at_a_time(COMPONENTS[each.name], len(each.workers))
                assert is_warm or not began
                order += began
    assert all(worker.is_new for each in fleet for worker in each.workers)
    assert order == sorted(order)
    assert not any(worker.cost for each in fleet for worker in each.workers)
