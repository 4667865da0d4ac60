"""Metrics pages whose families a test moves at each scrape: of a healthy fleet, and with one fault each."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

from kvrouter.kube.objects import Key
from kvrouter.operator.api.status import Condition, ConditionStatus
from kvrouter.operator.instrumentation import OperatorInstrumentation, ReplicaHealth
from kvrouter.telemetry import CounterFamily, GaugeFamily, HistogramFamily, OperatorTelemetry, Telemetry
from kvrouter.telemetry.families import MetricFamily, MetricsPage

MODEL = "mock"
HEALTHY_SCRAPES = 12
"""A page is healthy at so many scrapes; what it says from then on is the fault's."""

Fault = Callable[[Telemetry], None]
OperatorFault = Callable[[OperatorInstrumentation], None]


def frontend(telemetry: Telemetry) -> None:
    """What a frontend that is well counts between two scrapes."""
    telemetry.build_info.set(1, "1.0")
    telemetry.discovery_up.set(1)
    telemetry.requests.inc("/v1/completions", MODEL, "200", by=99)
    telemetry.requests.inc("/v1/completions", MODEL, "503", by=1)
    telemetry.decisions.inc(MODEL, "kv", "bootstrap", by=100)
    telemetry.handoffs.inc("a", "a", by=100)
    telemetry.ttft.observe(0.1, MODEL, times=10_000)
    telemetry.ttft_error.observe(0.01, MODEL, times=10)
    telemetry.ttft_seen.inc(MODEL, "1", "0", by=1.0)
    telemetry.queue_depth.set(0, MODEL)
    telemetry.queue_refusals.inc(MODEL, "full", by=0)
    telemetry.fallbacks.inc("zone", by=0)
    telemetry.kv_lost.inc(MODEL, "1", "2", "broken", by=0)
    for prediction, answers in (("right", 95), ("too_many", 5), ("other_prompt", 0)):
        telemetry.index_predictions.inc(MODEL, "1", "0", prediction, by=answers)
    telemetry.feed_state.set(1, "1", "0", "live")
    telemetry.kv_events_missing.set(0, "1", "0")
    telemetry.rank_slow.set(0, "1", "0")
    telemetry.link_slow.set(0, MODEL, "within one zone")
    for worker, role in (("1", "prefill"), ("2", "decode")):
        telemetry.worker_up.set(1, worker, MODEL, role, "a")
        telemetry.worker_draining.set(0, worker)
        telemetry.worker_cordoned.set(0, worker)
        telemetry.worker_engine_silent.set(0, worker)
        telemetry.worker_circuit.set(1, worker, "closed")
    telemetry.replicas_behind.set(0)
    telemetry.recording_active.set(1)
    telemetry.recording_dropped.inc("ended", by=0)


def _slow_first_tokens(telemetry: Telemetry) -> None:
    telemetry.ttft.observe(3.0, MODEL, times=100)


def _drained(telemetry: Telemetry) -> None:
    telemetry.worker_draining.set(1, "2")


def _circuit_open(telemetry: Telemetry) -> None:
    telemetry.worker_up.set(1, "3", MODEL, "decode", "a")  # so that one is left of the role
    telemetry.worker_circuit.replace({("1", "closed"): 1, ("2", "open"): 1, ("3", "closed"): 1})


def _silent(telemetry: Telemetry) -> None:
    telemetry.worker_up.set(1, "3", MODEL, "decode", "a")
    telemetry.worker_engine_silent.set(1, "2")


FAULTS: dict[str, Fault] = {
    "KvrouterRequestsFailing": lambda page: page.requests.inc("/v1/completions", MODEL, "503", by=10),
    "KvrouterNoWorkers": _drained,
    "KvrouterTtftHigh": _slow_first_tokens,
    "KvrouterQueueStanding": lambda page: page.queue_depth.set(3, MODEL),
    "KvrouterQueueRefusing": lambda page: page.queue_refusals.inc(MODEL, "full"),
    "KvrouterEngineSilent": _silent,
    "KvrouterCircuitOpen": _circuit_open,
    "KvrouterRankSlow": lambda page: page.rank_slow.set(1, "1", "0"),
    "KvrouterDiscoveryDown": lambda page: page.discovery_up.set(0),
    "KvrouterReplicasBehind": lambda page: page.replicas_behind.set(1),
    "KvrouterRecordingEnded": lambda page: page.recording_dropped.inc("ended"),
    "KvrouterKvCrossesDomain": lambda page: page.fallbacks.inc("zone"),
    "KvrouterKvLost": lambda page: page.kv_lost.inc(MODEL, "1", "2", "broken", by=5),
    "KvrouterLinkSlow": lambda page: page.link_slow.set(1, MODEL, "within one zone"),
    "KvrouterKvEventsMissing": lambda page: page.kv_events_missing.set(1, "1", "0"),
    "KvrouterFeedNotLive": lambda page: page.feed_state.replace({("1", "0", "partial"): 1}),
    "KvrouterIndexWrong": lambda page: page.index_predictions.inc(MODEL, "1", "0", "too_many", by=50),
    "KvrouterPredictionsOff": lambda page: page.ttft_error.observe(5.0, MODEL),
}
"""What each alert of a frontend is about, on top of what a frontend that is well counts."""


