"""Checks the routing hints of a call against the fleet: pinned workers, their roles, taints and domains."""

from collections.abc import Iterable

from kvrouter.core.constraints import Pin, RouterConfigOverride, RouterMode
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import Taint, WorkerRank
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.frontend.errors import UnknownWorker
from kvrouter.frontend.openai.parse import NO_HINTS, Call
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.cache_view import NoCacheView
from kvrouter.kernel.routing.interface import RoutingSettings
from kvrouter.kernel.routing.pick import rules_of
from kvrouter.kernel.topology.policy import Required, RouterTopologyDefault, derive
from kvrouter.router.model_router import ModelRouter

_PIN = "nvext.worker_id"
_PREFILL_PIN = "nvext.prefill_worker_id"
_REQUIRED = "nvext.routing_constraints.required_taints"
_REQUIRED_DECODE = "nvext.routing_constraints.required_decode_taints"
_OVERRIDE = "nvext.router_config_override"


def check_pins(call: Call, model: ModelRouter) -> None:
    """Raise :class:`InvalidRequest` naming the field of a hint that ``model`` cannot meet."""
    if call.nvext is NO_HINTS:
        return
    if isinstance(model.cache, NoCacheView):
        _check_override(call.override, model.placer.settings)
    fleet = model.fleet
    receiver = _pinned(fleet, call.pin, field=_PIN, rank_field="nvext.dp_rank")
    sender = _pinned(fleet, call.prefill_pin, field=_PREFILL_PIN, rank_field="nvext.prefill_dp_rank")
    if receiver is not None:
        _check_receiver_role(receiver)
    if sender is not None:
        _check_sender_role(sender, fleet)
    required, of_decode = call.constraints.required_taints, call.constraints.required_decode_taints
    for card, field, at, taints in (
        (receiver, _PIN, _REQUIRED, required),
        (receiver, _PIN, _REQUIRED_DECODE, of_decode),
        (sender, _PREFILL_PIN, _REQUIRED, required),
    ):
        if card is not None:
            _check_taints(taints, card, fleet, field=field, at=at)
    if receiver is not None and sender is not None:
        _check_domain(sender, receiver, model.placer.settings.topology_default)


def _check_override(override: RouterConfigOverride, settings: RoutingSettings) -> None:
    """Refuse an override that weighs overlap: without an index the overlap is unknown."""
    why = f"no index is kept by this router (its mode is {settings.mode.value}, its overlap_score_weight "
    why += f"{settings.overlap_score_weight:g}), so there is no overlap to weigh"
    if override.overlap_score_weight is not None and override.overlap_score_weight > 0:
        raise _wrong(f"{_OVERRIDE}.overlap_score_weight", why)
    if override.router_mode is RouterMode.KV and rules_of(settings, override).overlap_score_weight > 0:
        raise _wrong(
            f"{_OVERRIDE}.router_mode", f"{why}; together with overlap_score_weight 0, kv weighs load alone"
        )


def _pinned(fleet: Fleet, pin: Pin | None, *, field: str, rank_field: str) -> WorkerCard | None:
    """Return the card of the pinned worker; None without a pin. Raises UnknownWorker."""
    if pin is None:
        return None
    card = fleet.card(pin.worker_id)
    if card is None:
        raise UnknownWorker(f"{field}: no worker {pin.worker_id} is here", param=field)
    if pin.dp_rank is not None and fleet.slot_of(WorkerRank(pin.worker_id, pin.dp_rank)) is None:
        raise UnknownWorker(
            f"{rank_field}: worker {pin.worker_id} has no rank {pin.dp_rank}", param=rank_field
        )
    return card


def _check_receiver_role(card: WorkerCard) -> None:
    if card.role is Role.PREFILL:
        raise _wrong(_PIN, f"worker {card.worker_id} only prefills: {_PREFILL_PIN} is the field for it")


def _check_sender_role(card: WorkerCard, fleet: Fleet) -> None:
    if card.role is Role.PREFILL:
        return
    why = f"worker {card.worker_id} has the role {card.role}, not prefill"
    if not any(other.role is Role.PREFILL for other in fleet):
        why += f"; no worker of {fleet.model!r} has it, so requests are not split"
    raise _wrong(_PREFILL_PIN, why)


def _check_taints(taints: Iterable[Taint], card: WorkerCard, fleet: Fleet, *, field: str, at: str) -> None:
    """Refuse a pinned worker that lacks a taint required of its leg."""
    slot = fleet.slots_of(card.worker_id)[0]  # all ranks of a worker carry the same taints
    missing = [taint for taint in taints if not fleet.places.carries(taint)[slot]]
    if missing:
        names = ", ".join(map(repr, sorted(missing)))
        raise _wrong(at, f"worker {card.worker_id}, which {field} asks for, does not carry {names}")


def _check_domain(
    sender: WorkerCard, receiver: WorkerCard, router_default: RouterTopologyDefault | None
) -> None:
    constraint = derive(sender.runtime_config, router_default=router_default)
    if constraint is None or not isinstance(constraint.policy, Required):
        return
    domain, sender_value = constraint.domain, constraint.value
    receiver_value = receiver.runtime_config.domains.get(domain)
    if sender_value is None or receiver_value is None or sender_value == receiver_value:
        return
    raise _wrong(
        _PIN,
        f"worker {receiver.worker_id} is in {domain}={receiver_value}, and KV of worker {sender.worker_id}, "
        f"which {_PREFILL_PIN} asks for, may not leave {domain}={sender_value}",
    )


def _wrong(field: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {why}", param=field)
