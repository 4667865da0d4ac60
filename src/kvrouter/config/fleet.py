"""The fleet file: models, topology, transfer policy, workers and settings of one ``kvrouter up``."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

from annotated_types import Interval, MaxLen, MinLen
from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints
from pydantic_core import PydanticCustomError

from kvrouter.config.planes import PlaneSettings
from kvrouter.config.router import KvRouterConfig
from kvrouter.config.setting import Finite, Fraction, NonNegative, Positive, PositiveCount, Switch, Whole
from kvrouter.config.tree import FrontendSettings, LogSettings
from kvrouter.core.workers import Enforcement, Role
from kvrouter.mock import EngineHashing, KvLoadFailurePolicy
from kvrouter.topology import ACROSS_LINK, SAME_LEVEL_LINK, Link

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError("name", "must be letters, digits and ._/- between letters or digits")
    return name


def _check_domain_name(name: str) -> str:
    if not _DOMAIN.fullmatch(name):
        raise PydanticCustomError("domain", "must be lower-case letters, digits and dashes")
    return name


Name = Annotated[str, MaxLen(253), AfterValidator(_check_name)]
"""What a model or a group of workers is called."""

DomainName = Annotated[str, MaxLen(63), AfterValidator(_check_domain_name)]
"""What a topology domain is called: the form that Kubernetes accepts."""

DomainValue = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=189)]
TaintText = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=253)]

TopologyVariable = Literal[
    "DYN_TOPOLOGY_ENABLED",
    "DYN_TOPOLOGY_MOUNT_PATH",
    "DYN_TOPOLOGY_LEVELS",
    "DYN_TOPOLOGY_POLL_S",
    "DYN_TOPOLOGY_TIMEOUT_S",
    "DYN_KV_TRANSFER_DOMAIN",
    "DYN_KV_TRANSFER_ENFORCEMENT",
    "DYN_KV_TRANSFER_PREFERRED_WEIGHT",
    "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL",
]
"""The variables of a worker's topology contract."""

REPLICAS_MAX = 1024
"""How many workers one group may have."""


class _Part(BaseModel):
    """A part of the fleet file: frozen, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


class ModelSpec(_Part):
    """A model that the fleet serves."""

    name: Name
    """What clients put into ``model``."""

    tokenizer: Annotated[str, MinLen(1)] = "mock"
    """``mock``, or a folder with ``tokenizer.json`` and ``tokenizer_config.json``."""

    block_size: Annotated[Whole, Interval(ge=1, le=4096)] = 64
    """Tokens in one KV block, on every worker of the model."""

    context_length: Annotated[Whole, Interval(ge=1, le=16_777_216)] = 32_768
    """Tokens of prompt and answer together; a longer prompt is refused."""


class LinkSpec(_Part):
    """One link: seconds until the first byte, and bytes a second from then on, shared by its transfers."""

    latency_s: NonNegative
    """Seconds until the first byte arrives."""

    bandwidth_bytes_per_s: Positive
    """Bytes a second, for all transfers on the link together."""


class PairLink(LinkSpec):
    """The link between two values of one level; it wins over the links of levels."""

    level: DomainName
    """The level whose values are named."""

    between: Annotated[tuple[DomainValue, ...], MinLen(2), MaxLen(2)]
    """The two values, in either order."""


def _spec(link: Link) -> LinkSpec:
    return LinkSpec(latency_s=link.latency_s, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s)


class LinksSpec(_Part):
    """How fast KV travels between two workers, by the narrowest level that they share."""

    within: Mapping[DomainName, LinkSpec] = {}
    """The link of two workers that share this level. A level without one uses the next broader level's."""

    across: LinkSpec = _spec(ACROSS_LINK)
    """The link of two workers that share no level with a link."""

    pairs: Annotated[tuple[PairLink, ...], MaxLen(4096)] = ()
    """Links that were measured between two places."""


class TopologySpec(_Part):
    """The levels at which workers are placed, and the links between them."""

    levels: Annotated[tuple[DomainName, ...], MaxLen(16)] = ()
    """The domains, broadest first: ``[zone, rack]``."""

    links: LinksSpec | None = None
    """How fast KV travels. Without it: 100 Gbit/s inside every level, 25 Gbit/s between workers that share
    none."""

    @property
    def link_table(self) -> LinksSpec:
        """The links of the file, or those that are assumed without any."""
        if self.links is not None:
            return self.links
        return LinksSpec(within=dict.fromkeys(self.levels, _spec(SAME_LEVEL_LINK)))


class KvTransferSpec(_Part):
    """The transfer policy that every worker of the fleet publishes."""

    domain: DomainName
    """The domain that KV transfers keep to: one of ``topology.levels``."""

    enforcement: Enforcement = Enforcement.REQUIRED
    """``required`` refuses what would cross the domain, ``fallback`` crosses it when nothing else is left,
    ``preferred`` makes crossing dearer."""

    preferred_weight: Fraction | None = None
    """How strong the preference is, under ``preferred`` only."""


