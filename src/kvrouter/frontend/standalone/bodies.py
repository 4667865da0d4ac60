"""What the routes of a standalone router take."""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvrouter.core.errors import InvalidRequest
from kvrouter.frontend.openai.decode import decode_body
from kvrouter.frontend.openai.nvext import NvextReader
from kvrouter.frontend.openai.parse import READER, ChatCall, CompletionCall, call_of, one_prompt
from kvrouter.frontend.openai.prompts import read_messages, read_token_ids
from kvrouter.frontend.openai.scanned import ScannedBody
from kvrouter.frontend.openai.schema import CacheSalt, GenerateBody, Name, PositiveInt
from kvrouter.frontend.request_ids import USABLE_REQUEST_ID


class RouteBody(GenerateBody, frozen=True, kw_only=True):
    """``POST /v1/route`` and ``/v1/prefill``: a body of one of OpenAI's two routes, or ``token_ids``, and
    what a request is called. As at the front door, other fields are left alone.
    """

    max_completion_tokens: PositiveInt | None = None
    request_id: str | None = None
    lora_name: Name | None = None
    cache_namespace: CacheSalt | None = None


class OutputBody(Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /v1/route/{request_id}/output_blocks``."""

    blocks: Annotated[int, Meta(ge=1, le=2**20)]


_ROUTE = msgspec.json.Decoder(RouteBody)
_OUTPUT = msgspec.json.Decoder(OutputBody)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to be routed. ``parsed`` has its prompt."""

    parsed: ChatCall | CompletionCall
    request_id: str | None
    lora_name: str | None
    cache_namespace: str | None


def parse_route(scanned: ScannedBody, nvext: NvextReader = READER) -> Wanted:
    """Return what is to be routed; raise :class:`InvalidRequest` naming the field."""
    body = decode_body(_ROUTE, scanned)
    given = [name for name in ("token_ids", "prompt", "messages") if name in scanned.fields]
    if len(given) != 1:
        what = (
            f"give one of them, not {' and '.join(given)}"
            if given
            else "or prompt, or messages, must be given"
        )
        raise InvalidRequest(f"token_ids: {what}", param="token_ids")
    if body.request_id is not None and USABLE_REQUEST_ID.fullmatch(body.request_id) is None:
        raise InvalidRequest(
            "request_id: must be 1 to 128 of the characters A-Z a-z 0-9 . _ : @ / -", param="request_id"
        )
    if body.request_id is not None and not has_own_path(body.request_id):
        raise InvalidRequest(
            "request_id: its path would be another one's: a part between slashes is empty, . or .., or the "
            "last one is free",
            param="request_id",
        )
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    call = call_of(body, nvext, max_tokens=body.max_completion_tokens or body.max_tokens, field=field)
    if call.nvext.token_data is not None:
        raise InvalidRequest("nvext.token_data: give token_ids instead", param="nvext.token_data")
    if call.nvext.asks_only:
        raise InvalidRequest("nvext.annotations: ask with ?book=false instead", param="nvext.annotations")
    cache_namespace = body.cache_namespace or call.cache_namespace
    if call.cache_namespace is not None and cache_namespace != call.cache_namespace:
        raise InvalidRequest(
            "cache_namespace: cache_salt says something else, and they are the same", param="cache_namespace"
        )
    parsed: ChatCall | CompletionCall
    if "messages" in given:
        parsed = ChatCall(call, read_messages(scanned))
    elif "prompt" in given:
        parsed = CompletionCall(call, one_prompt(scanned))
    else:
        token_ids, _ = read_token_ids(scanned.data, scanned.fields["token_ids"][0], at="token_ids")
        parsed = CompletionCall(call, token_ids)
    return Wanted(parsed, body.request_id, body.lora_name, cache_namespace)


def has_own_path(request_id: str) -> bool:
    """Whether the paths below ``/v1/route/`` with this id are no other id's: clients take empty parts and
    dots out of a path, and ``DELETE /v1/route/x/free`` frees ``x``.
    """
    *before, last = request_id.split("/")
    return {"", ".", ".."}.isdisjoint((*before, last)) and not (before and last == "free")


def parse_output(scanned: ScannedBody) -> int:
    """Return how many more blocks are full; raise :class:`InvalidRequest` naming the field."""
    return decode_body(_OUTPUT, scanned).blocks
