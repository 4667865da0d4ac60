"""The engines of the fleet file: mock engines, and those that run already."""

import re
from collections.abc import Mapping
from enum import StrEnum
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import urlsplit

from annotated_types import MaxLen, MinLen
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from kvrouter.core.hosts import is_resolvable
from kvrouter.core.workers import KV_PART_MAX_CHARACTERS
from kvrouter.engines.mock_engine.config import EngineHashing, KvLoadFailurePolicy
from kvrouter.engines.registry import ENGINES
from kvrouter.settings.setting import (
    HIDDEN_VALUE,
    Finite,
    FleetPart,
    NonNegative,
    Positive,
    PositiveCount,
    Switch,
)
from kvrouter.settings.variables import ENGINE_KEY_VARIABLE, ENGINE_KEYS_PREFIX, OUR_PREFIX

MOCK: Final = "mock"
"""The default kind of engine."""

MOCK_BLOCK_SIZE = 64
"""The default number of tokens in one KV block of mock engines."""

MOCK_CONTEXT_LENGTH = 32_768
"""The default number of tokens of prompt and answer together that mock engines take."""

HandshakeText = Annotated[str, StringConstraints(strip_whitespace=True, max_length=KV_PART_MAX_CHARACTERS)]

URLS_MAX = 1024
"""How many engines one group may have."""


ATTACHED_KINDS = tuple(ENGINES)
"""The kinds of engines that run already."""

if TYPE_CHECKING:
    AttachedKind = str
else:
    AttachedKind = Literal[ATTACHED_KINDS]


class HandoffKind(StrEnum):
    """How a decode worker learns where the KV of a prefill waits."""

    BOOTSTRAP = "bootstrap"
    SYNCHRONOUS = "synchronous"


class MockTiming(FleetPart):
    """The timing formula of a mock engine, in milliseconds.

    Computing t prompt tokens takes ``prefill_quadratic·t² + prefill_linear·t + prefill_base``, decoding one
    token for every running request ``max(decode_min, decode_quadratic·u² + decode_linear·u + decode_base)``,
    where u is the share of KV blocks in use; a step takes the sum of what it does. The figures are those of
    Dynamo's mocker (vLLM backend) as observed in ai-dynamo-runtime 1.6.1. Those that are 0 are for engines
    that were measured: ``kvrouter calibrate`` sets them.
    """

    prefill_quadratic: NonNegative = 4.209989e-7
    """Milliseconds for each squared prompt token of a step."""

    prefill_linear: NonNegative = 1.518344e-2
    """Milliseconds for each prompt token of a step."""

    prefill_base: NonNegative = 16.50142
    """Milliseconds for a step that prefills anything."""

    prefill_attention: NonNegative = 0.0
    """Milliseconds for each pair of a prompt token of a step and one that it attends to."""

    decode_quadratic: Finite = -25.74
    """Milliseconds for the squared share of blocks in use."""

    decode_linear: Finite = 54.01
    """Milliseconds for the share of blocks in use."""

    decode_base: Finite = 5.74
    """Milliseconds for a step that decodes anything."""

    decode_min: Positive = 1.0
    """Milliseconds that a step that decodes takes at least, apart from the figures below."""

    decode_sequence: NonNegative = 0.0
    """Milliseconds for each request that decodes in a step."""

    decode_kv_token: NonNegative = 0.0
    """Milliseconds for each token of KV that these requests have."""

    mixed_kv_token: NonNegative = 0.0
    """Milliseconds more for each of these tokens, in a step that prefills too."""


class MockEngineSpec(FleetPart):
    """A mock engine: an engine without a GPU, with the batching, the cache and the timing of a real one."""

    kind: Literal["mock"] = MOCK
    """Which engine it is."""

    total_kv_blocks: PositiveCount = 16_384
    """KV blocks of one data-parallel rank."""

    max_num_seqs: PositiveCount = 256
    """Sequences in one batch."""

    max_num_batched_tokens: PositiveCount = 8192
    """New tokens in one step."""

    max_waiting_seqs: PositiveCount = 4096
    """Sequences that wait for the batch; more are refused."""

    kv_bytes_per_token: PositiveCount = 131_072
    """Bytes of KV for one token; 131,072 is an 8 B model with grouped-query attention in 16 bits."""

    prefix_caching: Switch = True
    """Keep the blocks of finished requests for later ones."""

    chunked_prefill: Switch = True
    """Prefill long prompts over several steps."""

    async_scheduling: Switch = False
    """Plan a step when the one before it begins, as vLLM does by default since 0.14."""

    kv_events: Switch = True
    """Publish KV events."""

    engine_hashing: EngineHashing = EngineHashing.DETERMINISTIC
    """What it calls its blocks in KV events."""

    handoff: HandoffKind = HandoffKind.BOOTSTRAP
    """How prefill and decode meet; read on prefill workers."""

    kv_load_failure_policy: KvLoadFailurePolicy = KvLoadFailurePolicy.FAIL
    """What a decode leg does when its KV is lost."""

    kv_wait_expiry_s: Positive = 60.0
    """How long finished KV waits to be fetched: on the clock that speedup drives, and on the real one."""

    bidirectional_kv: Switch = False
    """Prefill workers fetch from decode workers: set it on both, with the handoff synchronous."""

    handshake: HandshakeText = ""
    """What it compares before it fetches KV, such as a version: engines that differ refuse each other."""

    eos_every: PositiveCount | None = None
    """Makes one token in about so many the end of an answer. Unset: answers end by their length alone."""

    timing: MockTiming = MockTiming()
    """How long its steps take."""


