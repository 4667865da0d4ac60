"""Every log event, in one table, and the fields of log lines. No field holds a prompt."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from logging import DEBUG, ERROR, INFO, WARNING
from typing import TypedDict, Unpack, cast

from kvrouter.telemetry.log_forms import EventLine, LogValue


class Event(StrEnum):
    """A log event: its name in logs, its level, and its meaning."""

    level: int
    meaning: str

    def __new__(cls, value: str, level: int, meaning: str) -> "Event":
        """Make a member with its name in logs, its level and its meaning."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.level = level
        member.meaning = meaning
        return member

    START = "start", INFO, "The service begins: version, models, workers."
    FILES_MAX = (
        "files_max",
        INFO,
        "How many files this process may have open, and how many connections it takes of them.",
    )
    READY = "ready", INFO, "The frontend listens at this host and port."
    ROUTER_COST = (
        "router_cost",
        INFO,
        "The router's mode, what a worker costs in mode kv, and why that cost is in use.",
    )
    CONFIG_WARNING = "config_warning", WARNING, "A setting is valid, but probably a mistake."
    DRAIN = "drain", INFO, "No new requests are taken; running ones may finish."
    STOP = "stop", INFO, "The service ended."
    DECISION = (
        "decision",
        DEBUG,
        "A request was given its worker, or its pair of workers; `again` where decode was picked again after "
        "prefill. `request_ended` has the same fields, those of the last decision.",
    )
    REFUSAL = "refusal", WARNING, "Nobody may take a request now; worker ranks per reason."
    FALLBACK = "fallback", WARNING, "A handoff crosses its domain: no decode worker was left in it."
    DOMAIN_WAIT = "domain_wait", INFO, "A request waited for a decode worker to join its domain."
    KV_LOST = (
        "kv_lost",
        WARNING,
        "A decode worker did not get a prefill worker's KV; the request is prefilled again.",
    )
    ANSWER_UNREAD = (
        "answer_unread",
        WARNING,
        "Something in an engine's answer cannot be read, and why. Its client got it as it is; its tokens "
        "are not counted, and it could not have gone on elsewhere. Logged at most once a minute for each "
        "worker.",
    )
    RETRY = "retry", WARNING, "A worker failed a request, which is sent elsewhere."
    RESUME = "resume", WARNING, "A worker was lost in mid-answer; the answer goes on elsewhere."
    CANCELLED = "cancelled", INFO, "A client left before its answer ended."
    REQUEST_ENDED = (
        "request_ended",
        INFO,
        "A call of a generation route has its whole answer, or an error, or its client left (status 499): "
        "where its last attempt went and what was decided on, its times and its tokens. A call without a "
        "decision has no fields of one. One line for each call, and for each request that is refused before "
        "any route sees it: its route is unknown where it names none that is here.",
    )
    BOOKING_LAPSED = (
        "booking_lapsed",
        WARNING,
        "A request that was booked by hand was never freed, and its owner said nothing more.",
    )
    REQUEST_FAILED = "request_failed", WARNING, "A request ended with an error of ours."
    WORKER_JOINED = (
        "worker_joined",
        INFO,
        "A worker was discovered. On a terminal, those that are there when `kvrouter up` or `frontend` "
        "starts are one table instead; JSON lines, and text that is no terminal's, have them all.",
    )
    WORKER_CHANGED = (
        "worker_changed",
        INFO,
        "A worker published another card: domains, taints, capacity, whether its engine answers.",
    )
    WORKER_DRAINING = "worker_draining", INFO, "A worker takes no new requests."
    WORKER_CORDONED = (
        "worker_cordoned",
        INFO,
        "A worker takes no new requests, as a cordon asks; what runs there goes on.",
    )
    WORKER_UNCORDONED = "worker_uncordoned", INFO, "A worker is cordoned no longer."
    CORDONED = (
        "cordoned",
        WARNING,
        "A worker, a node or a zone is cordoned, at every router: how many workers here it holds for, who "
        "asked for it, and why.",
    )
    UNCORDONED = "uncordoned", WARNING, "A cordon was taken back."
    CORDONS_LOST = (
        "cordons_lost",
        ERROR,
        "The store of cordons cannot be read: those that were read last hold.",
    )
    CORDONS_BACK = "cordons_back", INFO, "The store of cordons can be read again."
    WORKER_LEFT = "worker_left", WARNING, "A worker is gone."
    WORKER_REFUSED = "worker_refused", ERROR, "A worker's card cannot be routed to."
    WORKER_SILENT = (
        "worker_silent",
        WARNING,
        "A worker does not answer on the request plane: it gets no new requests.",
    )
    WORKER_ANSWERS = "worker_answers", INFO, "A worker answers on the request plane again."
    WORKER_LAPSED = (
        "worker_lapsed",
        WARNING,
        "A worker's lease at discovery ran out; it is kept for as long as it answers.",
    )
    WORKER_REPLACED = (
        "worker_replaced",
        ERROR,
        "Another process took this worker's id: this one lets its requests finish, and exits.",
    )
    WORKER_STANDBY = (
        "worker_standby",
        WARNING,
        "Another process has this worker's id: this one waits until that process is gone.",
    )
    CIRCUIT_OPENED = (
        "circuit_opened",
        WARNING,
        "A worker failed too often in a row, or KV of a pair was lost: it is passed over for so many "
        "seconds, as long as somebody else may take a request.",
    )
    CIRCUIT_CLOSED = (
        "circuit_closed",
        INFO,
        "A worker that was passed over answered again, or KV of a pair arrived again.",
    )
    DISCOVERY_LOST = (
        "discovery_lost",
        ERROR,
        "Discovery cannot be reached: the fleet stays as it was, and new workers are not seen.",
    )
    DISCOVERY_BACK = "discovery_back", INFO, "Discovery can be reached again."
    DISCOVERY_CHOSEN = (
        "discovery_chosen",
        WARNING,
        "Workers are looked for, or announced, in a directory of this host alone: others never meet them.",
    )
    PLANE_AWAITED = (
        "plane_awaited",
        WARNING,
        "NATS is needed and away while the process starts; it is tried for 10 s.",
    )
    PLANE_LOST = "plane_lost", ERROR, "The connection to NATS was lost; it is tried again."
    PLANE_BACK = "plane_back", INFO, "The connection to NATS is back."
    PLANE_REFUSED = (
        "plane_refused",
        WARNING,
        "A peer was refused or cut off: its token, its version or its frame is wrong.",
    )
    PLANE_DISTURBED = (
        "plane_disturbed",
        WARNING,
        "An operation of a transport or of discovery failed; it is retried.",
    )
    EVENTS_DROPPED = (
        "events_dropped",
        WARNING,
        "KV events could not be published; routers see the gap and ask this worker.",
    )
    EVENTS_FOREIGN = (
        "events_foreign",
        WARNING,
        "A message claimed to be about a rank of another worker than its channel's: it was dropped.",
    )
    STATES_RESET = (
        "states_reset",
        WARNING,
        "The event stream and the saved index were cleared, as --router-reset-states asks.",
    )
    TOKENIZER_FAILED = (
        "tokenizer_failed",
        ERROR,
        "A model's tokenizer could not be loaded here: its requests are refused.",
    )
    ROUTED_BY_LOAD = (
        "routed_by_load",
        WARNING,
        "A model's prompts cannot be read here, for this reason: its calls are served, and routed by load "
        "and text. Logged once for each reason.",
    )
    ROUTED_BY_CACHE = (
        "routed_by_cache",
        INFO,
        "A model's prompts can be read here again: what its workers have cached counts.",
    )
    CHAT_TEMPLATE_FAILED = (
        "chat_template_failed",
        WARNING,
        "A chat could not be made into a prompt here, for this reason: it is served, and routed by load. "
        "Logged once for each model and reason.",
    )
    TOKENIZE_BUDGET_SMALL = (
        "tokenize_budget_small",
        WARNING,
        "Text that fills a model's context takes more than `--tokenize-max-bytes` to tokenize: it gets a "
        "413. Logged once for each model.",
    )
    TOKENIZED_SLOWLY = (
        "tokenized_slowly",
        INFO,
        "A model's prompts are tokenized by `tokenizers`, 10 to 60 times slower than by `fastokens`, for "
        "this reason: the latter does not read its tokenizer, gives other ids, has four other tokenizers, "
        "or, from now on, refused a text or took much longer than texts' lengths explain.",
    )
    TOKENIZED_BY_ENGINE = (
        "tokenized_by_engine",
        INFO,
        "A model's prompts, or those of one shape, are tokenized by its engines' `/tokenize`, for this "
        "reason: each such call waits for that. Logged once for each reason.",
    )
    ENGINE_TOKENIZE_FAILED = (
        "engine_tokenize_failed",
        WARNING,
        "An engine is not asked to tokenize prompts for a while, for this reason: it has no `/tokenize`, or "
        "it fails again and again. Without another engine of the model its calls are routed by load. Logged "
        "once for each reason.",
    )
    PROCESS_STARTED = "process_started", INFO, "A process of the fleet was started."
    PROCESS_NOT_STARTED = (
        "process_not_started",
        ERROR,
        "A process of the fleet could not be started; it is tried again.",
    )
    PROCESS_ENDED = (
        "process_ended",
        WARNING,
        "A process of the fleet ended; why, and when it is started again.",
    )
    ENGINE_JOINED = "engine_joined", INFO, "An engine of another process reports to its worker what it holds."
    ENGINE_LEFT = "engine_left", WARNING, "An engine of another process is gone; what it reported is cleared."
    ENGINE_REFUSED = "engine_refused", WARNING, "A connection to the engine door was refused."
    ENGINE_AWAITED = (
        "engine_awaited",
        INFO,
        "The engine that this worker is to be attached to does not answer yet.",
    )
    ENGINE_ATTACHED = (
        "engine_attached",
        INFO,
        "The engine of this worker: where it is, and what it reported of itself.",
    )
    ENGINE_SILENT = (
        "engine_silent",
        ERROR,
        "The engine of this worker does not answer: the worker takes no new requests.",
    )
    ENGINE_ANSWERS = "engine_answers", INFO, "The engine of this worker answers again."
    SEVERAL_ENGINES = (
        "several_engines",
        WARNING,
        "The engine's URL is an address before several engines, such as a Kubernetes Service: which of them "
        "gets a request is not known, and KV events count no more. Give kvrouter each engine's own URL.",
    )
    ONE_ENGINE = "one_engine", INFO, "One engine alone answers again at the URL of this worker's engine."
    ENGINE_POD_FOUND = (
        "engine_pod_found",
        INFO,
        "A pod that is labelled as an engine is Ready: its engine is asked, and gets this worker.",
    )
    ENGINE_POD_GONE = (
        "engine_pod_gone",
        INFO,
        "A pod with an engine is gone: its worker lets running requests finish, and leaves.",
    )
    ENGINE_POD_REFUSED = (
        "engine_pod_refused",
        ERROR,
        "A pod that is labelled as an engine gets no worker; what to fix. An event says it too.",
    )
    MOCK_ENDED = (
        "mock_ended",
        INFO,
        "What mock engines did, as their process ends: KV carried between domains, pulls, connections that "
        "were refused, and how long their clock stood still on a machine too slow for them.",
    )
    MOCK_LINK_CHANGED = (
        "mock_link_changed",
        INFO,
        "A link between mock engines changed, as the file of --events says: which, and to what.",
    )
    CACHE_PARTIAL = (
        "cache_partial",
        WARNING,
        "Some of an engine's KV events are lost for good: it holds more than is known.",
    )
    KV_EVENTS_SKIPPED = (
        "kv_events_skipped",
        WARNING,
        "Some of an engine's KV events are not passed on: how many, by the reason. Logged at each new "
        "reason, and hourly while they become more.",
    )
    FEED_STATE = "feed_state", INFO, "A rank's event stream is in another state."
    KV_EVENTS_MISSING = (
        "kv_events_missing",
        WARNING,
        "A rank should publish KV events, and not even its heartbeats are heard.",
    )
    RECOVERY_FAILED = (
        "recovery_failed",
        WARNING,
        "A worker was asked for KV events and did not give them; it is asked again.",
    )
    INDEX_STORED = (
        "index_stored",
        INFO,
        "The index was stored for routers that start later, and the event stream purged.",
    )
    INDEX_NOT_STORED = (
        "index_not_stored",
        WARNING,
        "The index could not be stored; the snapshot before it stays valid.",
    )
    EVENTS_MISTAKEN = (
        "events_mistaken",
        WARNING,
        "A rank's KV events do not make sense; what it holds is asked for.",
    )
    KV_EVENTS_OVER_LIMIT = (
        "kv_events_over_limit",
        WARNING,
        "A rank reported more KV blocks than its worker can hold: nothing that it says counts for a minute, "
        "then it is asked for all of it.",
    )
    INDEX_WRONG = (
        "index_wrong",
        WARNING,
        "An engine's own counts of cached tokens contradict the index: what it holds is asked for.",
    )
    PROMPT_SHAPE_BLIND = (
        "prompt_shape_blind",
        WARNING,
        "Calls of one shape (route, roles, features) are not found where their engine has them cached: it "
        "makes another prompt of them than the router.",
    )
    KV_TRANSFER_SLOW = (
        "kv_transfer_slow",
        WARNING,
        "KV travels to a rank at less than a quarter of the speed that it has shown, by its engine's count.",
    )
    KV_TRANSFER_WELL = (
        "kv_transfer_well",
        INFO,
        "KV travels to a rank at half of the speed that it has shown, or faster, again.",
    )
    RANK_SLOW = (
        "rank_slow",
        WARNING,
        "A rank takes 1.5 times as long for a prompt as half of the ranks do, or longer: it gets less to do.",
    )
    RANK_WELL = "rank_well", INFO, "A rank that was slow is about as fast as the others again."
    LINK_SLOW = (
        "link_slow",
        WARNING,
        "KV takes twice as long over a link, or over all of its kind, as it should, or longer: by the given "
        "links, what they have shown, or the others of their kind. It gets less to carry.",
    )
    LINK_WELL = "link_well", INFO, "A link that was slow is about as fast as it should be again."
    FRONTEND_MOVED = (
        "frontend_moved",
        INFO,
        "The frontend's topology files changed: prefill that keeps near it moves too.",
    )
    LINKS_READ = (
        "links_read",
        INFO,
        "The file of --router-links changed: decisions weigh what it says now, and links are learned from "
        "the beginning.",
    )
    LINKS_REFUSED = (
        "links_refused",
        WARNING,
        "The file of --router-links cannot be read, or is wrong: decisions weigh what it said last.",
    )
    LEARNED_NOT_READ = (
        "learned_not_read",
        WARNING,
        "The file of --router-learned-file cannot be read, is wrong, or is of another version of kvrouter: "
        "links and workers are learned from the beginning.",
    )
    LEARNED_NOT_KEPT = (
        "learned_not_kept",
        WARNING,
        "The file of --router-learned-file cannot be written; it is tried again.",
    )
    BUSY_THRESHOLD = "busy_threshold", INFO, "A model's busy thresholds were set."
    ROUTING_HINT_IGNORED = (
        "routing_hint_ignored",
        WARNING,
        "A routing hint of a request is unknown, or has no effect here; logged once for each name.",
    )
    HTTP_BAD_REQUEST = "http_bad_request", INFO, "A client sent invalid or unsupported HTTP."
    HTTP_CONNECTIONS_FULL = (
        "http_connections_full",
        WARNING,
        "The limit of open connections is reached: a further one was answered 503.",
    )
    HTTP_UPLOADS_FULL = (
        "http_uploads_full",
        WARNING,
        "Requests that are arriving hold all the bytes that they may: the largest is refused.",
    )
    HTTP_CLIENT_LEFT = (
        "http_client_left",
        INFO,
        "A connection was lost before its answer ended; whether it had started.",
    )
    HTTP_CUT = "http_cut", WARNING, "A connection was dropped with bytes that were not yet sent."
    HTTP_HANDLER_FAILED = (
        "http_handler_failed",
        ERROR,
        "A request was not answered completely, because of a bug in kvrouter.",
    )
    RECORDING = "recording", INFO, "Traffic is recorded in this folder, by --record."
    RECORDING_DROPPED = (
        "recording_dropped",
        WARNING,
        "Records of traffic are dropped: too many wait to be written, or one could not be made, with the "
        "traceback, or is longer than all files may be. Logged at most once a minute for each reason.",
    )
    RECORDING_ENDED = (
        "recording_ended",
        ERROR,
        "Nothing more is recorded until the next start: the disk is full or refused a write, or the file "
        "was removed. Requests are served as before.",
    )
    SPANS_NOT_SENT = (
        "spans_not_sent",
        WARNING,
        "OpenTelemetry's SDK could not send spans of requests, or dropped some. Requests are served as "
        "before.",
    )
    LOG_LINES_LOST = (
        "log_lines_lost",
        WARNING,
        "So many lines of this log are missing before this one: standard error was not read fast enough, or "
        "could not be written to.",
    )
    INTERNAL_ERROR = "internal_error", ERROR, "A bug in kvrouter, with its traceback."
    OPERATOR_LEADS = "operator_leads", INFO, "This replica of the operator got the lease: it writes."
    OPERATOR_FOLLOWS = (
        "operator_follows",
        WARNING,
        "This replica of the operator no longer holds the lease, and writes nothing more.",
    )
    OPERATOR_STANDS_BACK = (
        "operator_stands_back",
        WARNING,
        "Another operator manages a deployment: this one does not touch it.",
    )
    DEFINITION_FOREIGN = (
        "definition_foreign",
        WARNING,
        "The cluster's definition of DynamoGraphDeployment is not kvrouter's: the operator reads, judges "
        "and writes nothing. The reason says why, and `kvrouter operator preflight` the way out.",
    )
    DEFINITION_OWN = (
        "definition_own",
        INFO,
        "The cluster's definition of DynamoGraphDeployment is kvrouter's: the operator works.",
    )
    LEASE_NOT_RENEWED = (
        "lease_not_renewed",
        WARNING,
        "The operator's lease could not be read or written; it is tried again.",
    )
    CLUSTER_LOST = (
        "cluster_lost",
        WARNING,
        "Objects of this kind cannot be watched; what was seen of them last is kept. At the start it is "
        "logged once that lasts for 3 seconds: while a definition is new, an API server refuses its objects.",
    )
    CLUSTER_BACK = "cluster_back", INFO, "Objects of this kind can be watched again."
    API_SERVER_WARNS = (
        "api_server_warns",
        WARNING,
        "The API server did what the operator asked, and warns of it; each is logged once.",
    )
    DEPLOYMENT_APPLIED = "deployment_applied", INFO, "Objects of a deployment were written, or removed."
    DEPLOYMENT_FAILED = (
        "deployment_failed",
        WARNING,
        "Reconciling a deployment failed; it is retried after so many seconds.",
    )
    EVENT_REFUSED = (
        "event_refused",
        WARNING,
        "The API server refused an event about a deployment, and it is dropped.",
    )
    POD_LABELLED = "pod_labelled", INFO, "A pod got its node's labels after it was bound, or other ones."
    ADMISSION_REFUSED = "admission_refused", INFO, "A deployment was refused at its admission."
    ADMISSION_UNANSWERED = (
        "admission_unanswered",
        WARNING,
        "A request to the admission server was not valid, or came when that was at its limit.",
    )
    CERTIFICATE_CHANGED = "certificate_changed", INFO, "The admission server uses another certificate."
    CERTIFICATE_REFUSED = (
        "certificate_refused",
        ERROR,
        "The certificate's files changed and cannot be used; the previous one stays in use.",
    )


