"""Every log event, in one table, and the fields that a line may have. There is no field for a prompt."""

import logging
import string
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict, Unpack, cast

import msgspec

LogValue = str | int | float | bool | None

VALUE_MAX_CHARS = 512
"""A longer text is cut, with an ellipsis."""

_PLAIN = frozenset(string.ascii_letters + string.digits + string.punctuation) - frozenset("\"'\\")


class Event(StrEnum):
    """What a line reports. Each one's level and meaning are in :data:`EVENTS`."""

    START = "start"
    FILES_MAX = "files_max"
    READY = "ready"
    CONFIG_WARNING = "config_warning"
    DRAIN = "drain"
    STOP = "stop"
    DECISION = "decision"
    REFUSAL = "refusal"
    FALLBACK = "fallback"
    DOMAIN_WAIT = "domain_wait"
    KV_LOST = "kv_lost"
    ANSWER_UNREAD = "answer_unread"
    RETRY = "retry"
    RESUME = "resume"
    CANCELLED = "cancelled"
    REQUEST_ENDED = "request_ended"
    BOOKING_LAPSED = "booking_lapsed"
    REQUEST_FAILED = "request_failed"
    WORKER_JOINED = "worker_joined"
    WORKER_CHANGED = "worker_changed"
    WORKER_DRAINING = "worker_draining"
    WORKER_CORDONED = "worker_cordoned"
    WORKER_UNCORDONED = "worker_uncordoned"
    CORDONED = "cordoned"
    UNCORDONED = "uncordoned"
    CORDONS_LOST = "cordons_lost"
    CORDONS_BACK = "cordons_back"
    WORKER_LEFT = "worker_left"
    WORKER_REFUSED = "worker_refused"
    WORKER_SILENT = "worker_silent"
    WORKER_ANSWERS = "worker_answers"
    WORKER_LAPSED = "worker_lapsed"
    WORKER_REPLACED = "worker_replaced"
    WORKER_STANDBY = "worker_standby"
    CIRCUIT_OPENED = "circuit_opened"
    CIRCUIT_CLOSED = "circuit_closed"
    DISCOVERY_LOST = "discovery_lost"
    DISCOVERY_BACK = "discovery_back"
    DISCOVERY_CHOSEN = "discovery_chosen"
    PLANE_AWAITED = "plane_awaited"
    PLANE_LOST = "plane_lost"
    PLANE_BACK = "plane_back"
    PLANE_REFUSED = "plane_refused"
    PLANE_DISTURBED = "plane_disturbed"
    EVENTS_DROPPED = "events_dropped"
    EVENTS_FOREIGN = "events_foreign"
    STATES_RESET = "states_reset"
    TOKENIZER_FAILED = "tokenizer_failed"
    ROUTED_BY_LOAD = "routed_by_load"
    ROUTED_BY_CACHE = "routed_by_cache"
    CHAT_TEMPLATE_FAILED = "chat_template_failed"
    TOKENIZE_BUDGET_SMALL = "tokenize_budget_small"
    TOKENIZED_BY_ENGINE = "tokenized_by_engine"
    ENGINE_TOKENIZE_FAILED = "engine_tokenize_failed"
    PROCESS_STARTED = "process_started"
    PROCESS_NOT_STARTED = "process_not_started"
    PROCESS_ENDED = "process_ended"
    ENGINE_JOINED = "engine_joined"
    ENGINE_LEFT = "engine_left"
    ENGINE_REFUSED = "engine_refused"
    ENGINE_AWAITED = "engine_awaited"
    ENGINE_ATTACHED = "engine_attached"
    ENGINE_SILENT = "engine_silent"
    ENGINE_ANSWERS = "engine_answers"
    ENGINE_POD_FOUND = "engine_pod_found"
    ENGINE_POD_GONE = "engine_pod_gone"
    ENGINE_POD_REFUSED = "engine_pod_refused"
    MOCK_ENDED = "mock_ended"
    MOCK_LINK_CHANGED = "mock_link_changed"
    CACHE_PARTIAL = "cache_partial"
    KV_EVENTS_SKIPPED = "kv_events_skipped"
    FEED_STATE = "feed_state"
    KV_EVENTS_MISSING = "kv_events_missing"
    RECOVERY_FAILED = "recovery_failed"
    INDEX_STORED = "index_stored"
    INDEX_NOT_STORED = "index_not_stored"
    EVENTS_MISTAKEN = "events_mistaken"
    KV_EVENTS_OVER_LIMIT = "kv_events_over_limit"
    INDEX_WRONG = "index_wrong"
    PROMPT_SHAPE_BLIND = "prompt_shape_blind"
    KV_TRANSFER_SLOW = "kv_transfer_slow"
    KV_TRANSFER_WELL = "kv_transfer_well"
    RANK_SLOW = "rank_slow"
    RANK_WELL = "rank_well"
    LINK_SLOW = "link_slow"
    FRONTEND_MOVED = "frontend_moved"
    LINKS_READ = "links_read"
    LINKS_REFUSED = "links_refused"
    LEARNED_NOT_READ = "learned_not_read"
    LEARNED_NOT_KEPT = "learned_not_kept"
    LINK_WELL = "link_well"
    BUSY_THRESHOLD = "busy_threshold"
    ROUTING_HINT_IGNORED = "routing_hint_ignored"
    HTTP_BAD_REQUEST = "http_bad_request"
    HTTP_CONNECTIONS_FULL = "http_connections_full"
    HTTP_UPLOADS_FULL = "http_uploads_full"
    HTTP_CLIENT_LEFT = "http_client_left"
    HTTP_CUT = "http_cut"
    HTTP_HANDLER_FAILED = "http_handler_failed"
    RECORDING = "recording"
    RECORDING_DROPPED = "recording_dropped"
    RECORDING_ENDED = "recording_ended"
    SPANS_NOT_SENT = "spans_not_sent"
    INTERNAL_ERROR = "internal_error"
    OPERATOR_LEADS = "operator_leads"
    OPERATOR_FOLLOWS = "operator_follows"
    OPERATOR_STANDS_BACK = "operator_stands_back"
    DEFINITION_FOREIGN = "definition_foreign"
    DEFINITION_OWN = "definition_own"
    LEASE_NOT_RENEWED = "lease_not_renewed"
    CLUSTER_LOST = "cluster_lost"
    CLUSTER_BACK = "cluster_back"
    API_SERVER_WARNS = "api_server_warns"
    DEPLOYMENT_APPLIED = "deployment_applied"
    DEPLOYMENT_FAILED = "deployment_failed"
    EVENT_REFUSED = "event_refused"
    POD_LABELLED = "pod_labelled"
    ADMISSION_REFUSED = "admission_refused"
    ADMISSION_UNANSWERED = "admission_unanswered"
    CERTIFICATE_CHANGED = "certificate_changed"
    CERTIFICATE_REFUSED = "certificate_refused"


