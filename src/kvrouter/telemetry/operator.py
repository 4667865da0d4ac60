"""Every metric of the operator, in one table: the attributes of :class:`OperatorTelemetry`."""

from typing import ClassVar

from kvrouter.telemetry.table import MetricsPage, MetricSpec, counter, gauge, histogram, specs_of

_LOOK_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class OperatorTelemetry(MetricsPage):
    """The metrics of one replica of the operator. Labels are given by position, in the order of the table."""

    leading = gauge("kvrouter_operator_leading", "1 on the replica that holds the lease, 0 on the others.")
    definition_foreign = gauge(
        "kvrouter_operator_definition_foreign",
        "1 while the cluster's definition of DynamoGraphDeployment is not kvrouter's: nothing is done then.",
    )
    waiting = gauge("kvrouter_operator_waiting", "Deployments that wait to be looked at.")
    stood_back = gauge(
        "kvrouter_operator_stood_back", "Deployments that are left to another operator, which came first."
    )
    looks = counter(
        "kvrouter_operator_looks", "Looks at a deployment, by how they ended: done or failed.", "result"
    )
    look_s = histogram("kvrouter_operator_look_seconds", "How long a look takes.", bounds=_LOOK_S)
    objects = counter(
        "kvrouter_operator_objects",
        "Objects of deployments that were written, by kind and change: created, adopted, changed or removed.",
        "kind",
        "change",
    )
    labelled_late = counter(
        "kvrouter_operator_pods_labelled_late",
        "Pods that got their node's labels, or other ones, after they were bound.",
    )
    watches_lost = gauge(
        "kvrouter_operator_watches_lost", "1 while a kind cannot be watched, or read.", "kind"
    )
    reviews = counter(
        "kvrouter_operator_reviews",
        "Questions of the API server about a deployment, by what was answered: allowed, refused or none.",
        "answer",
    )

    bindings = counter(
        "kvrouter_operator_bindings",
        "Bindings of pods that the API server asked about, by what was answered: labelled, left (no pod of a "
        "worker, or one that gets its labels without us), or unknown (labels then come late).",
        "answer",
    )

    SPECS: ClassVar[tuple[MetricSpec, ...]]


OperatorTelemetry.SPECS = specs_of(OperatorTelemetry)