class Fields(TypedDict, total=False):
    """The fields of a log line. Of a client's text they hold only the ids that it chose."""

    request_id: str
    trace_id: str
    route: str
    attempt: int
    attempts: int
    resumes: int
    again: bool
    model: str
    mode: str
    router_cost: str
    shape: str
    isl_tokens: int
    cached_tokens: int
    predicted_tokens: int
    output_tokens: int
    ttft_s: float | None
    prefill_worker: str
    prefill_domain: str | None
    prefill_overlap_blocks: int
    pulled_blocks: int
    prefill_cost: float
    prefill_candidates: int
    decode_worker: str
    decode_domain: str | None
    decode_overlap_blocks: int
    decode_cost: float
    decode_candidates: int
    enforcement: str | None
    fallback_used: bool
    decision_us: float
    waited_s: float
    refusals: str
    role: str
    domain: str | None
    domains: str
    value: str | None
    worker: str
    cordon: str | None
    by: str | None
    source: str
    dp_rank: int
    taints: str
    reason: str | None
    code: str
    stage: str
    status: int
    state: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    host: str
    port: int
    files_max: int
    connections_max: int
    version: str
    models: str
    workers: int
    running_requests: int
    duration_s: float
    detail: str
    slowness: float
    link: str
    started: bool
    unsent_bytes: int
    plane: str
    address: str
    batches: int
    lines: int
    url: str
    block_size: int | None
    context_length: int | None
    dp_size: int
    total_kv_blocks: int | None
    publishes_kv_events: bool
    process: str
    exit_code: int
    deployment: str
    pod: str
    kind: str
    identity: str