class Handoff(StrEnum):
    """How a decode worker learns where the KV of a prefill waits."""

    BOOTSTRAP = "bootstrap"
    SYNCHRONOUS = "synchronous"


class MockTiming(_Part):
    """The timing formula of a mock engine, in milliseconds.

    Computing t prompt tokens takes ``prefill_quadratic·t² + prefill_linear·t + prefill_base``, decoding one
    token for every running request ``max(decode_min, decode_quadratic·u² + decode_linear·u + decode_base)``,
    where u is the share of KV blocks in use; a step takes the sum of what it does. The figures are those of
    Dynamo's mocker (vLLM backend) as observed in ai-dynamo-runtime 1.6.1.
    """

    prefill_quadratic: NonNegative = 4.209989e-7
    """Milliseconds for each squared prompt token of a step."""

    prefill_linear: NonNegative = 1.518344e-2
    """Milliseconds for each prompt token of a step."""

    prefill_base: NonNegative = 16.50142
    """Milliseconds for a step that prefills anything."""

    decode_quadratic: Finite = -25.74
    """Milliseconds for the squared share of blocks in use."""

    decode_linear: Finite = 54.01
    """Milliseconds for the share of blocks in use."""

    decode_base: Finite = 5.74
    """Milliseconds for a step that decodes anything."""

    decode_min: Positive = 1.0
    """Milliseconds that a step that decodes takes at least."""


class MockEngineSpec(_Part):
    """A mock engine: an engine without a GPU, with the batching, the cache and the timing of a real one."""

    kind: Literal["mock"] = "mock"
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

    kv_events: Switch = True
    """Publish KV events."""

    engine_hashing: EngineHashing = EngineHashing.DETERMINISTIC
    """What it calls its blocks in KV events."""

    handoff: Handoff = Handoff.BOOTSTRAP
    """How prefill and decode meet; read on prefill workers."""

    kv_load_failure_policy: KvLoadFailurePolicy = KvLoadFailurePolicy.FAIL
    """What a decode leg does when its KV is lost."""

    kv_wait_expiry_s: Positive = 60.0
    """How long finished KV waits to be fetched: on the clock that speedup drives, and on the real one."""

    eos_every: PositiveCount | None = None
    """Makes one token in about so many the end of an answer. Unset: answers end by their length alone."""

    timing: MockTiming = MockTiming()
    """How long its steps take."""


class WorkerGroup(_Part):
    """Workers that are alike."""

    name: Name
    """What warnings call the group; no two are alike. Workers are numbered over the whole file, from 1."""

    model: Name | None = None
    """The model that it serves; may be left out when the file has one model."""

    role: Role = Role.BOTH
    """``prefill``, ``decode``, or ``both`` for an aggregated worker."""

    replicas: Annotated[Whole, Interval(ge=1, le=REPLICAS_MAX)] = 1
    """How many workers."""

    dp_size: Annotated[Whole, Interval(ge=1, le=256)] = 1
    """Data-parallel ranks of each worker."""

    domains: Mapping[DomainName, DomainValue] = {}
    """Where they are: a value for each level that is known."""

    topology_env: Mapping[TopologyVariable, str] = {}
    """The environment contract of workers that read their place from files, instead of ``domains``:
    ``DYN_TOPOLOGY_ENABLED: "true"`` and what goes with it. Such a worker starts once its file is there, and a
    label that changes later is published again. It wins over ``kv_transfer``."""

    taints: Annotated[tuple[TaintText, ...], MaxLen(64)] = ()
    """Their own taints; the prefix ``dynamo.topology/`` is reserved."""

    engine: MockEngineSpec = MockEngineSpec()
    """What serves the requests."""


class FleetFile(_Part):
    """A fleet, whole: what ``kvrouter up --fleet`` reads."""

    version: Literal[1]
    """The version of this schema."""

    models: Annotated[tuple[ModelSpec, ...], MinLen(1), MaxLen(256)]
    """The models that are served."""

    workers: Annotated[tuple[WorkerGroup, ...], MinLen(1), MaxLen(1024)]
    """The groups of workers."""

    topology: TopologySpec = TopologySpec()
    """Levels and links."""

    kv_transfer: KvTransferSpec | None = None
    """The transfer policy; without it KV goes anywhere."""

    speedup: Annotated[Finite, Interval(gt=0, le=10_000)] = 1.0
    """How much faster than the timing formula mock engines run."""

    seed: Annotated[Whole, Interval(ge=0, le=2**63 - 1)] = 0
    """What mock engines draw their tokens from."""

    router: KvRouterConfig = KvRouterConfig()
    """Settings of the router."""

    frontend: FrontendSettings = FrontendSettings()
    """Settings of the front door."""

    planes: PlaneSettings = PlaneSettings()
    """Settings of what lies between processes."""

    log: LogSettings = LogSettings()
    """Settings of the logs."""

    def model_of(self, group: WorkerGroup) -> ModelSpec:
        """Return the model that ``group`` serves."""
        if group.model is None:
            return self.models[0]
        return next(model for model in self.models if model.name == group.model)
