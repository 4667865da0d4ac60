"""What library callers write as plain dictionaries, as requests and back."""

from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TypedDict, TypeVar
from uuid import uuid4

import msgspec

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import RequestId
from kvrouter.core.requests import EngineChunk, Sampling, TokenBuffer

MAX_TOKENS_DEFAULT = 16


class StopConditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When an answer ends."""

    max_tokens: int = MAX_TOKENS_DEFAULT
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class SamplingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0


class Answer(TypedDict, total=False):
    """One piece of an answer; ``finish_reason`` is there in the last one."""

    token_ids: list[int]
    finish_reason: str


def token_buffer(token_ids: TokenBuffer | Sequence[int]) -> TokenBuffer:
    """Return the ids as an unsigned 32-bit buffer; raise :class:`InvalidRequest` when they are none."""
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        return token_ids
    try:
        buffer = array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"token_ids: {error}", param="token_ids") from None
    if not buffer:
        raise InvalidRequest("token_ids: must not be empty", param="token_ids")
    return buffer


def sampling_of(
    stop_conditions: Mapping[str, object] | None, sampling_options: Mapping[str, object] | None
) -> Sampling:
    """Return the sampling that two dictionaries describe; unknown keys are an error."""
    stop = _struct(StopConditions, stop_conditions, "stop_conditions")
    draw = _struct(SamplingOptions, sampling_options, "sampling_options")
    if stop.max_tokens < 1:
        raise InvalidRequest("stop_conditions.max_tokens: must be ≥ 1", param="stop_conditions.max_tokens")
    return Sampling(**msgspec.structs.asdict(stop), **msgspec.structs.asdict(draw))


def new_request_id() -> RequestId:
    """Return an id that no other request has."""
    return RequestId(uuid4().hex)


async def answers(chunks: AsyncIterator[EngineChunk]) -> AsyncIterator[Answer]:
    """Turn an engine's chunks into what a library caller reads."""
    async for chunk in chunks:
        answer: Answer = {"token_ids": list(chunk.token_ids)}
        if chunk.finish is not None:
            answer["finish_reason"] = chunk.finish.value
        yield answer


_S = TypeVar("_S", StopConditions, SamplingOptions)


def _struct(kind: type[_S], values: Mapping[str, object] | None, field: str) -> _S:
    try:
        return msgspec.convert(values or {}, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from None
