"""The alerts of ``deploy/monitoring``: what each asks of Prometheus, and what its message says.

``namespace`` and ``job`` are labels that Prometheus gives what it scrapes: together they name the frontends
of one fleet. Outside Kubernetes there is no ``namespace``, and ``job`` alone does.
"""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Whether somebody has to be woken."""

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert; the section of ``docs/monitoring.md`` that is called ``name`` is its runbook."""

    name: str
    expr: str
    for_: str
    severity: Severity
    summary: str
    description: str


CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING

REQUESTS: tuple[Alert, ...] = (
    Alert(
        name="KvrouterRequestsFailing",
        expr="""
  sum by (namespace, job, model) (rate(kvrouter_requests_total{status=~"5.."}[5m]))
>
  0.05 * sum by (namespace, job, model) (rate(kvrouter_requests_total[5m]))
""",
        for_="5m",
        severity=CRITICAL,
        summary="More than 5 % of the requests for {{ $labels.model }} fail.",
        description="{{ $value | humanize }} requests a second end with a status of 500 or more.",
    ),
    Alert(
        name="KvrouterNoWorkers",
        expr="""
  (
      group by (namespace, job, role) (last_over_time(kvrouter_worker_up[1h]))
    and on (namespace, job)
      kvrouter_build_info
    unless
      group by (namespace, job, role) (
          kvrouter_worker_up
        unless on (namespace, job, instance, worker)
          (
              kvrouter_worker_draining == 1
            or
              kvrouter_worker_cordoned == 1
            or
              kvrouter_worker_engine_silent == 1
            or
              kvrouter_worker_circuit{state="open"} == 1
          )
      )
  )
or
  (group by (namespace, job) (kvrouter_build_info) unless group by (namespace, job) (kvrouter_worker_up))
""",
        for_="2m",
        severity=CRITICAL,
        summary="No worker takes requests{{ with $labels.role }} of the role {{ . }}{{ end }}.",
        description="All workers have left, drain, are cordoned, have a silent engine or are passed over.",
    ),
    Alert(
        name="KvrouterFrontendDown",
        expr="up == 0 and on (namespace, job, instance) last_over_time(kvrouter_build_info[1h])",
        for_="2m",
        severity=CRITICAL,
        summary="The frontend {{ $labels.instance }} does not answer Prometheus.",
        description="It answered within the last hour, and its target is still there.",
    ),
    Alert(
        name="KvrouterTtftHigh",
        expr="""
  (
      histogram_quantile(
        0.99,
        sum by (namespace, job, model, le) (rate(kvrouter_time_to_first_token_seconds_bucket[10m]))
      )
    >
      2 * histogram_quantile(
        0.99,
        sum by (namespace, job, model, le) (rate(kvrouter_time_to_first_token_seconds_bucket[1d] offset 1h))
      )
  )
and
  sum by (namespace, job, model) (rate(kvrouter_time_to_first_token_seconds_count[10m])) > 0.1
""",
        for_="10m",
        severity=WARNING,
        summary="First tokens of {{ $labels.model }} take twice as long as yesterday.",
        description="The 99th percentile of the last ten minutes is {{ $value | humanizeDuration }}.",
    ),
    Alert(
        name="KvrouterQueueStanding",
        expr="sum by (namespace, job, model) (min_over_time(kvrouter_queue_depth[5m])) > 0",
        for_="10m",
        severity=WARNING,
        summary="The queue of {{ $labels.model }} never empties.",
        description="At least {{ $value }} requests wait all the time for a worker that is not busy.",
    ),
    Alert(
        name="KvrouterQueueRefusing",
        expr="sum by (namespace, job, model, cause) (rate(kvrouter_queue_refusals_total[5m])) > 0",
        for_="2m",
        severity=CRITICAL,
        summary="The queue of {{ $labels.model }} refuses requests ({{ $labels.cause }}).",
        description="{{ $value | humanize }} requests a second are refused.",
    ),
)

WORKERS: tuple[Alert, ...] = (
    Alert(
        name="KvrouterEngineSilent",
        expr="max by (namespace, job, worker) (kvrouter_worker_engine_silent) == 1",
        for_="2m",
        severity=WARNING,
        summary="The engine of worker {{ $labels.worker }} does not answer.",
        description="The worker takes no new requests until its engine answers.",
    ),
    Alert(
        name="KvrouterCircuitOpen",
        expr='max by (namespace, job, worker) (kvrouter_worker_circuit{state=~"open|half_open"}) == 1',
        for_="5m",
        severity=WARNING,
        summary="Worker {{ $labels.worker }} is passed over.",
        description="Requests that it was given failed again and again.",
    ),
    Alert(
        name="KvrouterRankSlow",
        expr="max by (namespace, job, worker, dp_rank) (kvrouter_rank_slow) == 1",
        for_="15m",
        severity=WARNING,
        summary="Rank {{ $labels.dp_rank }} of worker {{ $labels.worker }} is slow.",
        description="It takes at least 1.5 times as long for a prompt as half of the ranks do.",
    ),
    Alert(
        name="KvrouterDiscoveryDown",
        expr="min by (namespace, job, instance) (kvrouter_discovery_up) == 0",
        for_="2m",
        severity=CRITICAL,
        summary="The frontend {{ $labels.instance }} cannot reach discovery.",
        description="Its fleet is frozen: new workers get no requests, and it may still try those that left.",
    ),
    Alert(
        name="KvrouterReplicasBehind",
        expr="max by (namespace, job, instance) (kvrouter_replicas_behind) > 0",
        for_="5m",
        severity=WARNING,
        summary="The frontend {{ $labels.instance }} misses requests of other frontends.",
        description="It counts too little load for the workers that {{ $value }} other frontends use.",
    ),
    Alert(
        name="KvrouterRecordingEnded",
        expr='max by (namespace, job, instance) (kvrouter_recording_dropped_total{reason="ended"}) > 0',
        for_="5m",
        severity=WARNING,
        summary="The frontend {{ $labels.instance }} no longer records traffic.",
        description="Its recording has ended, and {{ $value }} records were not written since.",
    ),
)

