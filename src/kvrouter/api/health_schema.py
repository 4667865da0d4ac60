"""Answers about health, readiness and models; bodies and answers of busy thresholds."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from kvrouter.api.cordon_schema import Name
from kvrouter.api.fleet_schema import ExpectedEngine

NonNegativeInt = Annotated[int, Meta(ge=0, lt=2**31)]


class Health(Struct, frozen=True):
    """``GET /health``."""

    status: str
    running_requests: int


class Ready(Struct, frozen=True, omit_defaults=True):
    """``GET /ready`` and ``/accepting``; ``awaited`` has a line for each engine without a worker, and
    ``engine_problems`` a record for each, and for each whose URL is wrong.
    """

    status: str
    awaited: Sequence[str] = ()
    engine_problems: Sequence[ExpectedEngine] = ()


class WorkerStatus(Struct, frozen=True, omit_defaults=True):
    """``GET /health`` and ``/accepting`` of a worker's process; ``engine_problems`` has the engines that have
    no worker, or a wrong URL.
    """

    status: str
    engine_problems: Sequence[ExpectedEngine] = ()


class ServerLoad(Struct, frozen=True):
    """``GET /load``."""

    server_load: int


class Version(Struct, frozen=True):
    """``GET /version``."""

    version: str


class ModelPermission(Struct, frozen=True, kw_only=True):
    """A model's permissions, which clients of OpenAI's API expect."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Struct, frozen=True, kw_only=True):
    """``GET /v1/models/{model}``; ``created`` is in seconds since 1970."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = ""
    root: str = ""
    parent: str | None = None
    max_model_len: int | None = None
    permission: Sequence[ModelPermission] = ()


class ModelList(Struct, frozen=True, kw_only=True):
    """``GET /v1/models``."""

    object: str = "list"
    data: Sequence[ModelCard]


class BusyBody(Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /busy_threshold``: an absent field keeps its value, null unsets it."""

    model: Name
    active_decode_blocks_threshold: Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType | None = UNSET
    active_prefill_tokens_threshold: NonNegativeInt | UnsetType | None = UNSET


class Thresholds(Struct, frozen=True):
    """The loads from which a model's workers count as busy; None disables a threshold."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None


class ThresholdList(Struct, frozen=True):
    """``GET /busy_threshold``."""

    thresholds: Sequence[Thresholds]
