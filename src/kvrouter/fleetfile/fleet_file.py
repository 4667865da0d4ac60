"""The fleet file: models, topology, transfer policy, workers and settings of one ``kvrouter up``."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval, MaxLen, MinLen
from pydantic import AfterValidator, StringConstraints
from pydantic_core import PydanticCustomError

from kvrouter.core.workers import Enforcement, KvFormat, Role
from kvrouter.fleetfile.fleet_engines import (
    MOCK,
    MOCK_BLOCK_SIZE,
    MOCK_CONTEXT_LENGTH,
    AttachedEngineSpec,
    EngineSpec,
    MockEngineSpec,
)
from kvrouter.settings.planes import PlaneSettings
from kvrouter.settings.recording_settings import RecordingSettings
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.setting import Finite, FleetPart, Fraction, NonNegative, Positive, Whole
from kvrouter.settings.tree import FrontendSettings, LogSettings
from kvrouter.settings.variables import TopologyVariable

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?")
_MODEL = re.compile(r"[A-Za-z0-9/.]([A-Za-z0-9._/:@+-]*[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError("name", "must be letters, digits and ._/- between letters or digits")
    return name


def _check_model_name(name: str) -> str:
    if not _MODEL.fullmatch(name):
        raise PydanticCustomError(
            "name", "must be letters, digits and ._/:@+-, and end in neither of these signs"
        )
    return name


def _check_domain_name(name: str) -> str:
    if not _DOMAIN.fullmatch(name):
        raise PydanticCustomError("domain", "must be lower-case letters, digits and dashes")
    return name


Name = Annotated[str, MaxLen(253), AfterValidator(_check_name)]
"""What a group of workers is called."""

ModelText = Annotated[str, MaxLen(253), AfterValidator(_check_model_name)]
"""What a model is called: often the folder or the name on a hub that an engine loaded it from."""

DomainName = Annotated[str, MaxLen(63), AfterValidator(_check_domain_name)]
"""What a topology domain is called: the form that Kubernetes accepts."""

DomainValue = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=189)]
TaintText = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=253)]
KvPartValue = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=128)]

if TYPE_CHECKING:
    KvPart = str
else:
    KvPart = Literal[KvFormat.__struct_fields__]

ENGINES_OWN = "the engines' own model"
"""Stands for the name of a model that the engines are asked for."""

REPLICAS_MAX = 1024
"""How many workers one group may have."""


class ModelSpec(FleetPart):
    """A model that the fleet serves."""

    name: ModelText | None = None
    """What clients put into ``model``, and the name under which engines that run already serve it. Unset:
    ``mock`` for mock engines, and the first name of each engine that runs already, which is asked; required
    where the file has several models."""

    tokenizer: Annotated[str, MinLen(1)] | None = None
    """``mock``, a folder with ``tokenizer.json`` and ``tokenizer_config.json``, or a Hugging Face repository,
    as ``Qwen/Qwen3-8B`` or ``Qwen/Qwen3-8B@REVISION``, which is read from the local cache, else downloaded.
    ``engine``: nothing is read here, and engines that run already are asked at ``/tokenize``.
    Where engines that run already have one that cannot be read here the model is routed by load and text.
    Unset: ``mock`` for mock engines, and what an engine that runs already has loaded its own from."""

    block_size: Annotated[Whole, Interval(ge=1, le=4096)] | None = None
    """Tokens in one KV block, on every worker of the model. Unset: 64 for mock engines, and what engines that
    run already say; what is said here must be what they say."""

    context_length: Annotated[Whole, Interval(ge=1, le=16_777_216)] | None = None
    """Tokens of prompt and answer together; a longer prompt is refused. Unset: 32,768 for mock engines, and
    what engines that run already say; here it may be less."""

    @property
    def mock_name(self) -> str:
        """Its name with mock engines."""
        return self.name or MOCK

    @property
    def mock_block_size(self) -> int:
        """Tokens in one KV block of its mock engines."""
        return self.block_size or MOCK_BLOCK_SIZE

    @property
    def mock_context_length(self) -> int:
        """Tokens of prompt and answer together that its mock engines take."""
        return self.context_length or MOCK_CONTEXT_LENGTH

    @property
    def mock_tokenizer(self) -> str:
        """The tokenizer of its text with mock engines: ``mock``, or a folder."""
        return self.tokenizer or MOCK


class LinkSpec(FleetPart):
    """One link: seconds until the first byte, and bytes a second from then on, shared by its transfers."""

    latency_s: NonNegative
    """Seconds until the first byte arrives."""

    bandwidth_bytes_per_s: Positive
    """Bytes a second, for all transfers on the link together."""

    price_per_gb: NonNegative | None = None
    """What 10⁹ bytes over the link cost, in a currency that all links share: `kvrouter replay` and `kvrouter
    worth` add it up, and `--router-price-weight` weighs it. Unset: no cost is known, and none is counted."""


class PairLink(LinkSpec):
    """The link between two values of one level; it wins over the links of levels."""

    level: DomainName
    """The level whose values are named."""

    between: Annotated[tuple[DomainValue, ...], MinLen(2), MaxLen(2)]
    """The two values, in either order."""


class LinksSpec(FleetPart):
    """How fast KV travels between two workers, by the narrowest level that they share."""

    within: Mapping[DomainName, LinkSpec] = {}
    """The link of two workers that share this level. A level without one uses the next broader level's."""

    across: LinkSpec | None = None
    """The link of two workers that share no level with a link. Unset: 25 Gbit/s and 2 ms, or what the slowest
    level here has where that is slower: workers that share less are not assumed to be nearer."""

    pairs: Annotated[tuple[PairLink, ...], MaxLen(4096)] = ()
    """Links that were measured between two places."""