KV: tuple[Alert, ...] = (
    Alert(
        name="KvrouterKvCrossesDomain",
        expr="sum by (namespace, job, domain) (rate(kvrouter_fallbacks_total[10m])) > 0",
        for_="10m",
        severity=WARNING,
        summary="KV leaves its {{ $labels.domain }}.",
        description="{{ $value | humanize }} handoffs a second cross it: it has too few decode workers.",
    ),
    Alert(
        name="KvrouterKvLost",
        expr="""
  (
      sum by (namespace, job, model) (rate(kvrouter_kv_lost_total[10m]))
    >
      0.01
    * sum by (namespace, job, model) (rate(kvrouter_decisions_total{shape=~"bootstrap|synchronous"}[10m]))
  )
or
  max by (namespace, job, model) (kvrouter_pairs_parted) > 0
""",
        for_="5m",
        severity=WARNING,
        summary="Handoffs of {{ $labels.model }} lose their KV.",
        description="More than 1 % of them do, or pairs of workers are no longer paired because they did.",
    ),
    Alert(
        name="KvrouterLinkSlow",
        expr="max by (namespace, job, model, link) (kvrouter_link_slow) == 1",
        for_="10m",
        severity=WARNING,
        summary="KV travels slowly over the link {{ $labels.link }}.",
        description="A transfer over it takes at least twice as long as it should.",
    ),
    Alert(
        name="KvrouterKvEventsMissing",
        expr="max by (namespace, job, worker, dp_rank) (kvrouter_kv_events_missing) == 1",
        for_="5m",
        severity=WARNING,
        summary="Rank {{ $labels.dp_rank }} of worker {{ $labels.worker }} publishes no KV events.",
        description="The router cannot know what the rank has cached, and places requests without it.",
    ),
    Alert(
        name="KvrouterFeedNotLive",
        expr="""
max by (namespace, job, worker, dp_rank, state) (kvrouter_feed_state{state=~"recovering|partial|over_limit"})
== 1
""",
        for_="10m",
        severity=WARNING,
        summary="Events of rank {{ $labels.dp_rank }} of worker {{ $labels.worker }}: {{ $labels.state }}.",
        description="The index does not hold all blocks of the rank, or some that are gone.",
    ),
    Alert(
        name="KvrouterIndexWrong",
        expr="""
  sum by (namespace, job, model, prediction) (
    rate(kvrouter_index_predictions_total{prediction!="right"}[30m])
  )
> on (namespace, job, model) group_left
  0.2 * sum by (namespace, job, model) (rate(kvrouter_index_predictions_total[30m]))
""",
        for_="15m",
        severity=WARNING,
        summary="The index of {{ $labels.model }} is often wrong ({{ $labels.prediction }}).",
        description="More than 20 % of the answers contradict what it had promised of cached blocks.",
    ),
    Alert(
        name="KvrouterPredictionsOff",
        expr="""
  sum by (namespace, job, model) (rate(kvrouter_ttft_prediction_error_seconds_sum[30m]))
>
  sum by (namespace, job, model) (rate(kvrouter_ttft_seen_seconds_total[30m]))
""",
        for_="30m",
        severity=WARNING,
        summary="Predicted times to the first token of {{ $labels.model }} are far off.",
        description="Their mean error is larger than the mean time itself.",
    ),
)

OPERATOR: tuple[Alert, ...] = (
    Alert(
        name="KvrouterOperatorWithoutLeader",
        expr="""
  group by (namespace, job) (last_over_time(kvrouter_operator_leading[1h]))
unless
  group by (namespace, job) (kvrouter_operator_leading == 1)
""",
        for_="5m",
        severity=CRITICAL,
        summary="No replica of the operator leads.",
        description="Changes of deployments, and of the nodes of their pods, have no effect.",
    ),
    Alert(
        name="KvrouterDefinitionForeign",
        expr="max by (namespace, job) (kvrouter_operator_definition_foreign) == 1",
        for_="5m",
        severity=CRITICAL,
        summary="The definition of DynamoGraphDeployment is not kvrouter's.",
        description="The operator does nothing until it is.",
    ),
    Alert(
        name="KvrouterDeploymentUnavailable",
        expr="""
max by (namespace, deployment) (
  kvrouter_operator_deployment_condition{condition="Available",status="false"}
) == 1
""",
        for_="5m",
        severity=CRITICAL,
        summary="The deployment {{ $labels.namespace }}/{{ $labels.deployment }} is not Available.",
        description="Requests cannot be served by it, or in one of its domains.",
    ),
    Alert(
        name="KvrouterDeploymentNotReady",
        expr="""
max by (namespace, deployment, condition) (
  kvrouter_operator_deployment_condition{condition!="Available",status!="true"}
) == 1
""",
        for_="15m",
        severity=WARNING,
        summary="{{ $labels.condition }} of {{ $labels.namespace }}/{{ $labels.deployment }} is not true.",
        description="The condition's reason and message are in the status of the deployment.",
    ),
)

GROUPS: dict[str, tuple[Alert, ...]] = {
    "kvrouter-requests": REQUESTS,
    "kvrouter-workers": WORKERS,
    "kvrouter-kv": KV,
    "kvrouter-operator": OPERATOR,
}
