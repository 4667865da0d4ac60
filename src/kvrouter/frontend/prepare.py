"""The hall: a call becomes a tokenized request, or an error that names the field."""

from array import array
from collections.abc import Sequence

from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest
from kvrouter.core.ids import RequestId
from kvrouter.core.requests import GenerateRequest, TokenBuffer
from kvrouter.frontend.openai.parse import Call, ChatCall, CompletionCall
from kvrouter.text.model import TextModel


async def prepare(call: ChatCall | CompletionCall, text: TextModel, request_id: RequestId) -> GenerateRequest:
    """Template, tokenize and check the lengths; long texts are tokenized off the event loop."""
    if isinstance(call, ChatCall):
        token_ids = await text.encode_chat(text.prepare_chat(call.messages))
        return _request(call.call, token_ids, text, request_id, field="messages")
    if isinstance(call.prompt, str):
        token_ids = await text.encode_prompt(call.prompt)
    else:
        token_ids = _checked_ids(call.prompt, text.tokenizer.vocab_size)
    return _request(call.call, token_ids, text, request_id, field="prompt")


def _checked_ids(token_ids: Sequence[int], vocab_size: int) -> TokenBuffer:
    highest = max(token_ids)
    if highest >= vocab_size:
        index = token_ids.index(highest)
        raise InvalidRequest(
            f"prompt[{index}]: the model's vocabulary ends at {vocab_size - 1}, not {highest}",
            param=f"prompt[{index}]",
        )
    return array("I", token_ids)


def _request(
    call: Call, token_ids: TokenBuffer, text: TextModel, request_id: RequestId, *, field: str
) -> GenerateRequest:
    isl_tokens, context_tokens = len(token_ids), text.context_length_tokens
    if isl_tokens == 0:
        raise InvalidRequest(f"{field}: must not be empty", param=field)
    room_tokens = context_tokens - isl_tokens
    if room_tokens < 1:
        raise ContextLengthExceeded(
            f"{field}: {isl_tokens} tokens, and the model's context holds {context_tokens}, "
            "the answer included",
            param=field,
        )
    max_tokens = room_tokens if call.max_tokens is None else call.max_tokens
    if max_tokens > room_tokens:
        raise ContextLengthExceeded(
            f"{call.max_tokens_field}: {isl_tokens} tokens of prompt leave room for {room_tokens} in the "
            f"model's context of {context_tokens}, not for {max_tokens}",
            param=call.max_tokens_field,
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
        cache_namespace=call.cache_namespace,
    )
