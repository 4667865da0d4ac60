"""What library callers write as plain values, as requests; the limits are those of the front door."""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar
from uuid import uuid4

import msgspec
from msgspec import Meta

from kvrouter.core.constraints import RoutingConstraints
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import RequestId
from kvrouter.core.requests import Sampling, TokenBuffer
from kvrouter.frontend.openai.parse import STOP_TOKENS_MAX
from kvrouter.frontend.openai.schema import (
    NonNegativeInt,
    NvExt,
    Penalty,
    PositiveInt,
    Probability,
    Seed,
    TokenId,
)
from kvrouter.frontend.openai.wishes import check_wishes
from kvrouter.frontend.prepare import answer_tokens
from kvrouter.frontend.request_ids import USABLE_REQUEST_ID

MAX_TOKENS_DEFAULT = 16

Values = Mapping[str, object]


class StopConditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When an answer ends."""

    max_tokens: PositiveInt = MAX_TOKENS_DEFAULT
    min_tokens: NonNegativeInt = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=STOP_TOKENS_MAX)] = ()
    ignore_eos: bool = False


class SamplingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are drawn."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    seed: Seed | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0)] = 1.0


def token_buffer(token_ids: TokenBuffer | Sequence[int]) -> TokenBuffer:
    """Return the ids as an unsigned 32-bit buffer; raise :class:`InvalidRequest` when they are none."""
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        buffer = token_ids
    elif isinstance(token_ids, bytes | bytearray):  # array() would take them for its own memory
        raise InvalidRequest("token_ids: must be numbers, not bytes", param="token_ids")
    else:
        try:
            buffer = array("I", token_ids)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(f"token_ids: {error}", param="token_ids") from None
    if not buffer:
        raise InvalidRequest("token_ids: must not be empty", param="token_ids")
    return buffer


def check_length(token_ids: TokenBuffer, *, max_tokens: int, context_length_tokens: int) -> None:
    """Raise :class:`ContextLengthExceeded` when prompt and answer do not fit into the context together."""
    answer_tokens(
        len(token_ids),
        max_tokens,
        context_length_tokens=context_length_tokens,
        prompt_field="token_ids",
        max_tokens_field="stop_conditions.max_tokens",
    )


def sampling_of(stop_conditions: Values | None, sampling_options: Values | None) -> Sampling:
    """Return the sampling that two dictionaries describe; unknown keys are an error."""
    stop = converted(StopConditions, stop_conditions or {}, at="stop_conditions")
    draw = converted(SamplingOptions, sampling_options or {}, at="sampling_options")
    if stop.min_tokens > stop.max_tokens:
        raise InvalidRequest(
            f"stop_conditions.min_tokens: must not be above max_tokens, which is {stop.max_tokens}",
            param="stop_conditions.min_tokens",
        )
    return Sampling(**msgspec.structs.asdict(stop), **msgspec.structs.asdict(draw))


def wishes_of(
    *,
    constraints: RoutingConstraints | None = None,
    override: Values | None = None,
    worker_id: int | None = None,
    dp_rank: int | None = None,
    prefill_worker_id: int | None = None,
    prefill_dp_rank: int | None = None,
) -> NvExt:
    """Return what a caller wishes of routing, checked as the front door checks ``nvext``."""
    values: dict[str, object] = {
        "worker_id": worker_id,
        "dp_rank": dp_rank,
        "prefill_worker_id": prefill_worker_id,
        "prefill_dp_rank": prefill_dp_rank,
    }
    if override is not None:
        values["router_config_override"] = override
    if constraints is not None:  # its own constructor checks no types
        values["routing_constraints"] = _plain(constraints)
    nvext = converted(NvExt, values, at="")
    check_wishes(nvext, at="")
    return nvext


def new_request_id() -> RequestId:
    """Return an id that no other request has."""
    return RequestId(uuid4().hex)


def request_id_of(wished: str | None) -> RequestId:
    """Return the caller's own id, when it is one that the front door would take, or a new one."""
    if wished is None:
        return new_request_id()
    if USABLE_REQUEST_ID.fullmatch(wished) is None:
        raise InvalidRequest(f"request_id: must match {USABLE_REQUEST_ID.pattern}", param="request_id")
    return RequestId(wished)


_S = TypeVar("_S", bound=msgspec.Struct)


def converted(kind: type[_S], values: Values, *, at: str) -> _S:
    """Return ``values`` as a ``kind``; raise :class:`InvalidRequest` naming the field under ``at``."""
    _check_finite(values, at)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        field = f"{at}{path.rstrip('`')}".lstrip(".")
        raise InvalidRequest(f"{field}: {what}" if field else what, param=field or None) from None


def _plain(constraints: RoutingConstraints) -> object:
    try:
        return msgspec.to_builtins(constraints)
    except TypeError as error:
        raise InvalidRequest(f"routing_constraints: {error}", param="routing_constraints") from None


def _check_finite(value: object, path: str) -> None:
    """JSON has neither NaN nor infinity, so that the front door's limits need not speak of them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{path}: must be a finite number", param=path)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_finite(inner, f"{path}.{key}".lstrip("."))
