"""Input and output types of the library; inputs have the frontend's limits."""

import math
from array import array
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from types import TracebackType
from typing import Annotated, Self, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from kvrouter.api.health_schema import NonNegativeInt
from kvrouter.core.constraints import RoutingConstraints
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import RequestId, new_request_id
from kvrouter.core.json import Unreadable
from kvrouter.core.json import converted as converted_to
from kvrouter.core.requests import EngineChunk, FinishReason, KvTransferParams, Sampling, TokenBuffer
from kvrouter.frontend.openai.body import (
    NvExt,
    Penalty,
    PositiveInt,
    Probability,
    Seed,
    TokenId,
)
from kvrouter.frontend.openai.parse import STOP_TOKENS_MAX, check_hints
from kvrouter.frontend.prepare import answer_tokens
from kvrouter.frontend.response_writer import USABLE_REQUEST_ID
from kvrouter.router.prefill_dispatch import Prefilled
from kvrouter.transports.requests.port import EngineStream

MAX_TOKENS_DEFAULT = 16

Values = Mapping[str, object]


class StopConditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When an answer ends."""

    max_tokens: PositiveInt = MAX_TOKENS_DEFAULT
    min_tokens: NonNegativeInt = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=STOP_TOKENS_MAX)] = ()
    ignore_eos: bool = False


class SamplingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are sampled."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    seed: Seed | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0)] = 1.0


def token_buffer(token_ids: TokenBuffer | Sequence[int]) -> TokenBuffer:
    """Return the ids as an unsigned 32-bit buffer. Raises :class:`InvalidRequest`, also for an empty list."""
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


def hints_of(
    *,
    constraints: RoutingConstraints | None = None,
    override: Values | None = None,
    worker_id: int | None = None,
    dp_rank: int | None = None,
    prefill_worker_id: int | None = None,
    prefill_dp_rank: int | None = None,
) -> NvExt:
    """Return a caller's routing hints, checked as the frontend checks ``nvext``."""
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
    check_hints(nvext, at="")
    return nvext


def request_id_of(requested: str | None) -> RequestId:
    """Return ``requested``, or a new id for None; raise :class:`InvalidRequest` for an unusable one."""
    if requested is None:
        return new_request_id()
    if USABLE_REQUEST_ID.fullmatch(requested) is None:
        raise InvalidRequest(f"request_id: must match {USABLE_REQUEST_ID.pattern}", param="request_id")
    return RequestId(requested)


_S = TypeVar("_S", bound=msgspec.Struct)


def converted(kind: type[_S], values: Values, *, at: str) -> _S:
    """Return ``values`` as a ``kind``; raise :class:`InvalidRequest` naming the field under ``at``."""
    _check_finite(values, at)
    try:
        return converted_to(values, kind)
    except Unreadable as error:
        problem, _, path = str(error).partition(" - at `$")
        field = f"{at}{path.rstrip('`')}".lstrip(".")
        raise InvalidRequest(f"{field}: {problem}" if field else problem, param=field or None) from None


def _plain(constraints: RoutingConstraints) -> object:
    try:
        return msgspec.to_builtins(constraints)
    except TypeError as error:
        raise InvalidRequest(f"routing_constraints: {error}", param="routing_constraints") from None


def _check_finite(value: object, path: str) -> None:
    """Refuse NaN and infinity: JSON has neither, so the frontend's limits do not exclude them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{path}: must be a finite number", param=path)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_finite(inner, f"{path}.{key}".lstrip("."))


CLIENT_LEFT = "client left"


class BootstrapAddress(TypedDict):
    """The address and room at which both legs of a bootstrap handoff connect."""

    host: str
    port: int
    room: int


class AnswerPiece(TypedDict, total=False):
    """One piece of an answer; the last one has ``finish_reason``.

    The last piece of a prefill worker says where a decode worker fetches the KV: ``kv_transfer_params``, or
    ``bootstrap`` while the leg still runs, and ``prefill_worker_id``.
    """

    token_ids: list[int]
    finish_reason: str
    kv_transfer_params: KvTransferParams
    bootstrap: BootstrapAddress
    prefill_worker_id: int


class AnswerPieces:
    """One request's answer as an async iterator of pieces, read once.

    A reader that stops before the last piece, even before the first, calls ``aclose`` (or reads inside
    ``async with``), so that the engine stops too.
    """

    def __init__(self, pieces: AsyncGenerator[AnswerPiece, None], stream: EngineStream | None = None) -> None:
        self._pieces = pieces
        self._stream = stream
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnswerPiece:
        piece = await anext(self._pieces)
        self._has_ended |= "finish_reason" in piece
        return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop reading, and cancel what still runs for this request. Idempotent."""
        await self._pieces.aclose()
        if self._stream is not None and not self._has_ended:  # the iterator may not have been started
            self._stream.cancel(CLIENT_LEFT)


def answers_of(stream: EngineStream) -> AnswerPieces:
    """Return the answer of an open stream."""
    return AnswerPieces(_read(stream), stream)


async def pieces_of(chunks: AsyncIterable[EngineChunk]) -> AsyncGenerator[AnswerPiece, None]:
    """Turn an engine's chunks into answer pieces."""
    async for chunk in chunks:
        piece: AnswerPiece = {"token_ids": list(chunk.token_ids)}
        if chunk.finish is not None:
            piece["finish_reason"] = chunk.finish.value
        if chunk.kv_transfer_params is not None:
            piece["kv_transfer_params"] = chunk.kv_transfer_params
        yield piece


def piece_of(prefilled: Prefilled) -> AnswerPiece:
    """Return the only answer piece of a prefill leg."""
    piece: AnswerPiece = {
        "token_ids": [],
        "finish_reason": FinishReason.LENGTH.value,
        "prefill_worker_id": prefilled.placement.prefill_pick.rank.worker_id,
    }
    if prefilled.kv_transfer_params is not None:
        piece["kv_transfer_params"] = prefilled.kv_transfer_params
    if prefilled.bootstrap is not None:
        at = prefilled.bootstrap
        piece["bootstrap"] = {"host": at.host, "port": at.port, "room": at.room}
    return piece


async def _read(stream: EngineStream) -> AsyncGenerator[AnswerPiece, None]:
    has_ended = False
    try:
        async for piece in pieces_of(stream):
            has_ended |= "finish_reason" in piece
            yield piece
    finally:
        if not has_ended:  # cancelling a finished prefill would drop KV that its decode worker fetches
            stream.cancel(CLIENT_LEFT)
