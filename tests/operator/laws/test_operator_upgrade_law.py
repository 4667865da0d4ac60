"""An upgrade by zones ends, and changes one zone after another, whatever the fleet is like."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

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
TICKS_MAX = 400
NEVER_S = 10**9
NEW = 2
COMPONENTS = {each.name: each for each in deployment().spec.components if each.type.is_worker}


@dataclass
class Worker:
    """One pod: it has the template of this number, the oldest is 0, and loads until ``ready_s``."""

    name: str
    zone: str
    template: int
    ready_s: int
    cost: str | None = None

    @property
    def is_new(self) -> bool:
        """Whether it has the planned template."""
        return self.template == NEW

    @property
    def is_dead(self) -> bool:
        """Whether it never gets Ready."""
        return self.ready_s == NEVER_S


@dataclass
class Component:
    """A Deployment and its pods, as their controllers handle them."""

    name: str
    workers: list[Worker]
    made: int = 0
    missing: list[str] = field(default_factory=list)
    """The zones of old workers that ended, whose new ones do not exist yet."""
    at_a_time: int = 0
    """How many workers the Deployment replaces at a time; 0 while it is paused."""

    def group(self, now_s: int) -> WorkerGroup:
        """Return what the operator sees."""
        metadata: JsonValue = {"annotations": {TEMPLATE_HASH: "new"}}
        pods = [(each.template, _pod(each, now_s)) for each in self.workers]
        *old, new = ([pod for number, pod in pods if number == wanted] for wanted in range(NEW + 1))
        spec: JsonValue = {"replicas": self.size, "paused": not self.at_a_time}
        return WorkerGroup(
            COMPONENTS[self.name],
            {"metadata": metadata, "spec": {}},
            {"metadata": metadata, "spec": spec},
            [each for each in old if each],
            new,
            WARM_UP_S,
            deadline_s=10_000,
        )

    @property
    def size(self) -> int:
        """How many workers there should be."""
        return len(self.workers) + len(self.missing)

    def cold(self, now_s: int) -> list[Worker]:
        """Return the new workers that are not warm."""
        return [each for each in self.workers if each.is_new and each.ready_s + WARM_UP_S > now_s]

    def create(self, ready_s: int) -> None:
        """Create one of the missing workers, if there are any."""
        if self.missing:
            self.made += 1
            self.workers.append(Worker(str(self.made), self.missing.pop(0), NEW, ready_s))

    def end(self, now_s: int) -> list[Worker]:
        """End as many old workers as the Deployment may now, and return them: first those that are not
        Ready, each kind by the age of its ReplicaSet.
        """
        old = [each for each in self.workers if not each.is_new]
        old.sort(key=lambda each: (each.template, int(each.cost or 0), -int(each.name)))
        dead, others = ([each for each in old if each.is_dead is wanted] for wanted in (True, False))
        left = max(0, self.at_a_time - len(self.cold(now_s)) - len(self.missing))
        gone = dead[:left] + others[: max(0, left - len(dead))]
        for each in gone:
            self.workers.remove(each)
            self.missing.append(each.zone)
        return gone


def _pod(worker: Worker, now_s: int) -> Pod:
    return Pod(
        worker.name,
        labels={ZONE: worker.zone},
        is_ready=worker.ready_s <= now_s,
        created=BEGIN.isoformat(),
        ready_since="" if worker.is_dead else (BEGIN + timedelta(seconds=worker.ready_s)).isoformat(),
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
def fleets(
    draw: st.DrawFn, templates: st.SearchStrategy[int], ready_s: st.SearchStrategy[int]
) -> list[Component]:
    """Prefill and decode components whose workers are spread over up to four zones, with these old templates
    and times of readiness.
    """
    spread = st.lists(st.tuples(st.sampled_from("abcd"), templates, ready_s), max_size=9)

    def workers(first: int) -> list[Worker]:
        found = enumerate(draw(spread), first)
        return [Worker(str(number), zone, template, since_s) for number, (zone, template, since_s) in found]

    return [Component("prefill", workers(0), made=1000), Component("decode", workers(100), made=2000)]


class Pace(NamedTuple):
    """How fast a cluster is: how long a new worker loads, how often each of two Deployments acts between two
    steps, in turn, and after how many steps a missing worker is created, one at a time, as under a quota; 0
    for at once. In the ``unread`` steps nobody knows whether a frontend passes workers over.
    """

    load_s: int
    acts: Sequence[Sequence[int]]
    create_each: int
    unread: Set[int]


ACTS = st.integers(0, 3)
PACES = st.builds(
    Pace,
    st.integers(0, 200),
    st.lists(st.tuples(ACTS, ACTS), max_size=3).map(lambda acts: [*acts, (1, 1)]),
    st.integers(0, 6),
    st.frozensets(st.integers(0, 60)),
)


def upgraded(fleet: Sequence[Component], pace: Pace) -> list[str]:
    """Upgrade a fleet, and return the zones of its workers in the order in which they went."""
    order: list[str] = []
    for tick in range(TICKS_MAX):
        now_s = tick * TICK_S
        now = BEGIN + timedelta(seconds=now_s)
        serves = Serving(passed_over=None if tick in pace.unread else ())
        groups = [each.group(now_s) for each in fleet]
        step = next_step(groups, "zone", ZONE, serves, now)
        if step.finding is None:
            break
        costs = {pod.name: cost for pod, cost in step.costs}
        is_held = tick in pace.unread and any(group.new for group in groups if group.old)
        went: list[Worker] = []
        for each, acts in zip(fleet, pace.acts[tick % len(pace.acts)], strict=True):
            each.at_a_time = n_replaced(step.workloads.get(each.name))
            for worker in each.workers:
                worker.cost = costs.get(worker.name, worker.cost)
            waiting = len(each.cold(now_s)) + len(each.missing)
            began = [worker for _ in range(acts) for worker in each.end(now_s)]
            assert not began or len(began) + waiting <= pods_at_a_time(COMPONENTS[each.name], each.size)
            assert not waiting or all(worker.is_dead for worker in began)
            went += began
            if pace.create_each == 0 or tick % pace.create_each == 0:
                for _ in each.missing[: 1 if pace.create_each else None]:
                    each.create(now_s + pace.load_s)
        assert not (went and is_held), "a worker went though nobody knows how the new ones serve"
        assert all(worker.cost for worker in went)
        assert len({worker.zone for worker in went if not worker.is_dead}) < 2
        order += [worker.zone for worker in went]
    assert all(worker.is_new for each in fleet for worker in each.workers)
    assert not any(worker.cost for each in fleet for worker in each.workers)
    return order


@given(fleets(st.just(0), st.just(-1000)), PACES)
def test_an_upgrade_ends_and_changes_one_zone_after_another(fleet: Sequence[Component], pace: Pace) -> None:
    order = upgraded(fleet, pace)
    assert order == sorted(order)


@given(fleets(st.integers(0, 1), st.sampled_from((-1000, -1000, NEVER_S))), PACES)
def test_only_marked_workers_go_from_fleets_of_two_old_templates(
    fleet: Sequence[Component], pace: Pace
) -> None:
    upgraded(fleet, pace)
