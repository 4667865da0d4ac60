"""The settings tree: every setting of ``kvrouter up``, each written once."""

from enum import StrEnum
from typing import Annotated

from annotated_types import Interval, MinLen

from kvrouter.settings.planes import PlaneSettings
from kvrouter.settings.recording_settings import RecordingSettings
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.setting import (
    Count,
    HostName,
    NonNegative,
    Positive,
    PositiveCount,
    Secret,
    Section,
    Setting,
    Whole,
    settings_of,
)
from kvrouter.settings.setting_spec import Aliases, SettingGroup, SettingSpec


class LogLevel(StrEnum):
    """The least important log line that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a log line looks: for eyes, or for machines."""

    TEXT = "text"
    JSON = "json"


class UnknownNvext(StrEnum):
    """What becomes of a field of ``nvext`` that is not known here."""

    REFUSE = "refuse"
    IGNORE = "ignore"


class TokenizeFallback(StrEnum):
    """What tokenizes prompts of which this router makes no tokens, or others than the engine."""

    NONE = "none"
    ENGINE = "engine"


class AdminAccess(StrEnum):
    """Who may ask the admin routes where there is no token."""

    OPEN = "open"
    CLOSED = "closed"


class FrontendSettings(Section):
    """The frontend: where it listens, and the limits of what it takes."""

    http_host: Annotated[HostName, Setting(SettingGroup.FRONTEND, variable="DYN_HTTP_HOST")] = "127.0.0.1"
    """The address to listen on. 0.0.0.0 listens on every interface: set an admin token then."""

    http_port: Annotated[
        Annotated[Whole, Interval(ge=0, le=65535)], Setting(SettingGroup.FRONTEND, variable="DYN_HTTP_PORT")
    ] = 8000
    """The port to listen on. At 0 the system picks a free one, which is logged."""

    admin_token: Annotated[Secret | None, Setting(SettingGroup.FRONTEND, has_flag=False)] = None
    """The bearer token that the admin routes ask for. Unset: admin_routes says whether they are open. It has
    no flag, because the list of processes shows flags."""

    admin_routes: Annotated[AdminAccess, Setting(SettingGroup.FRONTEND, variable="DYN_ADMIN_ROUTES")] = (
        AdminAccess.OPEN
    )
    """Who may ask the admin routes while no admin token is set. open: any client that reaches the port.
    closed: nobody, they answer 401."""

    cors_origins: Annotated[str | None, Setting(SettingGroup.FRONTEND)] = None
    """Pages of which origins may call from a browser: with commas, as https://chat.example.com, or * for all.
    Unset: none. Programs that reach the port need no leave."""

    allowed_hosts: Annotated[str | None, Setting(SettingGroup.FRONTEND)] = None
    """Names, with commas, by which browsers may reach the routes that change or show the fleet while the
    frontend listens on a loopback address and no admin token is set; * for any. Addresses and localhost need
    not be named. Clients' calls may come by any name."""

    unknown_nvext: Annotated[UnknownNvext, Setting(SettingGroup.FRONTEND)] = UnknownNvext.REFUSE
    """What becomes of a request with a field of ``nvext`` that is not known here, or has no effect: a 400
    that names the field, or it is left out, and the log says so once. Taints and overrides must be spelt
    right either way."""

    tenant_priorities: Annotated[Annotated[str, MinLen(1)] | None, Setting(SettingGroup.FRONTEND)] = None
    """The priorities of tenants, by their `cache_salt` or `x-tenant-id`: JSON with what requests state in
    `agent_hints`, `{"gold": {"strict_priority": 1}, "batch": {"priority": -60}}`, or the path of a file with
    that in YAML. It counts instead of what a tenant's requests state; `*` stands for all other requests.
    Unset: each request's own counts."""

    body_max_bytes: Annotated[PositiveCount | None, Setting(SettingGroup.FRONTEND, unit="bytes")] = None
    """The largest request body; a larger one is answered with 413. Unset: what a prompt for the longest
    context of the models here can need, at most 64 MiB; 64 MiB where engines take calls as clients wrote
    them, which may hold images."""

    uploads_max_bytes: Annotated[PositiveCount, Setting(SettingGroup.FRONTEND, unit="bytes")] = (
        512 * 1024 * 1024
    )
    """What all requests that are still arriving, or wait on their connection, may hold together. When it is
    full the largest of them is answered with 503 `uploads_full`. Not below the largest body."""

    upload_min_bytes_per_s: Annotated[Positive, Setting(SettingGroup.FRONTEND, unit="bytes per second")] = (
        64 * 1024.0
    )
    """How fast the body of a request must arrive once its timeout is used up. A slower one is answered with
    408 `upload_too_slow`."""

    body_max_depth: Annotated[PositiveCount, Setting(SettingGroup.FRONTEND, unit="levels")] = 64
    """How deep lists and objects of a body may stand inside each other. A body over this bound, or over
    one of the four that follow, is answered with 400."""

    body_max_values: Annotated[PositiveCount, Setting(SettingGroup.FRONTEND, unit="values")] = 65_536
    """How many values a body may hold in all: texts, numbers, lists, objects. Token ids of a prompt do not
    count."""

    body_max_items: Annotated[PositiveCount, Setting(SettingGroup.FRONTEND, unit="elements")] = 8_192
    """How many elements one list of a body, or fields one of its objects, may have. Token ids of a prompt do
    not count."""

    body_max_token_ids: Annotated[PositiveCount | None, Setting(SettingGroup.FRONTEND, unit="tokens")] = None
    """How many token ids the prompts of a body may hold. Unset: as many as the longest context of the models
    here, at least 262,144."""

    body_max_text_bytes: Annotated[PositiveCount, Setting(SettingGroup.FRONTEND, unit="bytes")] = (
        16 * 1024 * 1024
    )
    """How long the texts of a body may be in all: as JSON has them, or as they are held in memory, if that is
    more (one wide character, such as an emoji, makes four bytes of each character of its text). Texts that
    are plain ASCII without line breaks and quotes, as images are, do not count."""

    header_max_bytes: Annotated[
        Annotated[Whole, Interval(ge=1024, le=1024 * 1024)], Setting(SettingGroup.FRONTEND, unit="bytes")
    ] = 64 * 1024
    """The largest head of a request: its first line and all headers."""

    connections_max: Annotated[PositiveCount | None, Setting(SettingGroup.FRONTEND, unit="connections")] = (
        None
    )
    """How many connections may be open; further ones are answered with 503. Fewer where the limit of open
    files (`ulimit -n`) has no room for them and for the connections to workers: the log warns of that. Unset:
    as many as there is room for, at most 16,384; the log says how many."""

    pipelined_requests_max: Annotated[PositiveCount, Setting(SettingGroup.FRONTEND, unit="requests")] = 8
    """How many requests one connection may send ahead; then its reading pauses."""

    header_timeout_s: Annotated[Positive, Setting(SettingGroup.FRONTEND, unit="seconds")] = 10.0
    """How long the head of a request may take to arrive once it has begun."""

    body_timeout_s: Annotated[Positive, Setting(SettingGroup.FRONTEND, unit="seconds")] = 30.0
    """How long the body of a request may stand still, or come more slowly than it must."""

    idle_timeout_s: Annotated[Positive, Setting(SettingGroup.FRONTEND, unit="seconds")] = 75.0
    """How long a connection may stay without a request."""

    sse_keep_alive_s: Annotated[NonNegative, Setting(SettingGroup.FRONTEND, unit="seconds")] = 0.0
    """How long a stream may stay without a byte before a comment is written to it, which clients skip and
    proxies count, also while its request waits for a worker. What fails behind a comment is the stream's last
    event, and no status. At 0 none is written; those of engines pass always."""

    write_stall_s: Annotated[Positive, Setting(SettingGroup.FRONTEND, unit="seconds")] = 60.0
    """How long a client may leave its stream unread before it is cut off."""

    write_high_water_bytes: Annotated[PositiveCount, Setting(SettingGroup.FRONTEND, unit="bytes")] = 64 * 1024
    """With more than this unsent on one connection, its stream pauses."""

    write_low_water_bytes: Annotated[Count, Setting(SettingGroup.FRONTEND, unit="bytes")] = 16 * 1024
    """With no more than this unsent, a paused stream goes on. Below the high water mark."""

    write_overflow_bytes: Annotated[PositiveCount, Setting(SettingGroup.FRONTEND, unit="bytes")] = 1024 * 1024
    """With more than this unsent although its stream is paused, a client is cut off. Above the high water
    mark."""

    tokenize_inline_max_chars: Annotated[Count | None, Setting(SettingGroup.FRONTEND, unit="characters")] = (
        None
    )
    """Longer prompts are tokenized in a thread, so that streams do not wait for them. Unset: 16,384 with a
    fast encoder, else 8,192; ``tokenized_slowly`` in the log names the models without one."""

    token_max_chars: Annotated[PositiveCount | None, Setting(SettingGroup.FRONTEND, unit="characters")] = None
    """How many characters of a prompt one token is counted on to hold: a text that is longer than the context
    can hold is refused before it is tokenized. Unset: those of the longest token of the vocabulary, and 128
    where a token can stand for any number of them."""

    tokenize_max_bytes: Annotated[PositiveCount, Setting(SettingGroup.FRONTEND, unit="bytes")] = (
        512 * 1024 * 1024
    )
    """The memory that tokenizing may hold, all threads together, counted for each byte of text as the
    tokenizer normalizes it: 128 bytes with a fast encoder and up to 262,144 characters, else 512. Longer
    texts wait for each other; one that needs more by itself is answered with 413. A model whose context holds
    a longer text, at 4 bytes a token, is logged once: 1,000,000 tokens need 2,048,000,000."""

    tokenize_waiting_max: Annotated[Count, Setting(SettingGroup.FRONTEND, unit="prompts")] = 256
    """How many long prompts may wait to be tokenized; one more is answered with 503."""

    tokenize_wait_s: Annotated[Positive, Setting(SettingGroup.FRONTEND, unit="seconds")] = 10.0
    """How long a prompt may wait to be tokenized before it is answered with 503."""

    tokenize_fallback: Annotated[TokenizeFallback, Setting(SettingGroup.FRONTEND)] = TokenizeFallback.NONE
    """With ``engine`` a model's engines are asked at ``/tokenize`` for the tokens of prompts that cannot be
    made here, and of calls whose shape is found to get another prompt from its engine. With ``none`` such
    calls are routed by load. ``tokenizer: engine`` has all prompts of one model tokenized so."""

    tokenize_engine_wait_s: Annotated[Positive, Setting(SettingGroup.FRONTEND, unit="seconds")] = 0.25
    """How long a call waits for its engine's ``/tokenize``; then it is routed by load."""

    drain_limit_s: Annotated[
        NonNegative,
        Setting(
            SettingGroup.FRONTEND,
            unit="seconds",
            aliases=Aliases(variables=("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",)),
        ),
    ] = 30.0
    """After SIGTERM no new requests are taken; running ones may finish within this time, then they are
    cut."""


class LogSettings(Section):
    """What is logged, and how it looks."""

    log_level: Annotated[LogLevel, Setting(SettingGroup.LOGS)] = LogLevel.INFO
    """The least important line that is written. At ``info`` each request is one line; ``debug`` adds one for
    each decision."""

    log_format: Annotated[LogFormat, Setting(SettingGroup.LOGS)] = LogFormat.TEXT
    """How a line looks. Prompts and answers are never logged."""


class Settings(Section):
    """The whole tree. A key of YAML is ``<section>.<name>``."""

    frontend: FrontendSettings = FrontendSettings()
    """The frontend."""

    router: KvRouterConfig = KvRouterConfig()
    """The router."""

    planes: PlaneSettings = PlaneSettings()
    """What lies between processes."""

    recording: RecordingSettings = RecordingSettings()
    """The recording of traffic."""

    log: LogSettings = LogSettings()
    """The logs."""


SETTINGS: tuple[SettingSpec, ...] = (
    *settings_of("router", KvRouterConfig),
    *settings_of("frontend", FrontendSettings),
    *settings_of("planes", PlaneSettings),
    *settings_of("recording", RecordingSettings),
    *settings_of("log", LogSettings),
)
"""Every setting, in the order in which ``--help`` and the documentation list them."""
