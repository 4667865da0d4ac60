"""The operator's metrics, log events and health."""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping

from kvrouter.kube.client import ClusterError, RequestRefused
from kvrouter.kube.objects import Key, ResourceKind
from kvrouter.operator.admission.validate import Verdict
from kvrouter.operator.api.status import Condition
from kvrouter.operator.reconcile.apply import Changes
from kvrouter.telemetry import Event, OperatorTelemetry, log_event
from kvrouter.telemetry.logs import LogThrottle


class ReplicaHealth:
    """Readiness and liveness of one replica: the parts that it waits for, and the tasks that it needs.

    A replica that follows is ready too. A part that was there once counts as there: a cluster that stops
    answering is no reason to take replicas out of the Service, or to restart them.
    """

    def __init__(self) -> None:
        self._waits: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def waits_for(self, what: str, why: str) -> None:
        """Make the replica unready until :meth:`has` is called for ``what``; ``why`` is the reason."""
        self._waits[what] = why

    def waits_still(self, what: str, why: str) -> None:
        """Set the reason ``why``, if the replica still waits for ``what``."""
        if what in self._waits:
            self._waits[what] = why

    def has(self, what: str) -> None:
        """Note that ``what`` is there."""
        self._waits.pop(what, None)

    def needs(self, what: str, task: asyncio.Task[None]) -> None:
        """Make the replica unhealthy once ``task`` has ended."""
        self._tasks[what] = task

    def why_not_ready(self) -> str | None:
        """Return the reasons in one line; None when the replica is ready."""
        return "; ".join(f"{what}: {why}" for what, why in self._waits.items()) or None

    def why_not_well(self) -> str | None:
        """Return the reasons in one line; None when the replica is healthy."""
        return "; ".join(f"{what} has ended" for what, task in self._tasks.items() if task.done()) or None


log = logging.getLogger("kvrouter.operator.observed")  # as log lines name it

API_SERVER = "the API server"
LEADER, ADMISSION = "leader", "admission"
DEFINITION = "the definition"


