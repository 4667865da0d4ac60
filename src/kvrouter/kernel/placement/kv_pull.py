"""Whether the prefill rank of a pair fetches a prompt's first blocks from the decode rank.

A decode worker has the KV of a conversation's earlier answers, which its prefill worker would compute anew.
The prefill rank fetches what it lacks if that is expected to be sooner::

    ask_s + transfer_s < slowness · (prefill_s of all − prefill_s of the rest) · (1 + 0.5 · waiting requests)

``transfer_s`` is that of the link between the two, and 0 without a table of links. The last factor is what
the requests that wait at the prefill rank gain, as in :mod:`kvrouter.kernel.routing.costs.time`.
"""

from msgspec import structs

from kvrouter.core.ids import Slot
from kvrouter.core.workers import WorkerCard
from kvrouter.kernel.routing.costs.time import OTHERS_WEIGHT, prompt_s
from kvrouter.kernel.routing.fleet_links import kv_bytes_per_token, links_of
from kvrouter.kernel.routing.interface import Decision, View
from kvrouter.kernel.routing.masks import constraint_of
from kvrouter.kernel.topology.policy import Required

ASK_S = 0.02
"""The assumed seconds until a decode worker says where it keeps its KV: a step of its batch, and a call."""


def with_pulled_blocks(decision: Decision, view: View, *, isl_tokens: int) -> Decision:
    """Return the decision with the blocks that the prefill rank of its pair fetches from the decode rank."""
    blocks = _pulled_blocks(decision, view, isl_tokens)
    if decision.prefill is None or not blocks:
        return decision
    return structs.replace(decision, prefill=structs.replace(decision.prefill, pulled_blocks=blocks))


def _pulled_blocks(decision: Decision, view: View, isl_tokens: int) -> int:
    """Return how many of the prompt's first blocks the prefill rank will have if it fetches from the decode
    rank what it lacks; 0 where it may not, or computes them sooner. A decode rank where requests wait would
    answer after them.
    """
    fleet, settings = view.fleet, view.settings
    prefill, decode = decision.prefill, decision.decode
    if prefill is None or decode.overlap_blocks <= prefill.overlap_blocks:
        return 0
    if fleet.columns.report_waiting_requests.item(decode.slot):
        return 0
    if not _can_send(fleet.card_at(decode.slot), fleet.card_at(prefill.slot)):
        return 0
    if not _may_send(view, decode.slot, prefill.slot):
        return 0
    lacking_tokens = isl_tokens - prefill.overlap_blocks * fleet.block_size
    rest_tokens = max(1, isl_tokens - decode.overlap_blocks * fleet.block_size)
    saved_s = prompt_s(settings.timing, lacking_tokens) - prompt_s(settings.timing, rest_tokens)
    cost_input = view.cost_input
    if cost_input is not None:
        saved_s *= 1.0 + OTHERS_WEIGHT * cost_input.waiting.item(prefill.slot)
        if cost_input.speeds is not None:
            saved_s *= cost_input.speeds.slowness.item(prefill.slot)
    fetch_s = ASK_S
    if settings.links is not None:
        kv_bytes = float((lacking_tokens - rest_tokens) * kv_bytes_per_token(fleet, prefill.slot))
        fetch_s += links_of(fleet, settings.links).transfer(prefill.slot, decode.slot, kv_bytes)[0]
    return decode.overlap_blocks if fetch_s < saved_s else 0


def _can_send(sender: WorkerCard | None, receiver: WorkerCard | None) -> bool:
    """Whether the engines of both send KV in this direction; a bootstrap handoff leaves no time for it."""
    if sender is None or receiver is None:
        return False
    is_bootstrap = receiver.runtime_config.bootstrap_host is not None
    return sender.bidirectional_kv and receiver.bidirectional_kv and not is_bootstrap


def _may_send(view: View, sender: Slot, receiver: Slot) -> bool:
    """Whether the sender's own policy lets its KV go to the receiver."""
    constraint = constraint_of(view.fleet, sender, view.settings.topology_default)
    if constraint is None or not isinstance(constraint.policy, Required):
        return True
    card = view.fleet.card_at(receiver)
    value = None if card is None else card.runtime_config.domains.get(constraint.policy.domain)
    return value is not None and value == constraint.value
