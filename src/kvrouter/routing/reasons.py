"""Why a rank was refused, step by step, for refusals and explanations: masks that are the decision's own."""

import numpy as np

from kvrouter.core.errors import Reason
from kvrouter.fleet import UNKNOWN_VALUE, BoolColumn, Fleet
from kvrouter.routing.eligibility import Step
from kvrouter.routing.pair import Groups, Tiers, shares_domain
from kvrouter.topology import Fallback, Preferred, TransferConstraint


def busy_steps(not_busy: BoolColumn | None) -> tuple[Step, ...]:
    """The step that a busy rank does not pass."""
    return () if not_busy is None else (Step(Reason.BUSY, not_busy),)


def handoff_steps(reached: BoolColumn | None) -> tuple[Step, ...]:
    """The step that a rank does not pass whose KV did not arrive lately, or that it did not arrive at."""
    return () if reached is None else (Step(Reason.KV_LOST, reached),)


def decode_steps(fleet: Fleet, constraint: TransferConstraint | None) -> tuple[Step, ...]:
    """The steps of a decode rank that must share the domain of one prefill worker."""
    if constraint is None or isinstance(constraint.policy, Preferred):
        return ()
    known = fleet.domain_ids(constraint.domain) != UNKNOWN_VALUE
    if constraint.value is None:
        known = np.zeros(fleet.n_slots, np.bool_)
    return (
        Step(Reason.DOMAIN_UNKNOWN, known),
        Step(Reason.DOMAIN_MISMATCH, shares_domain(fleet, constraint)),
    )


def prefill_steps(fleet: Fleet, groups: Groups, passed: BoolColumn) -> tuple[Step, ...]:
    """The steps of a prefill rank that must have a decode rank in its domain; ``passed`` have."""
    known = passed | groups.unbound
    for group in groups.bound:
        known = known | (group.members & (fleet.domain_ids(group.policy.domain) != UNKNOWN_VALUE))
    return (Step(Reason.DOMAIN_UNKNOWN, known), Step(Reason.DOMAIN_MISMATCH, passed))


def reach_steps(fleet: Fleet, groups: Groups, prefill: BoolColumn, domain: str | None) -> tuple[Step, ...]:
    """The steps of a decode rank that some of the ``prefill`` ranks must be able to send KV to.

    ``domain`` is the one that the refusal names.
    """
    everybody = np.ones(fleet.n_slots, np.bool_)
    if domain is None or (prefill & groups.unbound).any():
        return ()
    reached = ~everybody
    for group in groups.bound:
        senders = group.members & prefill
        if isinstance(group.policy, Fallback) and senders.any():
            return ()
        ids = fleet.domain_ids(group.policy.domain)
        values = np.zeros(fleet.n_domain_ids(group.policy.domain) + 1, np.bool_)
        values[ids[senders]] = True
        values[UNKNOWN_VALUE] = False
        reached = reached | values[ids]
    ids = fleet.domain_ids(domain)
    senders_known = bool((ids[prefill] != UNKNOWN_VALUE).any())
    known = reached | (ids != UNKNOWN_VALUE) if senders_known else reached
    return (Step(Reason.DOMAIN_UNKNOWN, known), Step(Reason.DOMAIN_MISMATCH, reached))


def has_legal_decode(tiers: Tiers) -> BoolColumn:
    """The prefill ranks that some decode rank may follow, at home or away."""
    return tiers.home | tiers.away
