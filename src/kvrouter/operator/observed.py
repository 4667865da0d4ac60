"""What the operator tells of itself: log lines and metrics."""

import logging
from collections.abc import Mapping

from kvrouter.operator.admission.validate import Verdict
from kvrouter.operator.health import Health
from kvrouter.operator.reconcile.applied import Changes
from kvrouter.operator.reconcile.cluster import ClusterError, Refused
from kvrouter.operator.reconcile.kinds import Key, Kind
from kvrouter.telemetry import Event, OperatorTelemetry, log_event
from kvrouter.telemetry.seldom import Seldom

log = logging.getLogger(__name__)

API_SERVER = "the API server"
LEADER, ADMISSION = "leader", "admission"
DEFINITION = "the definition"


class Observed:
    """Listens to the driver, the lease and the admission door."""

    def __init__(self, health: Health) -> None:
        self._health = health
        health.waits_for(API_SERVER, "it has not answered yet")
        health.waits_for(DEFINITION, "it has not been looked at yet")
        self.telemetry = OperatorTelemetry()
        self._seldom = Seldom()
        self._lost: dict[str, set[str]] = {}
        self._others: dict[Key, str] = {}

    def answered(self) -> None:
        """The API server answered."""
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
        self.telemetry.stood_back.set(0)
        for kind in self._lost:  # what only a leader watches is nobody's loss any more
            self._mark(kind, LEADER, is_lost=False)
        log_event(log, Event.OPERATOR_FOLLOWS, identity=identity, reason=reason)

    def definition_is(self, why: str | None) -> None:
        """The definition is not kvrouter's, for this reason; with None it is.

        A replica that stands back is ready all the same: its door lets everything pass, and has to be found.
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
        if self._seldom.allows(f"lease: {error}"):
            log_event(log, Event.LEASE_NOT_RENEWED, detail=error.message)

    def changed(self, key: Key, changes: Changes) -> None:
        """Objects of this deployment were written."""
        for change, places in changes.done.items():
            for place in places:
                self.telemetry.objects.inc(place.kind, change)
        told = "; ".join(f"{change} {', '.join(map(str, places))}" for change, places in changes.done.items())
        log_event(log, Event.DEPLOYMENT_APPLIED, deployment=str(key), detail=told)

    def labelled(self, pod: Key) -> None:
        """A pod got the labels of its node late."""
        self.telemetry.labelled_late.inc()
        log_event(log, Event.POD_LABELLED, pod=str(pod))

    def event_refused(self, error: Refused) -> None:
        """An event was refused, and dropped."""
        if self._seldom.allows(f"event: {error.message}"):
            log_event(log, Event.EVENT_REFUSED, detail=error.message)

    def looked(self, key: Key, duration_s: float, error: Exception | None, retry_s: float) -> None:
        """A deployment was looked at."""
        self.telemetry.looks.inc("done" if error is None else "failed")
        self.telemetry.look_s.observe(duration_s)
        if error is None:
            return
        if not isinstance(error, ClusterError):
            log_event(log, Event.INTERNAL_ERROR, exc_info=error, deployment=str(key))
        elif self._seldom.allows(f"{key}: {error}"):
            log_event(
                log, Event.DEPLOYMENT_FAILED, deployment=str(key), detail=error.message, duration_s=retry_s
            )

    def waiting(self, deployments: int) -> None:
        """So many deployments wait to be looked at."""
        self.telemetry.waiting.set(deployments)

    def stood_back(self, key: Key, holder: str | None) -> None:
        """Another operator looks after a deployment; with None no longer."""
        if holder is None:
            self._others.pop(key, None)
        else:
            self._others[key] = holder
            log_event(log, Event.OPERATOR_STANDS_BACK, deployment=str(key), detail=holder)
        self.telemetry.stood_back.set(len(self._others))

    def lost(self, kind: Kind, error: ClusterError | None) -> None:
        """The leader cannot watch this kind; with None it can again."""
        self._tell_lost(kind, error, LEADER)

    def lost_at_admission(self, kind: Kind, error: ClusterError | None) -> None:
        """The admission door cannot watch this kind; with None it can again."""
        self._tell_lost(kind, error, ADMISSION)

    def _mark(self, kind: str, whose: str, *, is_lost: bool) -> None:
        """One gauge for a kind: it is lost while anybody in this process cannot watch it."""
        by = self._lost.setdefault(kind, set())
        (by.add if is_lost else by.discard)(whose)
        self.telemetry.watches_lost.set(float(bool(by)), kind)

    def _tell_lost(self, kind: Kind, error: ClusterError | None, whose: str) -> None:
        self._mark(kind.name, whose, is_lost=error is not None)
        if error is None:
            log_event(log, Event.CLUSTER_BACK, kind=kind.name)
        else:
            log_event(log, Event.CLUSTER_LOST, kind=kind.name, detail=error.message)

    def judged(self, verdict: Verdict) -> None:
        """A question at the admission door was answered."""
        self.telemetry.reviews.inc("allowed" if verdict.is_allowed else "refused")
        if not verdict.is_allowed:
            log_event(log, Event.ADMISSION_REFUSED, detail="; ".join(told.must for told in verdict.problems))

    def bound(self, labels: Mapping[str, str] | None) -> None:
        """A pod was let go to its node, with these labels or without."""
        self.telemetry.bindings.inc("unknown" if labels is None else "labelled" if labels else "left")

    def not_answered(self, reason: str) -> None:
        """A question was none, or came when the door was full."""
        self.telemetry.reviews.inc("none")
        if self._seldom.allows(f"admission: {reason}"):
            log_event(log, Event.ADMISSION_UNANSWERED, reason=reason)

    def certificate_changed(self) -> None:
        """The door shows another certificate."""
        log_event(log, Event.CERTIFICATE_CHANGED)

    def certificate_refused(self, reason: str) -> None:
        """The certificate cannot be had, or its files changed and cannot be shown."""
        if self._seldom.allows(f"certificate: {reason}"):
            log_event(log, Event.CERTIFICATE_REFUSED, reason=reason)
