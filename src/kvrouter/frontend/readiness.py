"""Whether a plain request could be placed: the decision itself is asked, and nothing is booked."""

from array import array
from collections.abc import Callable, Sequence

from kvrouter.core.errors import NoEligibleWorker, RoutingRefused
from kvrouter.core.ids import RequestId
from kvrouter.routing.request import RouteRequest
from kvrouter.service.model_router import ModelRouter

_PROBE = RequestId("ready")

Awaited = Callable[[], Sequence[str]]
"""Tells which engines are to come and have not come yet: a line for each, with why."""


def nobody_awaited() -> Sequence[str]:
    """Whoever comes is found by discovery: nobody is known beforehand."""
    return ()


def why_not_ready(model: ModelRouter) -> str | None:
    """Why no worker, or no pair, of ``model`` may take a request of one token; None when one may.

    Workers that are busy make nobody unready: the fleet is whole, and they will be free again.
    """
    prompt = model.hash_prompt(array("I", (0,)))
    probe = RouteRequest(_PROBE, isl_tokens=prompt.isl_tokens, total_blocks=prompt.total_blocks)
    try:
        model.decide(probe, prompt)
    except NoEligibleWorker as refused:
        return refused.message
    except RoutingRefused:
        return None
    return None
