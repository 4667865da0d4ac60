"""The dashboards of ``deploy/monitoring``."""

from scripts.monitoring.kv_dashboards import INDEX, TRANSFER
from scripts.monitoring.panels import Dashboard, Panel, PanelKind, Query, line, quantiles

NUMBER, HEATMAP, TABLE = PanelKind.NUMBER, PanelKind.HEATMAP, PanelKind.TABLE

FLEET = Dashboard(
    uid="kvrouter-fleet",
    title="kvrouter: fleet",
    panels=(
        Panel(
            title="Requests",
            description="Requests that ended, a second.",
            unit="reqps",
            kind=NUMBER,
            width=6,
            queries=line("sum(rate(kvrouter_requests_total{@model}[@rate]))", "requests"),
        ),
        Panel(
            title="Failed",
            description="Share of the requests that ended with a status of 500 or more.",
            unit="percentunit",
            kind=NUMBER,
            width=6,
            queries=line(
                'sum(rate(kvrouter_requests_total{@model,status=~"5.."}[@rate]))'
                " / sum(rate(kvrouter_requests_total{@model}[@rate]))",
                "failed",
            ),
        ),
        Panel(
            title="Workers",
            description="Workers that were discovered and have not left, by role, where most are known.",
            unit="short",
            kind=NUMBER,
            width=6,
            queries=line("max by (role) (sum by (instance, role) (kvrouter_worker_up{@model}))", "{{role}}"),
        ),
        Panel(
            title="Workers that take no requests",
            description="Workers that drain, are cordoned, have a silent engine, or are passed over.",
            unit="short",
            kind=NUMBER,
            width=6,
            queries=(
                Query(
                    expr="max(sum by (instance) (kvrouter_worker_draining{@fleet})) or vector(0)",
                    legend="draining",
                ),
                Query(
                    expr="max(sum by (instance) (kvrouter_worker_cordoned{@fleet})) or vector(0)",
                    legend="cordoned",
                ),
                Query(
                    expr="max(sum by (instance) (kvrouter_worker_engine_silent{@fleet})) or vector(0)",
                    legend="silent",
                ),
                Query(
                    expr='max(sum by (instance) (kvrouter_worker_circuit{@fleet,state="open"})) or vector(0)',
                    legend="passed over",
                ),
            ),
        ),
        Panel(
            title="Requests by status",
            description="Requests that ended, a second, by their HTTP status.",
            unit="reqps",
            queries=line("sum by (status) (rate(kvrouter_requests_total{@model}[@rate]))", "{{status}}"),
        ),
        Panel(
            title="Errors",
            description="Requests that were answered with an error, a second, by its code.",
            unit="reqps",
            queries=line("sum by (code) (rate(kvrouter_errors_total{@model}[@rate]))", "{{code}}"),
        ),
        Panel(
            title="Time to first token",
            description="From the last byte of a request to the first byte of its first token.",
            unit="s",
            queries=quantiles("kvrouter_time_to_first_token_seconds"),
        ),
        Panel(
            title="Inter-token latency",
            description="Between two tokens of one answer.",
            unit="s",
            queries=quantiles("kvrouter_inter_token_latency_seconds"),
        ),
        Panel(
            title="Tokens",
            description="Prompt tokens, those of them that engines had cached, and answered ones, a second.",
            unit="short",
            queries=(
                Query(expr="sum(rate(kvrouter_prompt_tokens_total{@model}[@rate]))", legend="prompt"),
                Query(expr="sum(rate(kvrouter_cached_tokens_total{@model}[@rate]))", legend="cached"),
                Query(expr="sum(rate(kvrouter_completion_tokens_total{@model}[@rate]))", legend="answered"),
            ),
        ),
        Panel(
            title="Queue",
            description="Requests that wait for a worker, and those that are refused a second.",
            unit="short",
            queries=(
                Query(expr="sum by (model) (kvrouter_queue_depth{@model})", legend="waiting {{model}}"),
                Query(
                    expr="sum by (cause) (rate(kvrouter_queue_refusals_total{@model}[@rate]))",
                    legend="refused: {{cause}}",
                ),
            ),
        ),
        Panel(
            title="Requests in engines",
            description="Requests that engines run and that wait in them, by their latest load reports.",
            unit="short",
            queries=(
                Query(
                    expr="sum(max by (worker, dp_rank) (kvrouter_worker_running_requests{@fleet}))",
                    legend="running",
                ),
                Query(
                    expr="sum(max by (worker, dp_rank) (kvrouter_worker_waiting_requests{@fleet}))",
                    legend="waiting",
                ),
            ),
        ),
        Panel(
            title="KV memory in use",
            description="Share of a worker's KV blocks that running requests hold, by its load report.",
            unit="percentunit",
            queries=line(
                'max by (worker) (kvrouter_worker_blocks{@fleet,which="active"})'
                ' / max by (worker) (kvrouter_worker_blocks{@fleet,which="total"})',
                "{{worker}}",
            ),
        ),
        Panel(
            title="Failures of workers",
            description="Legs that workers failed, a second: they broke off (lost) or were silent.",
            unit="reqps",
            queries=line(
                "sum by (worker, reason) (rate(kvrouter_worker_failures_total{@model}[@rate]))",
                "{{worker}} {{reason}}",
            ),
        ),
        Panel(
            title="Retries and resumes",
            description="Requests that went on elsewhere, before their first token or after it.",
            unit="reqps",
            queries=(
                Query(
                    expr="sum by (cause) (rate(kvrouter_retries_total{@model}[@rate]))",
                    legend="retry: {{cause}}",
                ),
                Query(expr="sum(rate(kvrouter_resumes_total{@model}[@rate]))", legend="resume"),
            ),
        ),
    ),
)

