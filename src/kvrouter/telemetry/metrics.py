"""Every metric of the router and of the operator, in two tables."""

from typing import ClassVar

from kvrouter.telemetry.families import MetricsPage, MetricSpec, counter, gauge, histogram, specs_of
from kvrouter.telemetry.gen_ai import GenAiMetrics

_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_DECISION_S = (5e-6, 1e-5, 2e-5, 3.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2e-2)
_TOKENIZATION_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5)
_REQUEST_TOKENS = tuple(float(4**power) for power in range(12))
_WAIT_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)


class Telemetry(MetricsPage):
    """The metrics of one service.

    Labels are given by position, in the order of the table. ``model`` is the name of a served model, or
    ``unknown``: never a client's text. ``worker`` is a worker id, ``domain`` a value of the transfer domain,
    or ``unknown`` or ``none``.
    """

    requests = counter(
        "kvrouter_requests",
        "Requests that ended, by the HTTP status that they ended with.",
        "route",
        "model",
        "status",
    )
    requests_active = gauge(
        "kvrouter_requests_active", "Requests that are being served: waiting, or streaming.", "model"
    )
    errors = counter(
        "kvrouter_errors",
        "Requests that were answered with an error, whatever refused them, by the error's code. `model` is "
        "`unknown` where the request names none that is served, or was refused before its model was read.",
        "model",
        "code",
    )
    admin_errors = counter(
        "kvrouter_admin_errors",
        "Calls of operators' routes (decisions, explain, cordons, thresholds, fleet) that were answered with "
        "an error, by route and code. They are no requests: kvrouter_errors_total does not count them.",
        "route",
        "code",
    )
    cancellations = counter(
        "kvrouter_cancellations",
        "Requests whose client left, by how far they were: queued, prefill or decode.",
        "model",
        "stage",
    )
    retries = counter(
        "kvrouter_retries",
        "Requests sent elsewhere before their first token, by what failed.",
        "model",
        "cause",
    )
    retry_body_bytes = gauge(
        "kvrouter_retry_body_bytes",
        "What the bodies hold that are kept to be sent again, by --retry-bodies-max-bytes.",
    )
    retry_bodies_dropped = counter(
        "kvrouter_retry_bodies_dropped",
        "Bodies that were dropped because the kept ones held more than --retry-bodies-max-bytes: their "
        "requests are not sent again, or end with retry_bodies_full.",
        "model",
    )
    recording_active = gauge(
        "kvrouter_recording_active",
        "1 while traffic is recorded, by --record; 0 without that, and once a full disk has ended it.",
    )
    recording_records = counter("kvrouter_recording_records", "Records of traffic that were written.")
    recording_dropped = counter(
        "kvrouter_recording_dropped",
        "Records of traffic that were not written, by why: queue_full (too many waited), ended (the "
        "recording has), error (one could not be made) or too_long (longer than all files may be).",
        "reason",
    )
    resumes = counter(
        "kvrouter_resumes", "Requests that went on elsewhere in the middle of their answer.", "model"
    )

    prompt_tokens = counter("kvrouter_prompt_tokens", "Prompt tokens of requests that were served.", "model")
    completion_tokens = counter("kvrouter_completion_tokens", "Tokens that were answered.", "model")
    cached_tokens = counter(
        "kvrouter_cached_tokens", "Prompt tokens that engines found in their own cache.", "model"
    )
    cache_reports = counter(
        "kvrouter_cache_reports",
        "Answers with a first token, by route (chat, completions, responses, messages; tokens where engines "
        "get tokens) and whether the engine said how many prompt tokens it had cached: reported is yes or "
        "no.",
        "model",
        "route",
        "reported",
    )
    cache_reported_prompt_tokens = counter(
        "kvrouter_cache_reported_prompt_tokens",
        "Prompt tokens of the answers whose engine said how many it had cached: the whole of which "
        "kvrouter_cached_tokens_total and kvrouter_overlap_tokens_total are parts.",
        "model",
    )
    overlap_tokens = counter(
        "kvrouter_overlap_tokens",
        "Prompt tokens that the router expected in the chosen worker's cache; with the cached tokens, they "
        "show how far its view can be relied on.",
        "model",
    )

    index_wrong = counter(
        "kvrouter_index_wrong",
        "Times that a worker rank's own counts of cached tokens contradicted the index.",
        "model",
        "worker",
        "dp_rank",
    )
    index_predictions = counter(
        "kvrouter_index_predictions",
        "Answers whose own count of cached tokens was compared with the index, by what it had promised: the "
        "right number of blocks, too_many or too_few; other_prompt where the engine made another number of "
        "tokens of the call than the router, whose template or tokenizer is then another one.",
        "model",
        "worker",
        "dp_rank",
        "prediction",
    )

    prompt_shape_answers = counter(
        "kvrouter_prompt_shape_answers",
        "Answers of which the engine had something cached, by the shape of the call (route, roles, tools, "
        "kwargs of the template, reasoning, documents, continued) and whether the router had found it there; "
        "missed where the engine makes another prompt of such calls. At most 64 shapes a model have "
        "labels of their own.",
        "model",
        "shape",
        "prediction",
    )

    kv_transfers = counter(
        "kvrouter_kv_transfers",
        "Transfers by which a worker rank fetched KV from others, by its engine's own count.",
        "model",
        "worker",
        "dp_rank",
    )
    kv_transfer_bytes = counter(
        "kvrouter_kv_transfer_bytes",
        "Bytes of KV that a worker rank fetched from others, by its engine's own count.",
        "model",
        "worker",
        "dp_rank",
    )
    kv_transfer_seconds = counter(
        "kvrouter_kv_transfer_seconds",
        "Time that these transfers took, each by itself: bytes by seconds is how fast KV travels.",
        "model",
        "worker",
        "dp_rank",
    )
    kv_transfers_failed = counter(
        "kvrouter_kv_transfers_failed",
        "Transfers of KV to a worker rank that failed, by its engine's own count.",
        "model",
        "worker",
        "dp_rank",
    )
    kv_transfer_slow = gauge(
        "kvrouter_kv_transfer_slow",
        "1 for a rank to which KV travels at less than a quarter of the speed that it has shown.",
        "worker",
        "dp_rank",
    )

    ttft_predicted = counter(
        "kvrouter_ttft_predicted_seconds",
        "Under the cost of time: predicted times to the first token, of requests whose first token came. "
        "With kvrouter_ttft_seen_seconds_total it shows the mean error of a rank's predictions.",
        "model",
        "worker",
        "dp_rank",
    )
    ttft_seen = counter(
        "kvrouter_ttft_seen_seconds",
        "What the same requests took to their first token, or to the end of their prefill leg.",
        "model",
        "worker",
        "dp_rank",
    )
    ttft_error = histogram(
        "kvrouter_ttft_prediction_error_seconds",
        "Under the cost of time: by how much a time to the first token was more or less than was predicted.",
        "model",
        bounds=_TTFT_S,
    )
    rank_slowness = gauge(
        "kvrouter_rank_slowness",
        "Under the cost of time: how many times as long as half of the ranks do a rank takes for a prompt.",
        "worker",
        "dp_rank",
    )
    rank_slow = gauge(
        "kvrouter_rank_slow",
        "1 for a rank that takes at least 1.5 times as long as half of the ranks do.",
        "worker",
        "dp_rank",
    )

    link_bandwidth = gauge(
        "kvrouter_link_bandwidth_bytes_per_second",
        "Under the cost of time: bytes a second over a kind of link, and over each link that differs from "
        "its kind, as learned from handoffs.",
        "model",
        "link",
    )
    link_latency = gauge(
        "kvrouter_link_latency_seconds",
        "Under the cost of time: what a transfer over it takes apart from its bytes, learned from handoffs.",
        "model",
        "link",
    )
    link_slow = gauge(
        "kvrouter_link_slow",
        "1 for a link, or a kind of link, that takes at least twice as long as it should.",
        "model",
        "link",
    )
    link_seen_over_reported = gauge(
        "kvrouter_link_seen_over_reported_ratio",
        "Seconds a byte of KV from the end of a prefill to the first token, over those that engines count "
        "for the same ranks' transfers; above 2 something else holds up first tokens than links.",
        "model",
    )

    ttft = histogram(
        "kvrouter_time_to_first_token_seconds",
        "From the last byte of a request to the first byte of its first token.",
        "model",
        bounds=_TTFT_S,
    )
    inter_token_latency = histogram(
        "kvrouter_inter_token_latency_seconds",
        "Between two tokens of one answer.",
        "model",
        bounds=_TOKEN_GAP_S,
    )
    ttft_by_cache_hit = histogram(
        "kvrouter_time_to_first_token_by_cache_hit_seconds",
        "The same, by how much of the prompt the engine says that it had cached: none, under_half, "
        "over_half, or unknown where it does not say.",
        "model",
        "cache_hit",
        bounds=_TTFT_S,
    )
    ttft_by_domain = histogram(
        "kvrouter_time_to_first_token_by_domain_seconds",
        "The same, of requests that a pair served, by the transfer domain's values at both ends.",
        "prefill_domain",
        "decode_domain",
        bounds=_TTFT_S,
    )
    request_prompt_tokens = histogram(
        "kvrouter_request_prompt_tokens",
        "Tokens of a prompt, of requests whose first token came.",
        "model",
        bounds=_REQUEST_TOKENS,
    )
    request_completion_tokens = histogram(
        "kvrouter_request_completion_tokens",
        "Tokens of an answer, of requests whose first token came.",
        "model",
        bounds=_REQUEST_TOKENS,
    )
    request_duration = histogram(
        "kvrouter_request_duration_seconds",
        "From the last byte of a request to the end of its answer.",
        "model",
        bounds=_REQUEST_S,
    )
    decision_duration = histogram(
        "kvrouter_decision_duration_seconds",
        "To read the view, decide and book.",
        "mode",
        bounds=_DECISION_S,
    )
    tokenization_duration = histogram(
        "kvrouter_tokenization_duration_seconds",
        "To render and tokenize a prompt, waiting for a thread included.",
        "model",
        bounds=_TOKENIZATION_S,
    )

    prompts_refused = counter(
        "kvrouter_prompts_refused",
        "Prompts that were not tokenized, by the error's code: context_length_exceeded for a text that is "
        "longer than the context can hold, prompt_over_budget, or encode_pool_full.",
        "code",
    )
    chats_unrendered = counter(
        "kvrouter_chats_unrendered",
        "Chats that were not made into prompts here, so that each was routed by load: no_template, "
        "template_failed (an error in the chat template), over_bounds (it takes too much time or memory), "
        "refused (by the template itself, or fields that are not known) or too_long. The last two are for "
        "the engine to judge.",
        "model",
        "reason",
    )
    routed_by_load = gauge(
        "kvrouter_model_routed_by_load",
        "1 for a model whose prompts cannot be read here, or not all of them, so that its calls are routed "
        "by load and text; GET /v1/fleet has the reason.",
        "model",
    )
    engine_tokenized = counter(
        "kvrouter_engine_tokenize",
        "Prompts that an engine was to tokenize, by what came of it: answered, refused, absent (it has no "
        "/tokenize), late, failed, or not_asked (too long, too many at a time, or after failures).",
        "model",
        "outcome",
    )
    tokenize_bytes = gauge(
        "kvrouter_tokenize_bytes",
        "What long prompts are counted to hold while they are tokenized, by --tokenize-max-bytes.",
    )

    decisions = counter(
        "kvrouter_decisions",
        "Decisions, by router mode and by shape: aggregated, bootstrap, synchronous, or prefill alone.",
        "model",
        "mode",
        "shape",
    )
    refusals = counter(
        "kvrouter_refusals",
        "Worker ranks that a decision refused, by the reason and the role.",
        "reason",
        "role",
    )
    handoffs = counter(
        "kvrouter_handoffs",
        "Handoffs of KV from prefill to decode, by the transfer domain's values at both ends.",
        "prefill_domain",
        "decode_domain",
    )
    kv_lost = counter(
        "kvrouter_kv_lost",
        "Handoffs whose KV did not arrive, by both workers and why: unreachable, broken, timeout, unknown or "
        "refused (the handshake of their engines).",
        "model",
        "prefill_worker",
        "decode_worker",
        "reason",
    )
    kv_pulled_tokens = counter(
        "kvrouter_kv_pulled_tokens",
        "Prompt tokens whose KV prefill workers were to fetch from their decode workers, by the outcome: "
        "pulled; or computed, because the decode worker did not keep it in time (not_kept) or it did not "
        "arrive (failed).",
        "model",
        "outcome",
    )
    fallbacks = counter(
        "kvrouter_fallbacks",
        "Handoffs that crossed their domain because no decode worker was left in it.",
        "domain",
    )
    domain_waits = counter(
        "kvrouter_domain_waits",
        "Requests that waited for a decode worker to join their domain, by the outcome: joined or refused.",
        "outcome",
    )

    queue_depth = gauge("kvrouter_queue_depth", "Requests that wait for a worker that is not busy.", "model")
    queue_wait = histogram(
        "kvrouter_queue_wait_seconds", "In the queue, for requests that entered it.", "model", bounds=_WAIT_S
    )
    queue_refusals = counter(
        "kvrouter_queue_refusals",
        "Requests that the queue refused: it was full, or they waited too long (timeout).",
        "model",
        "cause",
    )

    slo_refusals = counter(
        "kvrouter_slo_refusals",
        "Requests that were refused because their first token would have come too late, by class: critical "
        "(with a strict priority) or other.",
        "model",
        "class",
    )

    feed_state = gauge(
        "kvrouter_feed_state",
        "1 for the state that a rank's event stream is in: live, recovering, partial, over_limit "
        "(it reported more blocks than its worker can hold) or none.",
        "worker",
        "dp_rank",
        "state",
    )
    feed_events = counter(
        "kvrouter_feed_events",
        "What happened in event streams: one of the feed's words (gaps, orphans, …), or blocks_… for each "
        "block of an event that reached the index, by what became of it (blocks_stored, blocks_removed, …).",
        "model",
        "outcome",
    )
    kv_events_skipped = counter(
        "kvrouter_kv_events_skipped",
        "Blocks of an engine's KV events that its worker did not pass on, by the reason; as unreadable, "
        "messages are counted, as missed losses of batches, as unknown_event events.",
        "model",
        "worker",
        "dp_rank",
        "reason",
    )
    feed_staleness = gauge(
        "kvrouter_feed_staleness_seconds",
        "How long a rank's blocks have not been known for sure; 0 when they are.",
        "worker",
        "dp_rank",
    )
    kv_events_missing = gauge(
        "kvrouter_kv_events_missing",
        "1 for a rank that should publish KV events and was not heard for 15 s, heartbeats included.",
        "worker",
        "dp_rank",
    )
    event_lag = gauge(
        "kvrouter_event_lag_seconds",
        "Age of the latest KV batch when it was applied, by its sender's clock.",
        "worker",
        "dp_rank",
    )

    index_blocks = gauge("kvrouter_index_blocks", "Blocks that workers are known to hold.", "model", "medium")
    index_bytes = gauge("kvrouter_index_bytes", "Memory of the index, and of predicted blocks.", "model")
    ledger_active_blocks = gauge(
        "kvrouter_ledger_active_blocks", "Blocks of requests that this router booked.", "worker", "dp_rank"
    )
    ledger_prefill_tokens = gauge(
        "kvrouter_ledger_prefill_tokens",
        "Tokens that wait for prefill, of requests that this router booked.",
        "worker",
        "dp_rank",
    )
    ledger_leases = gauge("kvrouter_ledger_leases", "Leases that are open.", "model")
    bookings = gauge("kvrouter_bookings", "Requests that are booked by hand, at a standalone router.")
    bookings_lapsed = counter(
        "kvrouter_bookings_lapsed", "Bookings that ended because nobody freed or renewed them.", "model"
    )
    prefills_active = gauge("kvrouter_prefills_active", "Prefill legs that a standalone router runs.")

    worker_up = gauge(
        "kvrouter_worker_up",
        "1 for a worker that was discovered and has not left. A worker that left is not on the page.",
        "worker",
        "model",
        "role",
        "domain",
    )
    worker_info = gauge(
        "kvrouter_worker_info",
        "1 for a worker, with what it is: to be joined on `worker`. The zone is its value of the level "
        "`zone`; a label is empty where nobody says.",
        "worker",
        "pod",
        "address",
        "engine",
        "version",
        "zone",
    )
    worker_kv_transfer = gauge(
        "kvrouter_worker_kv_transfer_info",
        "1 for a worker that published its place or a policy of KV transfers, with both: every domain with "
        "its value, the domain that its transfers keep to, how strictly, and the weight of a preference. A "
        "label is empty where the worker published none.",
        "worker",
        "topology_domains",
        "kv_transfer_domain",
        "kv_transfer_enforcement",
        "kv_transfer_preferred_weight",
    )
    worker_requests = counter(
        "kvrouter_worker_requests",
        "Legs of requests that a worker was picked for: prefill, decode, or aggregated for a whole one. "
        "Where decode is picked again after prefill, both picks count.",
        "model",
        "worker",
        "leg",
    )
    worker_failures = counter(
        "kvrouter_worker_failures",
        "Legs that a worker failed, by how: lost (it broke off, or could not be reached) or silent.",
        "model",
        "worker",
        "reason",
    )
    worker_prompt_tokens = counter(
        "kvrouter_worker_prompt_tokens",
        "Prompt tokens of requests that a worker prefilled, cached ones included.",
        "model",
        "worker",
    )
    worker_cached_tokens = counter(
        "kvrouter_worker_cached_tokens",
        "Those of them that its engine says it had cached.",
        "model",
        "worker",
    )
    worker_completion_tokens = counter(
        "kvrouter_worker_completion_tokens", "Tokens of answers that a worker brought.", "model", "worker"
    )
    worker_draining = gauge(
        "kvrouter_worker_draining", "1 for a worker that leaves: it takes no new requests.", "worker"
    )
    worker_cordoned = gauge(
        "kvrouter_worker_cordoned",
        "1 for a worker that a cordon holds for: it takes no new requests until it is uncordoned.",
        "worker",
    )
    worker_engine_silent = gauge(
        "kvrouter_worker_engine_silent",
        "1 for a worker whose engine does not answer it: it takes no new requests until it does.",
        "worker",
    )
    worker_several_engines = gauge(
        "kvrouter_worker_several_engines",
        "1 for a worker whose engine's URL is an address before several engines: give each engine's own URL.",
        "worker",
    )
    worker_blocks = gauge(
        "kvrouter_worker_blocks",
        "KV blocks by a rank's own latest load report: active, and in total.",
        "worker",
        "dp_rank",
        "which",
    )
    worker_running_requests = gauge(
        "kvrouter_worker_running_requests",
        "Requests that a rank's engine runs, by its own latest load report, from all senders.",
        "worker",
        "dp_rank",
    )
    worker_waiting_requests = gauge(
        "kvrouter_worker_waiting_requests",
        "Requests that wait in a rank's engine, by its own latest load report, from all senders.",
        "worker",
        "dp_rank",
    )

    worker_circuit = gauge(
        "kvrouter_worker_circuit",
        "1 for the state that a worker's circuit is in: closed, open (it is passed over) or half_open (one "
        "request may try it).",
        "worker",
        "state",
    )
    circuits_opened = counter(
        "kvrouter_circuits_opened",
        "Times that a worker was passed over from then on, by its last failure: lost or silent.",
        "model",
        "worker",
        "reason",
    )
    pair_capacity = gauge(
        "kvrouter_pair_capacity_ratio",
        "The share of the capacity of pairs that is left while not every decode worker can take the KV of "
        "every prefill worker (kv_format), as during an upgrade; 1 while all can.",
        "model",
    )
    pairs_parted = gauge(
        "kvrouter_pairs_parted",
        "Pairs whose KV was lost lately, or whose engines refuse each other; the router pairs both workers "
        "with others where it can.",
        "model",
    )

    discovery_up = gauge(
        "kvrouter_discovery_up", "1 while discovery can be reached; at 0 the fleet is frozen as it was."
    )
    engines_awaited = gauge(
        "kvrouter_engines_awaited",
        "Engines of the fleet file, or of labelled pods, that have no worker; GET /ready says why.",
    )
    planes_refused = counter(
        "kvrouter_planes_refused",
        "Peers that were refused or cut off between processes: a wrong token, version or frame.",
        "plane",
    )

    events_dropped = counter(
        "kvrouter_events_dropped",
        "Messages of the event plane that this router dropped as they came, by reason: malformed (it cannot "
        "be read, or its seal or token is wrong), or it speaks for a rank that is not of its channel's "
        "worker (other_worker), component (other_component) or event transport (other_lane): its sender "
        "lies, or is broken. What a feed drops of batches that it had is in kvrouter_feed_events_total "
        "(stale_epoch_batches, inbox_full, over_limit, …).",
        "plane",
        "reason",
    )

    replicas = gauge(
        "kvrouter_replicas", "Other routers whose requests are counted here; 0 without replica sync."
    )
    replicas_behind = gauge(
        "kvrouter_replicas_behind",
        "Other routers of whose requests something was missed: they were asked for all of them.",
    )
    replica_leases = gauge("kvrouter_replica_leases", "Open leases of other routers.")
    replica_sync = counter(
        "kvrouter_replica_sync_events",
        "What went wrong between replicas and was fixed: gap, duplicate, replica_lost, over_limit, "
        "unheard, unusable, untold, dropped or unsent.",
        "outcome",
    )

    log_lines_lost = counter(
        "kvrouter_log_lines_lost",
        "Lines of the log that were not written, because standard error was not read fast enough or refused "
        "them.",
    )
    http_connections = gauge("kvrouter_http_connections", "Connections that are open.")
    http_events = counter(
        "kvrouter_http_events",
        "What happened on connections: connection_opened, connection_refused, connection_closed, request, "
        "bad_request, uploads_full, upload_too_slow, client_left, write_stalled, write_overflow, drain_cut "
        "or handler_failed.",
        "event",
    )
    http_upload_bytes = gauge(
        "kvrouter_http_upload_bytes",
        "What requests hold that are still arriving, or wait on their connection, by --uploads-max-bytes.",
    )
    bodies_refused = counter(
        "kvrouter_bodies_refused",
        "Bodies that hold more than their bounds allow: depth, values, items, numbers, text_bytes, "
        "short_bytes, key_bytes, number_bytes or blanks.",
        "bound",
    )
    build_info = gauge("kvrouter_build_info", "1, with the version that runs.", "version")

    SPECS: ClassVar[tuple[MetricSpec, ...]]

    def __init__(self, *, gen_ai: bool = False) -> None:
        """``gen_ai``: whether requests are also measured under OpenTelemetry's names."""
        super().__init__()
        self.gen_ai = GenAiMetrics() if gen_ai else None
        if self.gen_ai is not None:
            self.collectors.extend(self.gen_ai.collectors)


Telemetry.SPECS = specs_of(Telemetry)


_LOOK_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class OperatorTelemetry(MetricsPage):
    """The metrics of one replica of the operator. Labels are given by position, in the order of the table."""

    leading = gauge("kvrouter_operator_leading", "1 on the replica that holds the lease, 0 on the others.")
    definition_foreign = gauge(
        "kvrouter_operator_definition_foreign",
        "1 while the cluster's definition of DynamoGraphDeployment is not kvrouter's: nothing is done then.",
    )
    waiting = gauge("kvrouter_operator_waiting", "Deployments that wait to be reconciled.")
    stood_back = gauge(
        "kvrouter_operator_stood_back", "Deployments that are left to another operator, which came first."
    )
    conditions = gauge(
        "kvrouter_operator_deployment_condition",
        "1 for the status that a condition of a deployment has: true, false or unknown. Only the leader has "
        "these.",
        "namespace",
        "deployment",
        "condition",
        "status",
    )
    looks = counter(
        "kvrouter_operator_looks", "Reconciliations of a deployment, by result: done or failed.", "result"
    )
    reconcile_s = histogram(
        "kvrouter_operator_look_seconds", "How long one reconciliation takes.", bounds=_LOOK_S
    )
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
