"""The columns of a leg that several cost rules read."""

import numpy as np

from kvrouter.core.requests import Leg
from kvrouter.fleet import FloatColumn
from kvrouter.routing.eligibility import fitted
from kvrouter.routing.request import LegInput

_PREFILL, _DECODE = Leg.PREFILL, Leg.DECODE
"""An enumeration's attributes are slow before Python 3.12."""


def prefill_tokens(given: LegInput) -> FloatColumn | None:
    """Return the prompt tokens that each slot would have to compute, those that are queued there included;
    None where the leg prefills nothing, or nobody counts them.
    """
    view = given.view
    if given.leg is _DECODE or not view.settings.track_prefill_tokens:
        return None
    isl_tokens, overlap = float(given.request.isl_tokens), given.overlap_blocks
    active = fitted(view.prefill_tokens, view.fleet.n_slots)
    if overlap is None:
        return np.add(active, isl_tokens)
    tokens: FloatColumn = np.multiply(overlap, -float(view.fleet.block_size))
    tokens += isl_tokens
    np.maximum(tokens, 0.0, out=tokens)
    tokens += active
    return tokens


def decode_blocks(given: LegInput) -> FloatColumn | None:
    """Return the blocks that each slot would hold for answers; None where the leg decodes nothing, or nobody
    counts them.
    """
    view = given.view
    if given.leg is _PREFILL or not view.settings.track_active_blocks:
        return None
    n_slots = view.fleet.n_slots
    active = fitted(view.active_blocks, n_slots)
    if view.not_active is None:
        return np.add(active, float(given.request.total_blocks))
    return np.add(active, fitted(view.not_active, n_slots), dtype=np.float64)