class Fields(TypedDict, total=False):
    """The fields of a log line. Text that a client wrote is not among them, but for the ids that it chose."""

    request_id: str
    trace_id: str
    route: str
    attempt: int
    attempts: int
    resumes: int
    again: bool
    model: str
    mode: str
    shape: str
    isl_tokens: int
    cached_tokens: int
    predicted_tokens: int
    output_tokens: int
    ttft_s: float | None
    prefill_worker: str
    prefill_domain: str | None
    prefill_overlap_blocks: int
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


@dataclass(frozen=True, slots=True)
class EventSpec:
    """How important an event is, and what it reports."""

    level: int
    meaning: str


EVENTS: dict[Event, EventSpec] = {
    Event.START: EventSpec(logging.INFO, "The service begins: version, models, workers."),
    Event.FILES_MAX: EventSpec(
        logging.INFO,
        "How many files this process may have open, and how many connections it takes of them.",
    ),
    Event.READY: EventSpec(logging.INFO, "The frontend listens at this host and port."),
    Event.CONFIG_WARNING: EventSpec(logging.WARNING, "A setting is valid, but probably a mistake."),
    Event.DRAIN: EventSpec(logging.INFO, "No new requests are taken; running ones may finish."),
    Event.STOP: EventSpec(logging.INFO, "The service ended."),
    Event.DECISION: EventSpec(logging.INFO, "A request was given its worker, or its pair of workers."),
    Event.REFUSAL: EventSpec(logging.WARNING, "Nobody may take a request now; worker ranks per reason."),
    Event.FALLBACK: EventSpec(
        logging.WARNING, "A handoff crosses its domain: no decode worker was left in it."
    ),
    Event.DOMAIN_WAIT: EventSpec(logging.INFO, "A request waited for a decode worker to join its domain."),
    Event.KV_LOST: EventSpec(
        logging.WARNING, "A decode worker did not get a prefill worker's KV; the request is prefilled again."
    ),
    Event.ANSWER_UNREAD: EventSpec(
        logging.WARNING,
        "Something in an engine's answer cannot be read, and why. Its client got it as it is; its tokens are "
        "not counted, and it could not have gone on elsewhere. Logged at most once a minute for each worker.",
    ),
    Event.RETRY: EventSpec(logging.WARNING, "A worker failed a request, which is sent elsewhere."),
    Event.RESUME: EventSpec(
        logging.WARNING, "A worker was lost in mid-answer; the answer goes on elsewhere."
    ),
    Event.CANCELLED: EventSpec(logging.INFO, "A client left before its answer ended."),
    Event.REQUEST_ENDED: EventSpec(
        logging.INFO,
        "A call of a generation route has its whole answer, or an error, or its client left (status 499): "
        "where its last attempt went, its times and its tokens. One line for each call, and for each request "
        "that is refused before any route sees it: its route is unknown where it names none that is here.",
    ),
    Event.BOOKING_LAPSED: EventSpec(
        logging.WARNING, "A request that was booked by hand was never freed, and its owner said nothing more."
    ),
    Event.REQUEST_FAILED: EventSpec(logging.WARNING, "A request ended with an error of ours."),
    Event.WORKER_JOINED: EventSpec(
        logging.INFO,
        "A worker was discovered. On a terminal, those that are there when `kvrouter up` or `frontend` "
        "starts are one table instead; JSON lines, and text that is no terminal's, have them all.",
    ),
    Event.WORKER_CHANGED: EventSpec(
        logging.INFO,
        "A worker published another card: domains, taints, capacity, whether its engine answers.",
    ),
    Event.WORKER_DRAINING: EventSpec(logging.INFO, "A worker takes no new requests."),
    Event.WORKER_CORDONED: EventSpec(
        logging.INFO, "A worker takes no new requests, as a cordon asks; what runs there goes on."
    ),
    Event.WORKER_UNCORDONED: EventSpec(logging.INFO, "A worker is cordoned no longer."),
    Event.CORDONED: EventSpec(
        logging.WARNING,
        "A worker, a node or a zone is cordoned, at every router: how many workers here it holds for, who "
        "asked for it, and why.",
    ),
    Event.UNCORDONED: EventSpec(logging.WARNING, "A cordon was taken back."),
    Event.CORDONS_LOST: EventSpec(
        logging.ERROR, "The store of cordons cannot be read: those that were read last hold."
    ),
    Event.CORDONS_BACK: EventSpec(logging.INFO, "The store of cordons can be read again."),
    Event.WORKER_LEFT: EventSpec(logging.WARNING, "A worker is gone."),
    Event.WORKER_REFUSED: EventSpec(logging.ERROR, "A worker's card cannot be routed to."),
    Event.WORKER_SILENT: EventSpec(
        logging.WARNING, "A worker does not answer on the request plane: it gets no new requests."
    ),
    Event.WORKER_ANSWERS: EventSpec(logging.INFO, "A worker answers on the request plane again."),
    Event.WORKER_LAPSED: EventSpec(
        logging.WARNING, "A worker's lease at discovery ran out; it is kept for as long as it answers."
    ),
    Event.WORKER_REPLACED: EventSpec(
        logging.ERROR, "Another process took this worker's id: this one lets its requests finish, and exits."
    ),
    Event.WORKER_STANDBY: EventSpec(
        logging.WARNING, "Another process has this worker's id: this one waits until that process is gone."
    ),
    Event.CIRCUIT_OPENED: EventSpec(
        logging.WARNING,
        "A worker failed too often in a row, or KV of a pair was lost: it is passed over for so many "
        "seconds, as long as somebody else may take a request.",
    ),
    Event.CIRCUIT_CLOSED: EventSpec(
        logging.INFO, "A worker that was passed over answered again, or KV of a pair arrived again."
    ),
    Event.DISCOVERY_LOST: EventSpec(
        logging.ERROR, "Discovery cannot be reached: the fleet stays as it was, and new workers are not seen."
    ),
    Event.DISCOVERY_BACK: EventSpec(logging.INFO, "Discovery can be reached again."),
    Event.DISCOVERY_CHOSEN: EventSpec(
        logging.INFO, "Workers are looked for, or announced, in a directory of this host alone."
    ),
    Event.PLANE_AWAITED: EventSpec(
        logging.WARNING, "NATS is needed and away while the process starts; it is tried for 10 s."
    ),
    Event.PLANE_LOST: EventSpec(logging.ERROR, "The connection to NATS was lost; it is tried again."),
    Event.PLANE_BACK: EventSpec(logging.INFO, "The connection to NATS is back."),
    Event.PLANE_REFUSED: EventSpec(
        logging.WARNING, "A peer was refused or cut off: its token, its version or its frame is wrong."
    ),
    Event.PLANE_DISTURBED: EventSpec(
        logging.WARNING, "An operation of a transport or of discovery failed; it is retried."
    ),
    Event.EVENTS_DROPPED: EventSpec(
        logging.WARNING, "KV events could not be published; routers see the gap and ask this worker."
    ),
    Event.EVENTS_FOREIGN: EventSpec(
        logging.WARNING,
        "A message claimed to be about a rank of another worker than its channel's: it was dropped.",
    ),
    Event.STATES_RESET: EventSpec(
        logging.WARNING, "The event stream and the saved index were cleared, as --router-reset-states asks."
    ),
    Event.TOKENIZER_FAILED: EventSpec(
        logging.ERROR, "A model's tokenizer could not be loaded here: its requests are refused."
    ),
    Event.ROUTED_BY_LOAD: EventSpec(
        logging.WARNING,
        "A model's prompts cannot be read here, for this reason: its calls are served, and routed by load "
        "alone. Logged once for each reason.",
    ),
    Event.ROUTED_BY_CACHE: EventSpec(
        logging.INFO, "A model's prompts can be read here again: what its workers have cached counts."
    ),
    Event.CHAT_TEMPLATE_FAILED: EventSpec(
        logging.WARNING,
        "A chat could not be made into a prompt here, for this reason: it is served, and routed by load. "
        "Logged once for each model and reason.",
    ),
    Event.TOKENIZE_BUDGET_SMALL: EventSpec(
        logging.WARNING,
        "Text that fills a model's context takes more than `--tokenize-max-bytes` to tokenize: it gets a "
        "413. Logged once for each model.",
    ),
    Event.TOKENIZED_BY_ENGINE: EventSpec(
        logging.INFO,
        "A model's prompts, or those of one shape, are tokenized by its engines' `/tokenize`, for this "
        "reason: each such call waits for that. Logged once for each reason.",
    ),
    Event.ENGINE_TOKENIZE_FAILED: EventSpec(
        logging.WARNING,
        "An engine is not asked to tokenize prompts for a while, for this reason: it has no `/tokenize`, or "
        "it fails again and again. Without another engine of the model its calls are routed by load. Logged "
        "once for each reason.",
    ),
    Event.PROCESS_STARTED: EventSpec(logging.INFO, "A process of the fleet was started."),
    Event.PROCESS_NOT_STARTED: EventSpec(
        logging.ERROR, "A process of the fleet could not be started; it is tried again."
    ),
    Event.PROCESS_ENDED: EventSpec(
        logging.WARNING, "A process of the fleet ended; why, and when it is started again."
    ),
    Event.ENGINE_JOINED: EventSpec(
        logging.INFO, "An engine of another process reports to its worker what it holds."
    ),
    Event.ENGINE_LEFT: EventSpec(
        logging.WARNING, "An engine of another process is gone; what it reported is cleared."
    ),
    Event.ENGINE_REFUSED: EventSpec(logging.WARNING, "A connection to the engine door was refused."),
    Event.ENGINE_AWAITED: EventSpec(
        logging.INFO, "The engine that this worker is to be attached to does not answer yet."
    ),
    Event.ENGINE_ATTACHED: EventSpec(
        logging.INFO, "The engine of this worker: where it is, and what it reported of itself."
    ),
    Event.ENGINE_SILENT: EventSpec(
        logging.ERROR, "The engine of this worker does not answer: the worker takes no new requests."
    ),
    Event.ENGINE_ANSWERS: EventSpec(logging.INFO, "The engine of this worker answers again."),
    Event.ENGINE_POD_FOUND: EventSpec(
        logging.INFO,
        "A pod that is labelled as an engine is Ready: its engine is asked, and gets this worker.",
    ),
    Event.ENGINE_POD_GONE: EventSpec(
        logging.INFO, "A pod with an engine is gone: its worker lets running requests finish, and leaves."
    ),
    Event.ENGINE_POD_REFUSED: EventSpec(
        logging.ERROR,
        "A pod that is labelled as an engine gets no worker; what to fix. An event says it too.",
    ),
    Event.MOCK_ENDED: EventSpec(
        logging.INFO,
        "What mock engines did, as their process ends: KV carried between domains, pulls, connections that "
        "were refused, and how long their clock stood still on a machine too slow for them.",
    ),
    Event.MOCK_LINK_CHANGED: EventSpec(
        logging.INFO, "A link between mock engines changed, as the file of --events says: which, and to what."
    ),
    Event.CACHE_PARTIAL: EventSpec(
        logging.WARNING, "Some of an engine's KV events are lost for good: it holds more than is known."
    ),
    Event.KV_EVENTS_SKIPPED: EventSpec(
        logging.WARNING,
        "Some of an engine's KV events are not passed on: how many, by the reason. Logged at each new "
        "reason, and hourly while they become more.",
    ),
    Event.FEED_STATE: EventSpec(logging.INFO, "A rank's event stream is in another state."),
    Event.KV_EVENTS_MISSING: EventSpec(
        logging.WARNING, "A rank should publish KV events, and not even its heartbeats are heard."
    ),
    Event.RECOVERY_FAILED: EventSpec(
        logging.WARNING, "A worker was asked for KV events and did not give them; it is asked again."
    ),
    Event.INDEX_STORED: EventSpec(
        logging.INFO, "The index was stored for routers that start later, and the event stream purged."
    ),
    Event.INDEX_NOT_STORED: EventSpec(
        logging.WARNING, "The index could not be stored; the snapshot before it stays valid."
    ),
    Event.EVENTS_MISTAKEN: EventSpec(
        logging.WARNING, "A rank's KV events do not make sense; what it holds is asked for."
    ),
    Event.KV_EVENTS_OVER_LIMIT: EventSpec(
        logging.WARNING,
        "A rank reported more KV blocks than its worker can hold: nothing that it says counts for a minute, "
        "then it is asked for all of it.",
    ),
    Event.INDEX_WRONG: EventSpec(
        logging.WARNING,
        "An engine's own counts of cached tokens contradict the index: what it holds is asked for.",
    ),
    Event.PROMPT_SHAPE_BLIND: EventSpec(
        logging.WARNING,
        "Calls of one shape (route, roles, tools) are not found where their engine has them cached: it makes "
        "another prompt of them than the router.",
    ),
    Event.KV_TRANSFER_SLOW: EventSpec(
        logging.WARNING,
        "KV travels to a rank at less than a quarter of the speed that it has shown, by its engine's count.",
    ),
    Event.KV_TRANSFER_WELL: EventSpec(
        logging.INFO, "KV travels to a rank at half of the speed that it has shown, or faster, again."
    ),
    Event.RANK_SLOW: EventSpec(
        logging.WARNING,
        "A rank takes 1.5 times as long for a prompt as half of the ranks do, or longer: it gets less to do.",
    ),
    Event.RANK_WELL: EventSpec(logging.INFO, "A rank that was slow is about as fast as the others again."),
    Event.LINK_SLOW: EventSpec(
        logging.WARNING,
        "KV takes twice as long over a link, or over all of its kind, as it should, or longer: by the given "
        "links, what they have shown, or the others of their kind. It gets less to carry.",
    ),
    Event.LINK_WELL: EventSpec(logging.INFO, "A link that was slow is about as fast as it should be again."),
    Event.FRONTEND_MOVED: EventSpec(
        logging.INFO, "The frontend's topology files changed: prefill that keeps near it moves too."
    ),
    Event.LINKS_READ: EventSpec(
        logging.INFO,
        "The file of --router-links changed: decisions weigh what it says now, and links are learned from "
        "the beginning.",
    ),
    Event.LINKS_REFUSED: EventSpec(
        logging.WARNING,
        "The file of --router-links cannot be read, or is wrong: decisions weigh what it said last.",
    ),
    Event.LEARNED_NOT_READ: EventSpec(
        logging.WARNING,
        "The file of --router-learned-file cannot be read, or is wrong: links are learned from the "
        "beginning.",
    ),
    Event.LEARNED_NOT_KEPT: EventSpec(
        logging.WARNING, "The file of --router-learned-file cannot be written; it is tried again."
    ),
    Event.BUSY_THRESHOLD: EventSpec(logging.INFO, "A model's busy thresholds were set."),
    Event.ROUTING_HINT_IGNORED: EventSpec(
        logging.WARNING,
        "A routing hint of a request is unknown, or has no effect here; logged once for each name.",
    ),
    Event.HTTP_BAD_REQUEST: EventSpec(logging.INFO, "A client sent invalid or unsupported HTTP."),
    Event.HTTP_CONNECTIONS_FULL: EventSpec(
        logging.WARNING, "The limit of open connections is reached: a further one was answered 503."
    ),
    Event.HTTP_UPLOADS_FULL: EventSpec(
        logging.WARNING,
        "Requests that are arriving hold all the bytes that they may: the largest is refused.",
    ),
    Event.HTTP_CLIENT_LEFT: EventSpec(
        logging.INFO, "A connection was lost before its answer ended; whether it had started."
    ),
    Event.HTTP_CUT: EventSpec(logging.WARNING, "A connection was dropped with bytes that were not yet sent."),
    Event.HTTP_HANDLER_FAILED: EventSpec(
        logging.ERROR, "A request was not answered completely, because of a bug in kvrouter."
    ),
    Event.RECORDING: EventSpec(logging.INFO, "Traffic is recorded in this folder, by --record."),
    Event.RECORDING_DROPPED: EventSpec(
        logging.WARNING,
        "Records of traffic are dropped: too many wait to be written, or one could not be made, with the "
        "traceback, or is longer than all files may be. Logged at most once a minute for each reason.",
    ),
    Event.RECORDING_ENDED: EventSpec(
        logging.ERROR,
        "Nothing more is recorded until the next start: the disk is full or refused a write, or the file was "
        "removed. Requests are served as before.",
    ),
    Event.SPANS_NOT_SENT: EventSpec(
        logging.WARNING,
        "OpenTelemetry's SDK could not send spans of requests, or dropped some. Requests are served as "
        "before.",
    ),
    Event.INTERNAL_ERROR: EventSpec(logging.ERROR, "A bug in kvrouter, with its traceback."),
    Event.OPERATOR_LEADS: EventSpec(logging.INFO, "This replica of the operator got the lease: it writes."),
    Event.OPERATOR_FOLLOWS: EventSpec(
        logging.WARNING, "This replica of the operator no longer holds the lease, and writes nothing more."
    ),
    Event.OPERATOR_STANDS_BACK: EventSpec(
        logging.WARNING, "Another operator manages a deployment: this one does not touch it."
    ),
    Event.DEFINITION_FOREIGN: EventSpec(
        logging.WARNING,
        "The cluster's definition of DynamoGraphDeployment is not kvrouter's: the operator reads, judges and "
        "writes nothing. The reason says why, and `kvrouter operator preflight` the way out.",
    ),
    Event.DEFINITION_OWN: EventSpec(
        logging.INFO, "The cluster's definition of DynamoGraphDeployment is kvrouter's: the operator works."
    ),
    Event.LEASE_NOT_RENEWED: EventSpec(
        logging.WARNING, "The operator's lease could not be read or written; it is tried again."
    ),
    Event.CLUSTER_LOST: EventSpec(
        logging.WARNING,
        "Objects of this kind cannot be watched; what was seen of them last is kept. At the start it is "
        "logged once that lasts for 3 seconds: while a definition is new, an API server refuses its objects.",
    ),
    Event.CLUSTER_BACK: EventSpec(logging.INFO, "Objects of this kind can be watched again."),
    Event.API_SERVER_WARNS: EventSpec(
        logging.WARNING, "The API server did what the operator asked, and warns of it; each is logged once."
    ),
    Event.DEPLOYMENT_APPLIED: EventSpec(logging.INFO, "Objects of a deployment were written, or removed."),
    Event.DEPLOYMENT_FAILED: EventSpec(
        logging.WARNING, "Reconciling a deployment failed; it is retried after so many seconds."
    ),
    Event.EVENT_REFUSED: EventSpec(
        logging.WARNING, "The API server refused an event about a deployment, and it is dropped."
    ),
    Event.POD_LABELLED: EventSpec(
        logging.INFO, "A pod got its node's labels after it was bound, or other ones."
    ),
    Event.ADMISSION_REFUSED: EventSpec(logging.INFO, "A deployment was refused at its admission."),
    Event.ADMISSION_UNANSWERED: EventSpec(
        logging.WARNING,
        "A request to the admission server was not valid, or came when that was at its limit.",
    ),
    Event.CERTIFICATE_CHANGED: EventSpec(logging.INFO, "The admission server uses another certificate."),
    Event.CERTIFICATE_REFUSED: EventSpec(
        logging.ERROR, "The certificate's files changed and cannot be used; the previous one stays in use."
    ),
}


