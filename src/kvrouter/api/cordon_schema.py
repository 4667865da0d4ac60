"""Bodies and answers of ``/v1/cordons``."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from kvrouter.api.fleet_schema import Cordoned, Discovery, RoleName

NAME_CHARS_MAX = 256
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]


class CordonBody(Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /v1/cordons``. The name of a worker may be a number."""

    level: Name
    name: Name | int
    reason: str = ""
    by: str = ""
    force: bool = False


class CordonedWorker(Struct, frozen=True, kw_only=True):
    """A worker that a cordon applies to."""

    worker_id: int
    model: str
    role: RoleName
    alive: bool
    running_requests: int


class Remaining(Struct, frozen=True, kw_only=True):
    """How many of a model's workers of one role take new requests."""

    model: str
    role: RoleName
    workers: int
    left: int


class CordonState(Cordoned, frozen=True, kw_only=True):
    """A cordon with its workers."""

    workers: Sequence[CordonedWorker]


class CordonList(Struct, frozen=True, kw_only=True):
    """``GET /v1/cordons``."""

    cordons: Sequence[CordonState]
    remaining: Sequence[Remaining] = ()
    store: Discovery = Discovery()
    routers_look_every_s: float = 0.0


class CordonChange(CordonState, frozen=True, kw_only=True):
    """``POST /v1/cordons``, and ``DELETE``."""

    changed: bool
    warnings: Sequence[str]
    remaining: Sequence[Remaining]
    routers_look_every_s: float
