"""The desk of a standalone router: a body becomes a request that can be routed."""

from array import array
from collections.abc import Iterable, Sequence
from uuid import uuid4

from msgspec.structs import replace

from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import GenerateRequest
from kvrouter.frontend.contradictions import refuse_contradictions
from kvrouter.frontend.openai.nvext import Header, NvextReader
from kvrouter.frontend.openai.parse import Call, CompletionCall
from kvrouter.frontend.openai.scanned import ScannedBody
from kvrouter.frontend.prepare import Hall, answer_tokens
from kvrouter.frontend.request_ids import USABLE_REQUEST_ID
from kvrouter.frontend.standalone.bodies import Wanted
from kvrouter.service.router import RouterService


class Desk:
    """One way in for everything that is routed here. Token ids are taken as they are, without a tokenizer."""

    def __init__(self, service: RouterService, hall: Hall) -> None:
        self._service = service
        self._hall = hall

    def nvext_reader(self, headers: Iterable[Header]) -> NvextReader:
        """Return what reads the routing hints of a call with these headers."""
        return self._hall.nvext_reader(headers)

    def model_in(self, body: ScannedBody) -> ModelName | None:
        """Return the served model that a body names; None when it names none."""
        return self._hall.model_in(body)

    async def prepare(self, wanted: Wanted, request_id: RequestId) -> GenerateRequest:
        """Tokenize where that is needed, and check what can be checked before routing.

        Raises :class:`InvalidRequest` naming the field.
        """
        parsed = wanted.parsed
        if wanted.in_tokens and isinstance(parsed, CompletionCall) and not isinstance(parsed.prompt, str):
            request = self._of_tokens(parsed.call, parsed.prompt, request_id)
        else:
            request = await self._hall.prepare(parsed, self._hall.text_of(parsed.call), request_id)
        return replace(request, lora_name=wanted.lora_name, cache_namespace=wanted.cache_namespace)

    def _of_tokens(self, call: Call, token_ids: Sequence[int], request_id: RequestId) -> GenerateRequest:
        room = self._service.model(call.model)
        refuse_contradictions(call, room)
        context_tokens = room.fleet.context_length_tokens
        max_tokens = answer_tokens(
            len(token_ids),
            call.max_tokens,
            context_length_tokens=context_tokens or 2**31 - 1,  # nobody is here: routing will refuse
            prompt_field="token_ids",
            max_tokens_field=call.max_tokens_field,
        )
        return GenerateRequest(
            request_id=request_id,
            model=call.model,
            token_ids=array("I", token_ids),
            sampling=call.sampling(max_tokens),
            constraints=call.constraints,
            override=call.override,
            pin=call.pin,
            prefill_pin=call.prefill_pin,
            context_tokens=len(token_ids) + (call.max_tokens or 1),
        )


def id_of(wanted: Wanted, header: str | None) -> RequestId:
    """What the request is called: as its body says, else as its header, else a new id."""
    if wanted.request_id is not None:
        return RequestId(wanted.request_id)
    if header is not None and USABLE_REQUEST_ID.fullmatch(header):
        return RequestId(header)
    return RequestId(uuid4().hex)
