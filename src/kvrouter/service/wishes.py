"""What one attempt of a request asks the decision for."""

from msgspec import structs

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import GenerateRequest
from kvrouter.journey.words import Way
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


def route_request(
    request: GenerateRequest, prompt: Prompt, *, attempt: int, excluded: frozenset[WorkerId]
) -> RouteRequest:
    """Return what routing needs to know of one attempt of ``request``."""
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
        has_media=request.has_media,
    )
