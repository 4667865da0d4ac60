"""Placement's input for one attempt of a request: its prompt in blocks, and routing's input."""

from array import array
from collections.abc import Callable, Sequence

from msgspec import structs

from kvrouter.core.hashing import Prompt, hash_seed
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import GenerateRequest, TokenBuffer
from kvrouter.kernel.journey import RetryPlan
from kvrouter.kernel.placement.placement import AttemptRequest
from kvrouter.kernel.routing.interface import RouteRequest

_TEXT_SEED = 0x7465_7874
"""Changes the seed of texts, so that a text's blocks are never those of token ids, however it is chosen."""


def hash_prompt(
    token_ids: TokenBuffer,
    *,
    block_size: int,
    lora_name: str | None = None,
    cache_namespace: str | None = None,
) -> Prompt:
    """Hash a prompt's blocks; the result is computed once and kept with the request."""
    seed = hash_seed(lora_name=lora_name, cache_namespace=cache_namespace)
    # An empty array has no buffer. The prompt is empty when its engine tokenizes it.
    return Prompt(token_ids or (), block_size=block_size, seed=seed)


def attempt_request(
    request: GenerateRequest,
    prompt: Prompt,
    token_ids: TokenBuffer,
    *,
    attempt: int,
    excluded: frozenset[WorkerId],
    kv_lost_from: frozenset[WorkerId],
    plans: Sequence[RetryPlan],
    arrived_s: float | None = None,
    may_pull_kv: Callable[[], bool] | None = None,
) -> AttemptRequest:
    """Return the input for one attempt of ``request``, with an option for each of ``plans``. ``arrived_s`` is
    that of the first attempt; without it no objective is checked.
    """
    usual = to_route_request(
        request, prompt, attempt=attempt, excluded=excluded, has_lost_kv=bool(kv_lost_from)
    )
    return AttemptRequest(
        prompt,
        token_ids,
        {plan: _under(plan, usual, kv_lost_from) for plan in plans},
        shows_first_token=request.call is None or request.call.stream,
        is_sampled=request.pin is None and request.prefill_pin is None,
        client=request.client,
        service_level=request.service_level,
        arrived_s=arrived_s if attempt == 0 else None,
        may_pull_kv=may_pull_kv,
    )


def _under(plan: RetryPlan, usual: RouteRequest, kv_lost_from: frozenset[WorkerId]) -> RouteRequest:
    match plan:
        case RetryPlan.USUAL:
            return usual
        case RetryPlan.OTHER_PREFILL:
            return structs.replace(usual, excluded=usual.excluded | kv_lost_from)
        case RetryPlan.AGGREGATED:
            return structs.replace(usual, aggregated=True)


def prompt_of(request: GenerateRequest, token_ids: TokenBuffer, *, block_size: int) -> Prompt:
    """Hash the blocks of a request's prompt, ``token_ids``. A prompt with unknown tokens gets as many blocks
    as estimated, of its text; without one they are shared with no other request.
    """
    tokens, namespace = request.isl_tokens_estimate, request.cache_namespace
    if tokens and request.text_ids is not None:
        seed = hash_seed(lora_name=request.lora_name, cache_namespace=namespace) ^ _TEXT_SEED
        return Prompt(request.text_ids[:tokens], block_size=block_size, seed=seed)
    if tokens:
        token_ids, namespace = array("I", bytes(4 * tokens)), f"{request.intake} {request.request_id}"
    return hash_prompt(
        token_ids, block_size=block_size, lora_name=request.lora_name, cache_namespace=namespace
    )


def to_route_request(
    request: GenerateRequest,
    prompt: Prompt,
    *,
    attempt: int,
    excluded: frozenset[WorkerId],
    has_lost_kv: bool = False,
) -> RouteRequest:
    """Return routing's input for one attempt of ``request``.

    A request that has not lost KV itself avoids broken pairs; after a loss, its retry plans decide.
    """
    return RouteRequest(
        request_id=request.request_id,
        isl_tokens=prompt.isl_tokens,
        total_blocks=prompt.total_blocks,
        constraints=request.constraints,
        override=request.override,
        pin=request.pin,
        prefill_pin=request.prefill_pin,
        excluded=excluded,
        attempt=attempt,
        aggregated=request.aggregated,
        aggregated_if_broken=not has_lost_kv,
        is_guess=request.is_guess,
        shape=request.shape,
        is_prompt_unknown=request.is_prompt_unknown,
        context_tokens=max(request.context_tokens, prompt.isl_tokens + 1) if request.context_tokens else 0,
    )