def operator(replica: OperatorInstrumentation, namespace: str) -> None:
    """What the operator says while all is well."""
    replica.telemetry.leading.set(1)
    replica.telemetry.definition_foreign.set(0)
    _conditions(replica, namespace, ConditionStatus.TRUE, ConditionStatus.TRUE)


def _conditions(
    replica: OperatorInstrumentation, namespace: str, ready: ConditionStatus, available: ConditionStatus
) -> None:
    statuses = {"Ready": ready, "Available": available}
    conditions = [
        Condition(
            type=kind, status=status, reason="X", message="x", last_transition_time="2026-01-01T00:00:00Z"
        )
        for kind, status in statuses.items()
    ]
    replica.conditions_are(Key(namespace, "llm"), conditions)


OPERATOR_FAULTS: dict[str, OperatorFault] = {
    "KvrouterOperatorWithoutLeader": lambda replica: replica.telemetry.leading.set(0),
    "KvrouterDefinitionForeign": lambda replica: replica.telemetry.definition_foreign.set(1),
    "KvrouterDeploymentUnavailable": lambda replica: _conditions(
        replica, "KvrouterDeploymentUnavailable", ConditionStatus.TRUE, ConditionStatus.FALSE
    ),
    "KvrouterDeploymentNotReady": lambda replica: _conditions(
        replica, "KvrouterDeploymentNotReady", ConditionStatus.UNKNOWN, ConditionStatus.TRUE
    ),
}

FRONTEND_DOWN = "KvrouterFrontendDown"
HEALTHY = "healthy"
EVERYTHING = "everything"

LABEL_VALUES: dict[str, tuple[str, ...]] = {
    "namespace": (EVERYTHING,),
    "status": ("200", "503", "true", "false"),
    "state": ("live", "open"),
    "which": ("active", "total"),
    "prediction": ("right", "too_many"),
    "condition": ("Available",),
}
"""Values that dashboards distinguish; other labels have one of no meaning."""


def everything(page: MetricsPage) -> None:
    """Move every metric."""
    for family in vars(page).values():
        if not isinstance(family, MetricFamily):
            continue
        for labels in product(*(LABEL_VALUES.get(label, ("1",)) for label in family.label_names)):
            match family:
                case CounterFamily():
                    family.inc(*labels)
                case GaugeFamily():
                    family.set(1, *labels)
                case HistogramFamily():
                    family.observe(1.0, *labels)


class Page:
    """One page; each scrape moves it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scrapes = 0
        self._telemetry = Telemetry()
        self._replica = OperatorInstrumentation(ReplicaHealth())
        self._of_operator = OperatorTelemetry()

    def scraped(self) -> bytes | None:
        """The page; None where it is down."""
        self._scrapes += 1
        if self._name == EVERYTHING:
            pages: tuple[MetricsPage, ...] = (self._telemetry, self._of_operator)
            for page in pages:
                everything(page)
            return self._telemetry.render() + _of_operator_alone(self._of_operator)
        is_faulty = self._scrapes > HEALTHY_SCRAPES
        if is_faulty and self._name == FRONTEND_DOWN:
            return None
        if self._name in OPERATOR_FAULTS:
            operator(self._replica, self._name)
            if is_faulty:
                OPERATOR_FAULTS[self._name](self._replica)
            return self._replica.telemetry.render()
        if not (is_faulty and self._name == "KvrouterTtftHigh"):
            frontend(self._telemetry)
        if is_faulty and self._name in FAULTS:
            FAULTS[self._name](self._telemetry)
        if self._name == HEALTHY:
            operator(self._replica, self._name)
            return self._telemetry.render() + _of_operator_alone(self._replica.telemetry)
        return self._telemetry.render()


def _of_operator_alone(telemetry: OperatorTelemetry) -> bytes:
    """The operator's page without what every process has."""
    lines = telemetry.render().splitlines(keepends=True)
    return b"".join(line for line in lines if line.startswith(b"kvrouter_operator_"))


@contextmanager
def served_pages(names: list[str]) -> Iterator[str]:
    """Serve a page for each name, as ``/NAME``; answers with the address."""
    pages = {f"/{name}": Page(name) for name in names}

    class Scraped(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages[self.path].scraped()
            self.send_response(200 if page is not None else 503)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(page or b"")

        def log_message(self, *_arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Scraped)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
