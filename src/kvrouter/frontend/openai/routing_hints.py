"""Routing hints of a request, checked as far as possible without a fleet."""

from collections.abc import Iterable

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import Taint
from kvrouter.frontend.openai.schema import NvExt
from kvrouter.topology.policy import named_domain

TAINTS_MAX = 32
TAINT_CHARS_MAX = 512


def check_wishes(nvext: NvExt, *, at: str = "nvext.") -> None:
    """Raise :class:`InvalidRequest` naming the field of a hint that cannot be meant, or that nobody can meet.

    ``at`` is what stands before a field's name: where the hints are in what the caller gave. A taint may be
    both required and avoided (a negative preference): that contradicts nothing.
    """
    constraints, override = nvext.routing_constraints, nvext.router_config_override
    required = f"{at}routing_constraints.required_taints"
    _check_taints(required, constraints.required_taints)
    _check_taints(f"{at}routing_constraints.preferred_taints", constraints.preferred_taints)
    decode = f"{at}routing_constraints.required_decode_taints"
    _check_taints(decode, constraints.required_decode_taints)
    _check_one_value_each(required, constraints.required_taints)
    _check_one_value_each(decode, constraints.required(prefill=False))
    for field, number in (
        ("overlap_score_weight", override.overlap_score_weight),
        ("router_temperature", override.router_temperature),
    ):
        if number is not None and number < 0:
            raise _wrong(f"{at}router_config_override.{field}", f"must be 0 or more, not {number}")
    for rank_field, rank, worker_field, worker in (
        ("dp_rank", nvext.dp_rank, "worker_id", nvext.worker_id),
        ("prefill_dp_rank", nvext.prefill_dp_rank, "prefill_worker_id", nvext.prefill_worker_id),
    ):
        if rank is not None and worker is None:
            raise _wrong(f"{at}{rank_field}", f"only together with {at}{worker_field}")


def _check_taints(path: str, taints: Iterable[Taint]) -> None:
    for count, taint in enumerate(taints, start=1):
        if count > TAINTS_MAX:
            raise _wrong(path, f"at most {TAINTS_MAX} taints")
        if not taint.strip():
            raise _wrong(path, "a taint is empty")
        if len(taint) > TAINT_CHARS_MAX:
            raise _wrong(path, f"a taint has at most {TAINT_CHARS_MAX} characters")
        place = named_domain(taint)
        if place is not None and not all(place):
            raise _wrong(path, f"{taint!r} must name a domain and a value, as dynamo.topology/zone=a does")


def _check_one_value_each(path: str, required: Iterable[Taint]) -> None:
    """No worker is in two places: a domain with two required values can never be met."""
    value_of: dict[str, str] = {}
    for taint in sorted(required):
        place = named_domain(taint)
        if place is None:
            continue
        domain, value = place
        other = value_of.setdefault(domain, value)
        if other != value:
            raise _wrong(path, f"no worker has two values of {domain!r}: {other!r} and {value!r} contradict")


def _wrong(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {what}", param=path)