def url_mistake(url: str) -> str | None:
    """Return what the URL of an engine's server must be, if ``url`` is invalid."""
    if "@" in url.partition("://")[2].partition("/")[0]:
        return f"must name no user: a key goes into {ENGINE_KEY_VARIABLE}"
    placeholder = _PLACEHOLDER.search(url)
    if placeholder is not None:
        return _placeholder_mistake(placeholder)
    try:
        parts = urlsplit(url)
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_place = False
    if not has_place or parts.scheme not in {"http", "https"}:
        return "must be http://HOST:PORT, or https"
    if not is_host(parts.hostname or ""):
        return "must be http://HOST:PORT, or https, with a host's name or address"
    for mark in "?#":
        if mark in url:
            return f"must be the server's own URL, without {mark} and what follows it"
    if any(character.isspace() for character in url):
        return "must have no blanks"
    if parts.path.rstrip("/").endswith("/v1"):
        return "must be the server's own URL, without /v1"
    return None


def is_host(host: str) -> bool:
    """Whether ``host`` can be the name or the address of a host, with a zone or without."""
    if ":" not in host:
        return _HOST.fullmatch(host) is not None and is_resolvable(host)
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _placeholder_mistake(placeholder: re.Match[str]) -> str:
    text = placeholder[0]
    fills_none = ", because nothing here fills in variables" if text.startswith(("$", "%", "{")) else ""
    return f"must have the host or port itself where it has the placeholder {text}{fills_none}"


_PLACEHOLDER = re.compile(
    r"\$\{[^}]*\}?|\$\([^)]*\)?|\$\w+|\{\{[^}]*\}*|%[A-Za-z_]{3,}%|<[^>]*>?|\{\w*\}|:PORT\b"
)
"""A part of an address that is to be filled in, in the forms of shells, templates and pages."""

_HOST = re.compile(r"[^\W_]([\w.-]*\w)?\.?")
"""A name by DNS or of a container, whose letters may be of any script, or an IPv4 address."""


def _check_url(url: str) -> str:
    mistake = url_mistake(url)
    if mistake is not None:
        raise PydanticCustomError("url", mistake)
    return url.rstrip("/")


def _check_endpoint(endpoint: str) -> str:
    placeholder = _PLACEHOLDER.search(endpoint)
    if placeholder is not None:
        raise PydanticCustomError("endpoint", _placeholder_mistake(placeholder))
    base, _, port = endpoint.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    host = base.removeprefix("tcp://")
    if not base.startswith("tcp://") or not is_host(host.removeprefix("[").removesuffix("]")) or not is_port:
        raise PydanticCustomError("endpoint", "must be tcp://HOST:PORT")
    return endpoint


def _check_variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise PydanticCustomError(HIDDEN_VALUE, "must be the name of a variable, and not the key itself")
    if name.startswith(OUR_PREFIX) and not f"{name}_".startswith(ENGINE_KEYS_PREFIX):
        must = f"{ENGINE_KEYS_PREFIX}NAME, or a name without {OUR_PREFIX}, which settings have"
        raise PydanticCustomError("variable", f"must be {must}")
    return name


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

EngineUrl = Annotated[str, MaxLen(2048), AfterValidator(_check_url)]
EventEndpoint = Annotated[str, MaxLen(2048), AfterValidator(_check_endpoint)]


class AttachedEngineSpec(FleetPart):
    """An engine that runs already: its image and its command stay as they are. Its model, block size,
    context length, ranks and event sources are asked of it; what the file says of these is checked. The key
    that it asks for is never in the file: it is in ``KVROUTER_ENGINE_API_KEY``, or, for engines with keys of
    their own, where ``api_key_env`` or ``api_key_file`` says.
    """

    kind: AttachedKind
    """Which engine it is."""

    url: EngineUrl | None = None
    """Its server: ``http://10.0.0.7:8000``. Required, unless there are ``urls``."""

    urls: Annotated[tuple[EngineUrl, ...], MinLen(1), MaxLen(URLS_MAX)] | None = None
    """The servers of engines that are alike, instead of ``url``: one worker for each."""

    kv_events: Switch = True
    """Listen to its KV events."""

    kv_events_endpoint: EventEndpoint | None = None
    """Where rank 0 publishes its KV events, ``tcp://HOST:PORT``; each further rank has the next port. Unset:
    the engine is asked."""

    kv_events_replay_endpoint: EventEndpoint | None = None
    """Where rank 0 replays them; together with ``kv_events_endpoint``."""

    api_key_env: Annotated[str, MaxLen(256), AfterValidator(_check_variable)] | None = None
    """The environment variable with the key of these engines, such as ``KVROUTER_ENGINE_API_KEY_A``; of the
    process that runs their workers. Unset: ``KVROUTER_ENGINE_API_KEY``."""

    api_key_file: Annotated[str, MinLen(1), MaxLen(4096)] | None = None
    """The file with that key, one line, on the host of that process; instead of ``api_key_env``."""

    @property
    def all_urls(self) -> tuple[str, ...]:
        """The servers, one for each worker."""
        return self.urls or (() if self.url is None else (self.url,))


def _mock_unless_named(engine: object) -> object:
    return {"kind": MOCK, **engine} if isinstance(engine, Mapping) and "kind" not in engine else engine


EngineSpec = Annotated[
    MockEngineSpec | AttachedEngineSpec, Field(discriminator="kind"), BeforeValidator(_mock_unless_named)
]
"""One engine of the file; ``kind`` says which."""