ROUTING = Dashboard(
    uid="kvrouter-routing",
    title="kvrouter: routing quality",
    panels=(
        Panel(
            title="Cache hits",
            description="Share of the prompt tokens that engines had cached, and that the router expected. "
            "The closer the lines are, the better the router knows the caches.",
            unit="percentunit",
            queries=(
                Query(
                    expr="sum(rate(kvrouter_cached_tokens_total{@model}[@rate]))"
                    " / sum(rate(kvrouter_prompt_tokens_total{@model}[@rate]))",
                    legend="cached",
                ),
                Query(
                    expr="sum(rate(kvrouter_overlap_tokens_total{@model}[@rate]))"
                    " / sum(rate(kvrouter_prompt_tokens_total{@model}[@rate]))",
                    legend="expected",
                ),
            ),
        ),
        Panel(
            title="Time to first token by cache hit",
            description="The median, by how much of the prompt the engine had cached.",
            unit="s",
            queries=line(
                "histogram_quantile(0.5, sum by (le, cache_hit)"
                " (rate(kvrouter_time_to_first_token_by_cache_hit_seconds_bucket{@model}[@rate])))",
                "{{cache_hit}}",
            ),
        ),
        Panel(
            title="Error of predicted times",
            description="Under the cost of time: how far times to the first token were from the prediction.",
            unit="s",
            queries=quantiles("kvrouter_ttft_prediction_error_seconds"),
        ),
        Panel(
            title="Predicted over seen, by rank",
            description="1 is right; above 1 the rank was faster than predicted, below 1 slower.",
            unit="short",
            queries=line(
                "sum by (worker, dp_rank) (rate(kvrouter_ttft_predicted_seconds_total{@model}[@rate]))"
                " / sum by (worker, dp_rank) (rate(kvrouter_ttft_seen_seconds_total{@model}[@rate]))",
                "{{worker}}/{{dp_rank}}",
            ),
        ),
        Panel(
            title="Legs by worker",
            description="Legs of requests that workers were given, a second: whether the load is even.",
            unit="reqps",
            queries=line(
                "sum by (worker, leg) (rate(kvrouter_worker_requests_total{@model}[@rate]))",
                "{{worker}} {{leg}}",
            ),
        ),
        Panel(
            title="Slowness of ranks",
            description="How many times as long as half of the ranks do a rank takes for a prompt.",
            unit="short",
            queries=line(
                "max by (worker, dp_rank) (kvrouter_rank_slowness{@fleet})", "{{worker}}/{{dp_rank}}"
            ),
        ),
        Panel(
            title="Decisions",
            description="Decisions, a second, by their shape.",
            unit="ops",
            queries=line("sum by (shape) (rate(kvrouter_decisions_total{@model}[@rate]))", "{{shape}}"),
        ),
        Panel(
            title="Refused ranks",
            description="Worker ranks that decisions refused, a second, by the reason and the role.",
            unit="ops",
            queries=line(
                "sum by (reason, role) (rate(kvrouter_refusals_total{@fleet}[@rate]))", "{{role}}: {{reason}}"
            ),
        ),
        Panel(
            title="Time of a decision",
            description="To read the view, decide and book.",
            unit="s",
            queries=quantiles("kvrouter_decision_duration_seconds", "@fleet"),
        ),
        Panel(
            title="Time to tokenize",
            description="To render and tokenize a prompt, waiting for a thread included.",
            unit="s",
            queries=quantiles("kvrouter_tokenization_duration_seconds"),
        ),
        Panel(
            title="Time in the queue",
            description="For requests that entered it.",
            unit="s",
            queries=quantiles("kvrouter_queue_wait_seconds"),
        ),
        Panel(
            title="Prompt lengths",
            description="How many prompts have how many tokens.",
            unit="short",
            kind=HEATMAP,
            queries=line(
                "sum by (le) (increase(kvrouter_request_prompt_tokens_bucket{@model}[@rate]))", "{{le}}"
            ),
        ),
    ),
)

