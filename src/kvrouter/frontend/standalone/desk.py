"""The desk of a standalone router: a body becomes a request that can be routed."""

from uuid import uuid4

from msgspec.structs import replace

from kvrouter.core.ids import RequestId
from kvrouter.core.requests import GenerateRequest, TokenBuffer
from kvrouter.frontend.contradictions import refuse_contradictions
from kvrouter.frontend.openai.parse import Call, CompletionCall
from kvrouter.frontend.prepare import CalledModel, Hall, answer_tokens
from kvrouter.frontend.request_ids import USABLE_REQUEST_ID
from kvrouter.frontend.standalone.bodies import Wanted, has_own_path
from kvrouter.service.model_router import ModelRouter
from kvrouter.text.model import TextModel


class Desk:
    """One way in for everything that is routed here. Token ids are taken as they are, without a tokenizer."""

    def __init__(self, hall: Hall) -> None:
        self._hall = hall

    async def prepare(
        self, wanted: Wanted, called: CalledModel, text: TextModel | None, request_id: RequestId
    ) -> GenerateRequest:
        """Tokenize where that is needed, and check what can be checked before routing. ``text`` is None for a
        request in token ids.

        Raises :class:`InvalidRequest` naming the field.
        """
        parsed = wanted.parsed
        if text is not None:
            request = await self._hall.prepare(parsed, called, text, request_id)
        elif isinstance(parsed, CompletionCall) and not isinstance(parsed.prompt, str):
            request = self._of_tokens(parsed.call, parsed.prompt, called.router, request_id)
        else:
            raise TypeError("a request without token ids needs a tokenizer")
        return replace(request, lora_name=wanted.lora_name, cache_namespace=wanted.cache_namespace)

    @staticmethod
    def _of_tokens(
        call: Call, token_ids: TokenBuffer, router: ModelRouter, request_id: RequestId
    ) -> GenerateRequest:
        refuse_contradictions(call, router)
        context_tokens = router.fleet.context_length_tokens
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
            token_ids=token_ids,
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
    if header is not None and USABLE_REQUEST_ID.fullmatch(header) and has_own_path(header):
        return RequestId(header)
    return RequestId(uuid4().hex)