class TopologySpec(FleetPart):
    """The levels at which workers are placed, and the links between them."""

    levels: Annotated[tuple[DomainName, ...], MaxLen(16)] = ()
    """The domains, broadest first: ``[zone, rack]``."""

    links: LinksSpec | None = None
    """How fast KV travels. Without it: 25 Gbit/s and 2 ms between any two workers, wherever they are."""

    @property
    def link_table(self) -> LinksSpec:
        """The links of the file; none where it states none."""
        return self.links or LinksSpec()


class KvTransferSpec(FleetPart):
    """The transfer policy that every worker of the fleet publishes."""

    domain: DomainName
    """The domain that KV transfers keep to: one of ``topology.levels``."""

    enforcement: Enforcement = Enforcement.REQUIRED
    """``required`` refuses what would cross the domain, ``fallback`` crosses it when nothing else is left,
    ``preferred`` makes crossing dearer."""

    preferred_weight: Fraction | None = None
    """How strong the preference is, under ``preferred`` only."""


class PromptRange(FleetPart):
    """The prompts that workers prefill, by length."""

    min: Annotated[Whole, Interval(ge=1)] | None = None
    """The shortest, in tokens. Unset: any."""

    max: Annotated[Whole, Interval(ge=1)] | None = None
    """The longest, in tokens. Unset: any."""


class WorkerGroup(FleetPart):
    """Workers that are alike."""

    name: Name
    """What warnings call the group; no two are alike. Workers are numbered over the whole file, from 1."""

    model: ModelText | None = None
    """The model that it serves; may be left out when the file has one model."""

    role: Role = Role.BOTH
    """``prefill``, ``decode``, or ``both`` for an aggregated worker."""

    replicas: Annotated[Whole, Interval(ge=1, le=REPLICAS_MAX)] | None = None
    """How many workers. Unset: one, or one for each of ``engine.urls``."""

    dp_size: Annotated[Whole, Interval(ge=1, le=256)] | None = None
    """Data-parallel ranks of each worker. Unset: 1 for mock engines; engines that run already are asked."""

    domains: Mapping[DomainName, DomainValue] = {}
    """Where they are: a value for each level that is known."""

    topology_env: Mapping[TopologyVariable, str] = {}
    """The environment contract of workers that read their place from files, instead of ``domains``:
    ``DYN_TOPOLOGY_ENABLED: "true"`` and what goes with it. Such a worker starts once its file is there, and a
    label that changes later is published again. It wins over ``kv_transfer``."""

    taints: Annotated[tuple[TaintText, ...], MaxLen(64)] = ()
    """Their own taints; the prefixes ``dynamo.topology/`` and ``kvrouter.adapter/`` are reserved."""

    prompt_tokens: PromptRange | None = None
    """The prompts that they prefill, by length: pools for short and for long ones. Unset: any. Decode workers
    are bound by it where they prefill for themselves."""

    kv_format: Mapping[KvPart, KvPartValue] = {}
    """What two workers must have in common for KV to be handed from one to the other, as far as it is known:
    ``engine``, ``version``, ``connector``, ``connector_version``, ``transfer_mode``, ``block_size``,
    ``dtype``, ``layout``, ``parallelism``, ``hash``. What is said here wins over what an engine reports."""

    engine: EngineSpec = MockEngineSpec()
    """What serves the requests: a mock engine, or one that runs already."""

    @property
    def n_workers(self) -> int:
        """How many workers the group has."""
        if isinstance(self.engine, AttachedEngineSpec):
            return len(self.engine.all_urls)
        return self.replicas or 1


class FleetFile(FleetPart):
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
    """Settings of the frontend."""

    planes: PlaneSettings = PlaneSettings()
    """Settings of what lies between processes."""

    recording: RecordingSettings = RecordingSettings()
    """Settings of the recording of traffic."""

    log: LogSettings = LogSettings()
    """Settings of the logs."""

    def groups_of(self, model: ModelSpec) -> list[WorkerGroup]:
        """Return the groups that serve ``model``; one that names no model serves the only one."""
        return [group for group in self.workers if group.model in (None, model.name)]

    def has_mocks(self, model: ModelSpec) -> bool:
        """Whether mock engines serve ``model``: their defaults then apply to it."""
        return any(isinstance(group.engine, MockEngineSpec) for group in self.groups_of(model))

    def stated_name(self, model: ModelSpec) -> str | None:
        """Return the name of ``model``; None if its engines are asked."""
        return model.mock_name if self.has_mocks(model) else model.name

    def shown_name(self, model: ModelSpec) -> str:
        """Return the name of ``model`` for people."""
        return self.stated_name(model) or ENGINES_OWN

    def stated_tokenizer(self, model: ModelSpec) -> str | None:
        """Return the tokenizer of ``model`` in the file; None if its engines are asked."""
        return model.mock_tokenizer if self.has_mocks(model) else model.tokenizer

    def model_of(self, group: WorkerGroup) -> ModelSpec:
        """Return the model that ``group`` serves."""
        if group.model is None:
            return self.models[0]
        return next(model for model in self.models if model.name == group.model)