KUBERNETES = Dashboard(
    uid="kvrouter-kubernetes",
    title="kvrouter: Kubernetes",
    variables=(
        ("namespace", "kvrouter_operator_deployment_condition"),
        ("job", "kvrouter_operator_leading"),
    ),
    panels=(
        Panel(
            title="Leader",
            description="How many replicas of the operator lead; 1 is right.",
            unit="short",
            kind=NUMBER,
            width=6,
            queries=line("sum(kvrouter_operator_leading{@job})", "leaders"),
        ),
        Panel(
            title="Definition",
            description="1 while the definition of DynamoGraphDeployment is not kvrouter's.",
            unit="short",
            kind=NUMBER,
            width=6,
            queries=line("max(kvrouter_operator_definition_foreign{@job})", "foreign"),
        ),
        Panel(
            title="Available",
            description="Deployments whose condition Available is true.",
            unit="short",
            kind=NUMBER,
            width=6,
            queries=line(
                "count(kvrouter_operator_deployment_condition"
                '{@fleet,condition="Available",status="true"}) or vector(0)',
                "available",
            ),
        ),
        Panel(
            title="Not available",
            description="Deployments whose condition Available is false or unknown.",
            unit="short",
            kind=NUMBER,
            width=6,
            queries=line(
                "count(kvrouter_operator_deployment_condition"
                '{@fleet,condition="Available",status!="true"}) or vector(0)',
                "not available",
            ),
        ),
        Panel(
            title="Conditions that do not hold",
            description="Conditions of deployments whose status is false or unknown.",
            unit="short",
            kind=TABLE,
            width=24,
            queries=line(
                "max by (namespace, deployment, condition, status)"
                ' (kvrouter_operator_deployment_condition{@fleet,status!="true"})',
                "",
            ),
        ),
        Panel(
            title="Reconciliations",
            description="Reconciliations of deployments, a second, by result.",
            unit="ops",
            queries=line("sum by (result) (rate(kvrouter_operator_looks_total{@job}[@rate]))", "{{result}}"),
        ),
        Panel(
            title="Time of a reconciliation",
            description="How long one reconciliation takes.",
            unit="s",
            queries=quantiles("kvrouter_operator_look_seconds", "@job"),
        ),
        Panel(
            title="Deployments that wait",
            description="Deployments that wait to be reconciled, and those that another operator manages.",
            unit="short",
            queries=(
                Query(expr="sum(kvrouter_operator_waiting{@job})", legend="waiting"),
                Query(expr="sum(kvrouter_operator_stood_back{@job})", legend="another operator's"),
            ),
        ),
        Panel(
            title="Written objects",
            description="Objects of deployments that were written, a second, by kind and change.",
            unit="ops",
            queries=line(
                "sum by (kind, change) (rate(kvrouter_operator_objects_total{@job}[@rate]))",
                "{{kind}} {{change}}",
            ),
        ),
        Panel(
            title="Admission",
            description="Questions of the API server about deployments, a second, by the answer.",
            unit="ops",
            queries=line(
                "sum by (answer) (rate(kvrouter_operator_reviews_total{@job}[@rate]))", "{{answer}}"
            ),
        ),
        Panel(
            title="Labels of pods",
            description="Bindings of pods that were answered, and pods that got their labels late, a second.",
            unit="ops",
            queries=(
                Query(
                    expr="sum by (answer) (rate(kvrouter_operator_bindings_total{@job}[@rate]))",
                    legend="binding: {{answer}}",
                ),
                Query(
                    expr="sum(rate(kvrouter_operator_pods_labelled_late_total{@job}[@rate]))", legend="late"
                ),
            ),
        ),
        Panel(
            title="Lost watches",
            description="Kinds that a replica of the operator cannot watch, or read.",
            unit="short",
            queries=line("max by (kind) (kvrouter_operator_watches_lost{@job}) == 1", "{{kind}}"),
        ),
    ),
)

DASHBOARDS = (FLEET, ROUTING, TRANSFER, INDEX, KUBERNETES)