class OperatorInstrumentation:
    """Writes metrics and log events for the controller, the lease and the admission server."""

    def __init__(self, health: ReplicaHealth) -> None:
        self._health = health
        health.waits_for(API_SERVER, "it has not answered yet")
        health.waits_for(DEFINITION, "it has not been looked at yet")
        self.telemetry = OperatorTelemetry()
        self.telemetry.before_scrape(self._show_conditions)
        self._throttle = LogThrottle()
        self._warnings = LogThrottle(again_after_s=math.inf)
        self._lost: dict[str, set[str]] = {}
        self._others: dict[Key, str] = {}
        self._conditions: dict[Key, dict[str, str]] = {}

    def answered(self) -> None:
        """The API server answered: readiness waits for it no longer."""
        self._health.has(API_SERVER)

    def leads(self, identity: str) -> None:
        """This replica leads from now on."""
        self.telemetry.leading.set(1.0)
        log_event(log, Event.OPERATOR_LEADS, identity=identity)

    def follows(self, identity: str, reason: str) -> None:
        """This replica no longer leads."""
        self.telemetry.leading.set(0.0)
        self.telemetry.waiting.set(0)
        self._others.clear()
        self._conditions.clear()
        self.telemetry.stood_back.set(0)
        for kind in self._lost:  # a follower watches nothing, so nothing is lost
            self._mark(kind, LEADER, is_lost=False)
        log_event(log, Event.OPERATOR_FOLLOWS, identity=identity, reason=reason)

    def definition_is(self, why: str | None) -> None:
        """The definition is kvrouter's, or is not for the reason ``why``.

        A replica is ready in both cases: for another project's definition its server allows every request.
        """
        self._health.has(DEFINITION)
        self.telemetry.definition_foreign.set(float(why is not None))
        if why is None:
            log_event(log, Event.DEFINITION_OWN)
        else:
            log_event(log, Event.DEFINITION_FOREIGN, reason=why)

    def not_renewed(self, error: ClusterError) -> None:
        """The lease could not be read or written."""
        self._health.waits_still(API_SERVER, error.message)
        if self._throttle.allows(f"lease: {error}"):
            log_event(log, Event.LEASE_NOT_RENEWED, detail=error.message)

    def changed(self, key: Key, changes: Changes) -> None:
        """Objects of this deployment were written."""
        for change, places in changes.done.items():
            for place in places:
                self.telemetry.objects.inc(place.kind, change)
        parts = [f"{change} {', '.join(map(str, places))}" for change, places in changes.done.items()]
        log_event(log, Event.DEPLOYMENT_APPLIED, deployment=str(key), detail="; ".join(parts))

    def labelled(self, pod: Key) -> None:
        """A pod got the labels of its node after its binding."""
        self.telemetry.labelled_late.inc()
        log_event(log, Event.POD_LABELLED, pod=str(pod))

    def event_refused(self, error: RequestRefused) -> None:
        """The API server refused an event, which is dropped."""
        if self._throttle.allows(f"event: {error.message}"):
            log_event(log, Event.EVENT_REFUSED, detail=error.message)

    def warned(self, asked: str, text: str) -> None:
        """The API server sent a warning with its answer to the request ``asked``."""
        line = f"{asked}: {text}"
        if self._warnings.allows(line):
            log_event(log, Event.API_SERVER_WARNS, detail=line)

    def looked(self, key: Key, duration_s: float, error: Exception | None, retry_s: float) -> None:
        """A reconcile of a deployment ended; after an ``error`` the next one is in ``retry_s`` seconds."""
        self.telemetry.looks.inc("done" if error is None else "failed")
        self.telemetry.reconcile_s.observe(duration_s)
        if error is None:
            return
        if not isinstance(error, ClusterError):
            log_event(log, Event.INTERNAL_ERROR, exc_info=error, deployment=str(key))
        elif self._throttle.allows(f"{key}: {error}"):
            log_event(
                log, Event.DEPLOYMENT_FAILED, deployment=str(key), detail=error.message, duration_s=retry_s
            )

    def waiting(self, deployments: int) -> None:
        """The workqueue holds this many deployments."""
        self.telemetry.waiting.set(deployments)

    def stood_back(self, key: Key, holder: str | None) -> None:
        """The operator ``holder`` manages a deployment instead of this one; with None it no longer does."""
        if holder is None:
            self._others.pop(key, None)
        else:
            self._others[key] = holder
            log_event(log, Event.OPERATOR_STANDS_BACK, deployment=str(key), detail=holder)
        self.telemetry.stood_back.set(len(self._others))

    def conditions_are(self, key: Key, conditions: Iterable[Condition]) -> None:
        """Show a deployment's conditions; without any it is gone, or another operator's."""
        found = {each.type: each.status.value.lower() for each in conditions}
        if found:
            self._conditions[key] = found
        else:
            self._conditions.pop(key, None)

    def _show_conditions(self) -> None:
        self.telemetry.conditions.replace(
            {
                (key.namespace, key.name, condition, status): 1.0
                for key, found in self._conditions.items()
                for condition, status in found.items()
            }
        )

    def lost(self, kind: ResourceKind, error: ClusterError | None) -> None:
        """The leader cannot watch this kind; with None as ``error`` it can again."""
        self._report_lost(kind, error, LEADER)

    def lost_at_admission(self, kind: ResourceKind, error: ClusterError | None) -> None:
        """The admission server cannot watch this kind; with None as ``error`` it can again."""
        self._report_lost(kind, error, ADMISSION)

    def _mark(self, kind: str, watcher: str, *, is_lost: bool) -> None:
        """Set the gauge of a kind, which is lost while any watcher in this process cannot watch it."""
        by = self._lost.setdefault(kind, set())
        (by.add if is_lost else by.discard)(watcher)
        self.telemetry.watches_lost.set(float(bool(by)), kind)

    def _report_lost(self, kind: ResourceKind, error: ClusterError | None, watcher: str) -> None:
        self._mark(kind.name, watcher, is_lost=error is not None)
        if error is None:
            log_event(log, Event.CLUSTER_BACK, kind=kind.name)
        else:
            log_event(log, Event.CLUSTER_LOST, kind=kind.name, detail=error.message)

    def judged(self, verdict: Verdict) -> None:
        """An admission request was answered."""
        self.telemetry.reviews.inc("allowed" if verdict.is_allowed else "refused")
        if not verdict.is_allowed:
            log_event(log, Event.ADMISSION_REFUSED, detail="; ".join(each.must for each in verdict.problems))

    def bound(self, labels: Mapping[str, str] | None) -> None:
        """A pod's binding was allowed with these labels; None: they were not known in time."""
        self.telemetry.bindings.inc("unknown" if labels is None else "labelled" if labels else "left")

    def not_answered(self, reason: str) -> None:
        """The admission server refused a request: it was invalid, or the server was at its limit."""
        self.telemetry.reviews.inc("none")
        if self._throttle.allows(f"admission: {reason}"):
            log_event(log, Event.ADMISSION_UNANSWERED, reason=reason)

    def certificate_changed(self) -> None:
        """The admission server presents another certificate."""
        log_event(log, Event.CERTIFICATE_CHANGED)

    def certificate_refused(self, reason: str) -> None:
        """The certificate could not be obtained, or its changed files could not be loaded."""
        if self._throttle.allows(f"certificate: {reason}"):
            log_event(log, Event.CERTIFICATE_REFUSED, reason=reason)
