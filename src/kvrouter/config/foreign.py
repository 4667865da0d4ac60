"""Settings of Dynamo that have no effect here: each says why, and what there is instead.

A name with a value that asks for what is done anyway is taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvrouter.config.setting_spec import SettingKind, parse_switch

NOT_SET = ("", "none")
"""The texts with which a variable or a flag of Dynamo's says that it sets nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """One of Dynamo's settings: its field, flags and variables. ``met`` are the values with which it asks for
    what is done here anyway. ``section`` says with which settings its flag is listed; those of the router are
    fields of ``KvRouterConfig`` too.
    """

    name: str
    section: str = "router"
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    kind: SettingKind
    met: tuple[object, ...] = ()
    why: str

    @property
    def message(self) -> str:
        """What is said of it, after its name."""
        return f"has no effect here: {self.why}"

    def is_met_by(self, value: object) -> bool:
        """Whether ``value`` asks for nothing that is not done anyway."""
        return value is None or any(type(each) is type(value) and each == value for each in self.met)

    def is_met_by_text(self, text: str) -> bool:
        """Whether the text of a flag or a variable does."""
        text = text.strip()
        if text.lower() in NOT_SET:
            return True
        try:
            if self.kind is SettingKind.SWITCH:
                return self.is_met_by(parse_switch(text))
            if self.kind is SettingKind.WHOLE:
                return self.is_met_by(int(text))
            if self.kind is SettingKind.NUMBER:
                return self.is_met_by(float(text))
        except ValueError:
            return False
        return self.is_met_by(text)


def _router(
    name: str, kind: SettingKind, why: str, *met: object, older: tuple[str, str] | None = None
) -> Foreign:
    """A setting whose flag and variable follow from its field's name; ``older`` are those of another era."""
    stem = name.removeprefix("router_")
    flag, variable = f"--router-{stem.replace('_', '-')}", f"DYN_ROUTER_{stem.upper()}"
    return Foreign(
        name=name,
        flags=(flag,) if older is None else (flag, older[0]),
        variables=(variable,) if older is None else (variable, older[1]),
        kind=kind,
        met=met,
        why=why,
    )


def _plain(
    name: str,
    kind: SettingKind,
    why: str,
    *met: object,
    section: str = "router",
    flag: str | None = None,
    variable: str | None = None,
) -> Foreign:
    """A setting whose flag and variable are its name; ``flag`` and ``variable`` where they are not."""
    return Foreign(
        name=name,
        section=section,
        flags=(flag or f"--{name.replace('_', '-')}",),
        variables=(variable or f"DYN_{name.upper()}",),
        kind=kind,
        met=met,
        why=why,
    )


def _field(name: str, kind: SettingKind, why: str, *met: object) -> Foreign:
    """A field of ``KvRouterConfig`` that has no flag or variable of its own."""
    return Foreign(name=name, flags=(), variables=(), kind=kind, met=met, why=why)


def _variable(name: str, kind: SettingKind, why: str, *met: object, section: str) -> Foreign:
    """A variable that has no flag."""
    return Foreign(
        name=name.lower(), section=section, flags=(), variables=(name,), kind=kind, met=met, why=why
    )


_CREDIT = "one weight, --kv-overlap-score-weight, says what overlap is worth"
_TIERS = "only blocks on the GPU count as overlap"
_QUEUE = "waiting requests form one queue, which --admission-queue-max and --admission-wait-s bound"
_POLICIES = "the decision is one formula, and there are no policy classes"
_TRACKING = "routers agree on the blocks of requests by hashes that everybody may compute"
_SPLIT = "--router-pd-selection joint lets decode workers prefill short prompts for themselves"
_SESSIONS = "requests of one session are not kept together"
_INDEXERS = "every router keeps an index of its own, or none"
_BLOCK_SIZE = "each worker announces the size of its blocks"
_FRONT_TLS = (
    "the HTTP port has no TLS: terminate it at a proxy or an Ingress; --tls-cert is between processes"
)
_API = "the API is OpenAI's completions and chat completions, over HTTP"
_ENGINE_FIELDS = "engines that split off reasoning and tool calls name the fields and events themselves"
_TOKENIZERS = "prompts are tokenized by Hugging Face's tokenizers library"
_PROCESSOR = (
    "chats are rendered and tokenized in the router, long ones in threads: --tokenize-inline-max-chars"
)
_ONE_CERTIFICATE = "--tls-cert and --tls-key are shown in both directions, and to NATS"
_ONE_AUTHORITY = (
    "--tls-ca is the authority of all: clients, workers and NATS; both ends must show a certificate"
)
_VERIFIED = "certificates are always verified, with the name that the address has"
_PREDICTION = "AISimulate is not asked for predictions"
_PREDICTION_FIELDS = (
    "backend",
    "system",
    "backend_version",
    "tp_size",
    "model_path",
    "moe_tp_size",
    "moe_ep_size",
    "attention_dp_size",
    "nextn",
    "nextn_accept_rates",
    "mtp_seed",
)