@dataclass(frozen=True, slots=True)
class EventLine:
    """A line as any handler shows it: the event, then ``key=value``; what could be misread is quoted."""

    event: str
    fields: Mapping[str, LogValue]

    def __str__(self) -> str:
        return self.event + "".join([f" {key}={_quoted(value)}" for key, value in self.fields.items()])


def cut(value: LogValue) -> LogValue:
    """Return ``value``, a text no longer than :data:`VALUE_MAX_CHARS`."""
    if isinstance(value, str) and len(value) > VALUE_MAX_CHARS:
        return value[:VALUE_MAX_CHARS] + "…"
    return value


def _quoted(value: LogValue) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(cut(value))
    if text and _PLAIN.issuperset(text):
        return text
    return msgspec.json.encode(text).decode()


def log_event(
    logger: logging.Logger,
    event: Event,
    *,
    exc_info: bool | BaseException | None = None,
    **fields: Unpack[Fields],
) -> None:
    """Log ``event`` with ``fields`` at the event's own level; free where that level is not written.

    ``exc_info`` is an error to be logged with its traceback, or True for the one that is being handled.
    Raises TypeError for a field that is not in :class:`Fields`: nothing else can reach a log.
    """
    level = EVENTS[event].level
    if not logger.isEnabledFor(level):
        return
    if not FIELD_NAMES.issuperset(fields):
        raise TypeError(f"no log field: {', '.join(sorted(set(fields) - FIELD_NAMES))}")
    line_fields = cast("Mapping[str, LogValue]", fields)
    logger.log(
        level,
        EventLine(event.value, line_fields),
        extra={"kvrouter_event": event.value, "kvrouter_fields": line_fields},
        exc_info=exc_info,
        stacklevel=2,
    )
