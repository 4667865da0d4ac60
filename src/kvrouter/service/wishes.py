"""What one attempt of a request asks the decision for."""

from collections.abc import Callable, Mapping

from msgspec import structs

from kvrouter.core.errors import RoutingRefused
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import GenerateRequest
from kvrouter.journey.words import Way
from kvrouter.routing.decision import Decision
from kvrouter.routing.request import RouteRequest


def wish_in(way: Way, usual: RouteRequest, kv_lost_from: frozenset[WorkerId]) -> RouteRequest:
    """Return what to ask for in one of the ways that are open; ``usual`` is what the request asks for."""
    match way:
        case Way.USUAL:
            return usual
        case Way.OTHER_PREFILL:
            return structs.replace(usual, excluded=usual.excluded | kv_lost_from)
        case Way.WHOLE:
            return structs.replace(usual, whole=True)


def decide_one_of(
    wishes: Mapping[Way, RouteRequest], decide: Callable[[RouteRequest, Prompt], Decision], prompt: Prompt
) -> tuple[RouteRequest, Decision]:
    """Decide for the first wish that is not refused, a last resort only where all others are; else raise the
    refusal of the usual one.
    """
    refusals: dict[Way, RoutingRefused] = {}
    last_resorts: list[tuple[RouteRequest, Decision]] = []
    for way, wish in wishes.items():
        try:
            decision = decide(wish, prompt)
        except RoutingRefused as refused:
            refusals[way] = refused
            continue
        if not decision.last_resort:
            return wish, decision
        last_resorts.append((wish, decision))
    if last_resorts:
        return last_resorts[0]
    raise refusals[Way.USUAL]


def route_request(
    request: GenerateRequest,
    prompt: Prompt,
    *,
    attempt: int,
    excluded: frozenset[WorkerId],
    has_lost_kv: bool = False,
) -> RouteRequest:
    """Return what routing needs to know of one attempt of ``request``.

    One that has lost no KV itself begins with what worked for others; after that its journey says what to
    try next.
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
        whole_if_parted=not has_lost_kv,
        has_media=request.has_media,
        context_tokens=max(request.context_tokens, prompt.isl_tokens + 1) if request.context_tokens else 0,
    )