FIELD_NAMES = frozenset(Fields.__annotations__)


def emit_record(
    logger: logging.Logger, event: Event, fields: dict[str, LogValue], error: BaseException | None
) -> None:
    """Emit an event by :mod:`logging`, as a program that embeds kvrouter has configured it."""
    logger.log(
        event.level,
        EventLine(event.value, fields),
        extra={"kvrouter_event": event.value, "kvrouter_fields": fields},
        exc_info=error,
        stacklevel=3,
    )


@dataclass(slots=True)
class Emission:
    """How events of an enabled level are emitted: by :mod:`logging`, or by kvrouter's own log where
    :func:`~kvrouter.telemetry.logs.configure_logging` was called.
    """

    emit: Callable[[logging.Logger, Event, dict[str, LogValue], BaseException | None], None] = emit_record


EMISSION = Emission()


def log_event(
    logger: logging.Logger,
    event: Event,
    *,
    exc_info: bool | BaseException | None = None,
    **fields: Unpack[Fields],
) -> None:
    """Log ``event`` with ``fields`` at the event's own level; costs nothing where that level is disabled.

    ``exc_info`` is an error to log with its traceback, or True for the one being handled. Raises TypeError
    for a field that is not in :class:`Fields`, so that no other text reaches a log.
    """
    if not logger.isEnabledFor(event.level):
        return
    if not FIELD_NAMES.issuperset(fields):
        raise TypeError(f"no log field: {', '.join(sorted(set(fields) - FIELD_NAMES))}")
    error = (sys.exception() if exc_info else None) if isinstance(exc_info, bool) else exc_info
    EMISSION.emit(logger, event, cast("dict[str, LogValue]", fields), error)


def log_enabled_event(logger: logging.Logger, event: Event, fields: Fields) -> None:
    """Log ``event``, whose level is enabled, as :func:`log_event` does. For lines of every request: passing
    thirty fields as arguments costs more than the rest.
    """
    EMISSION.emit(logger, event, cast("dict[str, LogValue]", fields), None)