FOREIGN: tuple[Foreign, ...] = (
    _router("router_queue_threshold", SettingKind.NUMBER, _QUEUE),
    _router("router_queue_policy", SettingKind.TEXT, _QUEUE, "fcfs"),
    _router("router_policy_config", SettingKind.TEXT, _POLICIES),
    _router("router_prefill_policy", SettingKind.TEXT, _POLICIES, "default"),
    _router("router_decode_policy", SettingKind.TEXT, _POLICIES, "default"),
    _router(
        "router_assume_kv_reuse",
        SettingKind.SWITCH,
        "cached blocks are always taken to be used again",
        True,
        older=("--assume-kv-reuse", "DYN_ASSUME_KV_REUSE"),
    ),
    _router(
        "router_track_output_blocks",
        SettingKind.SWITCH,
        "blocks of output always count as load where active blocks do",
        True,
        older=("--track-output-blocks", "DYN_TRACK_OUTPUT_BLOCKS"),
    ),
    Foreign(
        name="durable_kv_events",
        flags=("--router-durable-kv-events", "--durable-kv-events"),
        variables=("DYN_ROUTER_DURABLE_KV_EVENTS", "DYN_DURABLE_KV_EVENTS"),
        kind=SettingKind.SWITCH,
        met=(False,),
        why="each worker chooses how its KV events travel, by --event-plane jetstream",
    ),
    _router(
        "router_event_threads", SettingKind.WHOLE, "KV events are applied by the event loop, in steps", 1, 4
    ),
    _router("router_prefill_load_model", SettingKind.TEXT, "what waits for prefill counts in full", "none"),
    Foreign(
        name="prefill_load_scale",
        flags=("--router-prefill-load-scale",),
        variables=("DYN_ROUTER_PREFILL_LOAD_SCALE",),
        kind=SettingKind.NUMBER,
        met=(1.0,),
        why=_CREDIT,
    ),
    Foreign(
        name="overlap_score_credit",
        flags=("--router-kv-overlap-score-credit",),
        variables=("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",),
        kind=SettingKind.NUMBER,
        met=(1.0,),
        why=_CREDIT,
    ),
    Foreign(
        name="overlap_score_credit_decay",
        flags=("--router-kv-overlap-score-credit-decay",),
        variables=("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",),
        kind=SettingKind.NUMBER,
        met=(0.0,),
        why=_CREDIT,
    ),
    _router(
        "decode_active_request_weight", SettingKind.NUMBER, "load is counted in blocks, not in requests", 0.0
    ),
    _router("host_cache_hit_weight", SettingKind.NUMBER, _TIERS, 0.0),
    _router("disk_cache_hit_weight", SettingKind.NUMBER, _TIERS, 0.0),
    _plain("shared_cache_multiplier", SettingKind.NUMBER, _TIERS, 0.0),
    _plain("shared_cache_type", SettingKind.TEXT, _TIERS, "none"),
    _router(
        "router_predicted_ttl_secs", SettingKind.NUMBER, "where KV events are followed, no cache is predicted"
    ),
    _router(
        "router_approximate_cache_policy", SettingKind.TEXT, "predicted blocks end with their time", "ttl"
    ),
    _router("router_tracking_hash", SettingKind.TEXT, _TRACKING, "public-xxh3-v1"),
    _router("router_tracking_key_file", SettingKind.TEXT, _TRACKING),
    _router("router_tracking_key_id", SettingKind.TEXT, _TRACKING),
    _router("router_session_affinity_ttl_secs", SettingKind.NUMBER, _SESSIONS),
    _router("router_session_affinity_mode", SettingKind.TEXT, _SESSIONS),
    _plain("enable_session_prefix_index", SettingKind.SWITCH, _SESSIONS, False),
    _plain("use_remote_indexer", SettingKind.SWITCH, _INDEXERS, False),
    _plain("serve_indexer", SettingKind.SWITCH, _INDEXERS, False),
    Foreign(
        name="load_aware",
        flags=("--load-aware",),
        variables=("DYN_ROUTER_LOAD_AWARE",),
        kind=SettingKind.SWITCH,
        met=(False,),
        why="--kv-overlap-score-weight 0 leaves caches out of the decision, and the load of prefill too",
    ),
    Foreign(
        name="conditional_disagg_enabled",
        flags=("--router-conditional-disagg",),
        variables=("DYN_ROUTER_CONDITIONAL_DISAGG",),
        kind=SettingKind.SWITCH,
        met=(False,),
        why=_SPLIT,
    ),
    _router("conditional_disagg_config", SettingKind.TEXT, _SPLIT),
    _field("conditional_disagg_policy", SettingKind.TEXT, _SPLIT, "isl_bounding"),
    _field("conditional_disagg_eff_isl_threshold", SettingKind.WHOLE, _SPLIT, 2048),
    _field("conditional_disagg_eff_isl_ratio_threshold", SettingKind.NUMBER, _SPLIT, 0.7),
    _field("conditional_disagg_prefill_busy_threshold", SettingKind.NUMBER, _SPLIT),
    _field("conditional_disagg_decode_busy_threshold", SettingKind.NUMBER, _SPLIT),
    _plain(
        "enforce_disagg",
        SettingKind.SWITCH,
        "a decode worker serves whole requests where no prefill worker is there",
        False,
    ),
    _plain(
        "active_prefill_tokens_threshold_frac",
        SettingKind.NUMBER,
        "--active-prefill-tokens-threshold is a number of tokens",
    ),
    _plain("admission_control", SettingKind.TEXT, "the thresholds themselves switch it on", "token-capacity"),
    _plain("kv_cache_block_size", SettingKind.WHOLE, _BLOCK_SIZE),
    _plain("namespace_prefix", SettingKind.TEXT, "a router serves one namespace, --namespace"),
    _plain("migration_max_seq_len", SettingKind.WHOLE, "an answer of any length may go on elsewhere"),
    Foreign(
        name="router_block_size",
        section="frontend",
        flags=("--router-block-size", "--block-size"),
        variables=("DYN_ROUTER_BLOCK_SIZE",),
        kind=SettingKind.WHOLE,
        why=_BLOCK_SIZE,
    ),
    _plain(
        "endpoint",
        SettingKind.TEXT,
        "--namespace and --component say which workers a standalone router serves",
        section="frontend",
        variable="DYN_ROUTER_ENDPOINT",
    ),
    _plain("ais_perf_config", SettingKind.TEXT, _PREDICTION, section="frontend"),
    *(
        Foreign(
            name=f"ais_{name}",
            section="frontend",
            flags=tuple(f"--{era}-{name.replace('_', '-')}" for era in ("ais", "aic")),
            variables=tuple(f"DYN_{era}_{name.upper()}" for era in ("AIS", "AIC")),
            kind=SettingKind.TEXT,
            why=_PREDICTION,
        )
        for name in _PREDICTION_FIELDS
    ),
    _plain(
        "custom_backend_metrics_endpoint",
        SettingKind.TEXT,
        "workers publish their load themselves",
        section="frontend",
    ),
    _plain(
        "custom_backend_metrics_polling_interval",
        SettingKind.NUMBER,
        "workers publish their load themselves",
        section="frontend",
    ),
    _variable(
        "DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS",
        SettingKind.NUMBER,
        "the overlap of a waiting request is looked up when it is placed",
        section="frontend",
    ),
    _variable(
        "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
        SettingKind.NUMBER,
        "a booking ends with its request, at the latest after --request-timeout-s; that of "
        "`kvrouter router`, after --lease-ttl-s",
        section="frontend",
    ),
    _variable(
        "DYN_ENCODER_CUDA_TO_CPU_RATIO",
        SettingKind.NUMBER,
        "there is no device-aware router mode",
        section="frontend",
    ),
    _plain("tls_cert_path", SettingKind.TEXT, _FRONT_TLS, section="frontend"),
    _plain("tls_key_path", SettingKind.TEXT, _FRONT_TLS, section="frontend"),
    _plain("tls_client_ca_cert_path", SettingKind.TEXT, _FRONT_TLS, section="frontend"),
    _plain("interactive", SettingKind.SWITCH, "send requests to --http-port", False, section="frontend"),
    _plain("model_name", SettingKind.TEXT, "workers announce the models that they serve", section="frontend"),
    _variable(
        "DYN_MODEL_PATH", SettingKind.TEXT, "a tokenizer is --model-path MODEL=FOLDER", section="frontend"
    ),
    _plain(
        "metrics_prefix",
        SettingKind.TEXT,
        "every metric's name begins with kvrouter_",
        "kvrouter",
        section="frontend",
    ),
    _plain("kserve_grpc_server", SettingKind.SWITCH, _API, False, section="frontend"),
    _plain(
        "grpc_metrics_port",
        SettingKind.WHOLE,
        "metrics are at /metrics of --http-port",
        8788,
        section="frontend",
    ),
    _plain("dump_config_to", SettingKind.TEXT, "the settings are written to no file", section="frontend"),
    _plain(
        "frontend_route_extension",
        SettingKind.TEXT,
        "routes cannot be added",
        section="frontend",
        variable="DYN_FRONTEND_ROUTE_EXTENSIONS",
    ),
    _plain("enable_anthropic_api", SettingKind.SWITCH, _API, False, section="frontend"),
    _plain("strip_anthropic_preamble", SettingKind.SWITCH, _API, True, section="frontend"),
    _plain("enable_streaming_tool_dispatch", SettingKind.SWITCH, _ENGINE_FIELDS, False, section="frontend"),
    _plain(
        "enable_streaming_reasoning_dispatch", SettingKind.SWITCH, _ENGINE_FIELDS, False, section="frontend"
    ),
    _plain("reasoning_field_name", SettingKind.TEXT, _ENGINE_FIELDS, "reasoning_content", section="frontend"),
    _plain(
        "exclude_tools_when_tool_choice_none",
        SettingKind.SWITCH,
        "tools are left to engines that take calls as clients wrote them",
        True,
        section="frontend",
    ),
    _plain(
        "chat_processor",
        SettingKind.TEXT,
        _PROCESSOR,
        "dynamo",
        section="frontend",
        flag="--dyn-chat-processor",
    ),
    _plain(
        "debug_perf",
        SettingKind.SWITCH,
        "/metrics has the times",
        False,
        section="frontend",
        flag="--dyn-debug-perf",
    ),
    _plain(
        "preprocess_workers",
        SettingKind.WHOLE,
        _PROCESSOR,
        0,
        section="frontend",
        flag="--dyn-preprocess-workers",
    ),
    _plain(
        "tokenizer_backend",
        SettingKind.TEXT,
        _TOKENIZERS,
        "default",
        section="frontend",
        flag="--tokenizer",
        variable="DYN_TOKENIZER",
    ),
    _plain("tokenizer_fallback", SettingKind.SWITCH, _TOKENIZERS, True, False, section="frontend"),
    _plain("trust_remote_code", SettingKind.SWITCH, "no code of a model is run", False, section="frontend"),
    _variable(
        "DYN_HTTP_BODY_LIMIT_MB",
        SettingKind.NUMBER,
        "--body-max-bytes is the largest body, in bytes",
        section="frontend",
    ),
    _variable(
        "DYN_HTTP_OVERLOAD_STATUS_CODES",
        SettingKind.TEXT,
        "overload is always 503 with Retry-After",
        section="frontend",
    ),
    _variable(
        "DYN_LOG", SettingKind.TEXT, "--log-level is the level of all logs", "info", section="frontend"
    ),
    _variable(
        "DYN_LOGGING_JSONL",
        SettingKind.SWITCH,
        "--log-format json writes a JSON object for each line",
        False,
        section="frontend",
    ),
    _plain(
        "response_plane", SettingKind.TEXT, "answers return over --request-plane", "tcp", section="planes"
    ),
    _plain("store_kv", SettingKind.TEXT, "--discovery says where workers are announced", section="planes"),
    _variable("DYN_FILE_KV", SettingKind.TEXT, "--discovery-dir is the directory", section="planes"),
    _variable("ETCD_ENDPOINTS", SettingKind.TEXT, "etcd is not used: --discovery", section="planes"),
    _plain("tcp_tls_client_cert_path", SettingKind.TEXT, _ONE_CERTIFICATE, section="planes"),
    _plain("tcp_tls_client_key_path", SettingKind.TEXT, _ONE_CERTIFICATE, section="planes"),
    _plain("tcp_tls_client_ca_cert_path", SettingKind.TEXT, _ONE_AUTHORITY, section="planes"),
    _plain("tcp_tls_insecure", SettingKind.SWITCH, _VERIFIED, False, section="planes"),
    _plain("tcp_tls_server_name", SettingKind.TEXT, _VERIFIED, section="planes"),
    _plain(
        "tcp_tls_handshake_timeout",
        SettingKind.WHOLE,
        "--hello-within-s bounds the handshake",
        section="planes",
        variable="DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS",
    ),
    _plain(
        "nats_tls_ca_cert_path",
        SettingKind.TEXT,
        _ONE_AUTHORITY,
        section="planes",
        variable="NATS_TLS_CA_CERT_PATH",
    ),
    _plain(
        "nats_tls_insecure",
        SettingKind.SWITCH,
        _VERIFIED,
        False,
        section="planes",
        variable="NATS_TLS_INSECURE",
    ),
    _plain(
        "nats_tls_client_cert_path",
        SettingKind.TEXT,
        _ONE_CERTIFICATE,
        section="planes",
        variable="NATS_TLS_CLIENT_CERT_PATH",
    ),
    _plain(
        "nats_tls_client_key_path",
        SettingKind.TEXT,
        _ONE_CERTIFICATE,
        section="planes",
        variable="NATS_TLS_CLIENT_KEY_PATH",
    ),
    _variable("DYN_SYSTEM_PORT", SettingKind.WHOLE, "--health-port is a worker's", -1, section="planes"),
    _variable("DYN_TCP_RPC_HOST", SettingKind.TEXT, "--listen-host is a worker's address", section="planes"),
    _variable("DYN_TCP_RPC_PORT", SettingKind.WHOLE, "--listen-port is a worker's port", 0, section="planes"),
    _variable(
        "DYN_EVENT_PLANE_HOST",
        SettingKind.TEXT,
        "--advertise-host is the name under which others reach a worker",
        section="planes",
    ),
)
"""All of them, by what they are about."""

_LOAD_MODES = "mode kv with --kv-overlap-score-weight 0 decides by the load of decode alone"

FOREIGN_MODES: Mapping[str, str] = {
    "direct": "a request names its worker in nvext, in every mode: backend_instance_id",
    "least-loaded": _LOAD_MODES,
    "power-of-two": _LOAD_MODES,
    "device-aware-weighted": "workers are not weighted by their device",
}
"""Dynamo's router modes that are none here, and what there is instead."""

FOREIGN_DISCOVERY: Mapping[str, str] = {
    "etcd": "workers are announced in NATS, a directory or Kubernetes",
    "mem": "`kvrouter up` runs a fleet in one process",
}
"""Dynamo's discovery backends that are none here, and what there is instead."""


FOREIGN_VARIABLES: Mapping[str, Foreign] = {
    variable: foreign for foreign in FOREIGN for variable in foreign.variables
}
FOREIGN_FIELDS: Mapping[str, Foreign] = {
    foreign.name: foreign for foreign in FOREIGN if foreign.section == "router"
}
