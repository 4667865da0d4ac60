"""The types of a decision: the request, the view, the settings, the decision."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from importlib import import_module
from math import isfinite
from typing import ClassVar, NamedTuple

import msgspec

from kvrouter.core.constraints import (
    PdSelection,
    Pin,
    RouterConfigOverride,
    RouterMode,
    RoutingConstraints,
)
from kvrouter.core.cost_rules import BLOCKS, COST_RULES, TIME
from kvrouter.core.errors import ConfigError, Reason
from kvrouter.core.ids import RequestId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.core.timing import Timing
from kvrouter.kernel.fleet.columns import BoolColumn, FloatColumn, IntColumn, SlotColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.topology.links import LinkState, LinkTable
from kvrouter.kernel.topology.policy import NearFrontend, RouterTopologyDefault, TransferConstraint


class RoutingSettings(msgspec.Struct, frozen=True):
    """The decision's settings for one model; a request may override three of them.

    ``active_decode_blocks_threshold`` is a fraction of a worker's blocks, ``active_prefill_tokens_threshold``
    a number of tokens; above either one a worker is busy. ``kv_transfer_weight`` is in blocks a second of
    transfer, and counts only where ``links`` is given. ``timing`` is what an engine is taken to need for a
    step before anything is known of it; ``decode_weight`` is for how many tokens of its answer a request
    weighs the time of a decode step; ``price_weight`` how many seconds one unit of links' prices weighs.
    These count only where ``cost`` is time, and ``pd_selection`` may be joint only there. ``cost`` is a name
    of :data:`~kvrouter.core.cost_rules.COST_RULES`. With
    ``prefill_alone`` the prefill leg is all that is decided: somebody else picks decode. Raises ConfigError
    naming the setting.
    """

    mode: RouterMode = RouterMode.KV
    cost: str = BLOCKS
    pd_selection: PdSelection = PdSelection.SEQUENTIAL
    overlap_score_weight: float = 1.0
    temperature: float = 0.0
    track_active_blocks: bool = True
    track_prefill_tokens: bool = True
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    kv_transfer_weight: float = 0.0
    links: LinkTable | None = None
    topology_default: RouterTopologyDefault | None = None
    prefill_alone: bool = False
    timing: Timing = Timing()
    decode_weight: float = 8.0
    price_weight: float = 0.0
    near: NearFrontend | None = None

    def __post_init__(self) -> None:
        _check_at_least_0("overlap_score_weight", self.overlap_score_weight)
        _check_at_least_0("temperature", self.temperature)
        _check_at_least_0("kv_transfer_weight", self.kv_transfer_weight)
        _check_at_least_0("decode_weight", self.decode_weight)
        _check_at_least_0("price_weight", self.price_weight)
        if self.pd_selection is PdSelection.JOINT and self.cost != TIME:
            raise ConfigError(
                f"pd_selection: joint needs the cost of time, not {self.cost}", param="pd_selection"
            )
        if self.pd_selection is PdSelection.JOINT and self.links is None:
            raise ConfigError("links: joint needs a table of links", param="links")
        fraction = self.active_decode_blocks_threshold
        if fraction is not None and not 0.0 <= fraction <= 1.0:
            raise ConfigError(
                f"active_decode_blocks_threshold: {fraction} is not between 0 and 1",
                param="active_decode_blocks_threshold",
            )
        tokens = self.active_prefill_tokens_threshold
        if tokens is not None:
            _check_at_least_0("active_prefill_tokens_threshold", tokens)


def _check_at_least_0(name: str, number: float) -> None:
    if not (isfinite(number) and number >= 0):
        raise ConfigError(f"{name}: {number} is not 0 or more", param=name)


class RouteRequest(msgspec.Struct, frozen=True):
    """What routing needs to know of one attempt of a request.

    ``total_blocks`` counts a partial tail. ``pin`` is for the decode leg, or for the whole request when it is
    not split; ``prefill_pin`` for the prefill leg. ``excluded`` workers have failed this request before.
    ``whole`` asks for one worker that does all of it, although prefill workers are here: no KV is handed on.
    ``whole_if_broken`` asks for that where KV was lost lately between every pair that could be made.
    ``last_resort``: also workers whose circuit is open may take it, because nobody else may.
    ``context_tokens``: what the context of a worker must hold that answers, 0 where that is not known.
    ``near``: the worker that prefills is near the frontend, or cheaper there.
    ``has_media``: what engines hold of it can only be predicted, beyond the text that it begins with.
    ``shape``: of what kind the call is that an engine makes this prompt of; empty where no engine does.
    ``is_prompt_unknown``: its tokens are not known here, ``isl_tokens`` is an estimate.
    """

    request_id: RequestId
    isl_tokens: int
    total_blocks: int
    constraints: RoutingConstraints = RoutingConstraints()
    override: RouterConfigOverride = RouterConfigOverride()
    pin: Pin | None = None
    prefill_pin: Pin | None = None
    excluded: frozenset[WorkerId] = frozenset()
    attempt: int = 0
    whole: bool = False
    whole_if_broken: bool = False
    last_resort: bool = False
    has_media: bool = False
    shape: str = ""
    is_prompt_unknown: bool = False
    context_tokens: int = 0
    near: NearFrontend | None = None


class Speeds(NamedTuple):
    """What a router has learned of its worker ranks, by slot.

    ``slowness`` and ``decode_slowness``: how many times as long as the settings' timing says prompts and
    decode steps take there. ``turnover``: the natural logarithm of how fast what is cached there is replaced,
    over a calm cache; 0 or more. ``answer_s``: how many seconds an answer keeps its blocks, where that is 1.
    ``interference``: what share of the decode steps of others a prompt waits for, 0 to 1.
    """

    slowness: FloatColumn
    decode_slowness: FloatColumn
    turnover: FloatColumn
    answer_s: float
    interference: float = 1.0


class Times(NamedTuple):
    """The predicted seconds of one leg at one rank; the first three are the request's own wait."""

    queue_s: float
    """Until what is queued there is prefilled."""
    prefill_s: float
    """To prefill what of the prompt is not cached there."""
    memory_s: float
    """Until there is KV memory and a seat."""
    decode_s: float
    """What the steps of its answer take, as many as ``decode_weight`` says."""
    others_s: float
    """What those who wait there wait longer for it."""
    turnover_s: float
    """What later requests lose, as its KV is replaced sooner there than in a calm cache."""
    transfer_s: float
    """To move its KV there."""
    price_s: float = 0.0
    """What the price of moving its KV there weighs."""

    @property
    def expected_s(self) -> float:
        """What the leg itself is expected to take to its first token."""
        return self.queue_s + self.prefill_s + self.memory_s + self.transfer_s


class CostInput(NamedTuple):
    """What other costs than that of blocks read: the ledger's requests by slot, those of them whose first
    token has not come, what was learned of ranks, and what travels over links; None where nobody counts.
    """

    requests: IntColumn
    waiting: IntColumn
    speeds: Speeds | None = None
    transfers: LinkState | None = None


class View(msgspec.Struct, frozen=True):
    """One reading of everything that the decision depends on; each column has a slot's entry at its index
    and at least ``fleet.n_slots`` entries. The time rule's are C-contiguous, those of an index's blocks and
    ``not_active`` of 32 bits without a sign, and other counts of 64 bits.

    ``overlap_blocks``: leading blocks of the request that are there; None when no index is kept.
    ``prefill_tokens``, ``active_blocks``: the ledger's load. ``not_active``: the request's blocks that are
    not among the active ones there; None says that all of them are new everywhere. ``seed`` is for draws,
    ``turn`` counts requests for round-robin. ``unseen`` is how many requests other routers have placed, as
    may be expected, that are not in the load yet. ``tokens_at_report``, ``blocks_at_report``: the ledger's
    load when the slot's latest load report was taken; None where all that is booked is in the report.
    ``rule`` costs and picks instead of the settings' cost and mode. ``cost_input`` is None under rules that
    need none of it.
    """

    fleet: Fleet
    settings: RoutingSettings
    overlap_blocks: IntColumn | None
    prefill_tokens: IntColumn
    active_blocks: IntColumn
    not_active: IntColumn | None
    seed: int = 0
    turn: int = 0
    unseen: float = 0.0
    tokens_at_report: IntColumn | None = None
    blocks_at_report: IntColumn | None = None
    rule: "PickingRule | None" = None
    cost_input: CostInput | None = None


class Timed(NamedTuple):
    """What the time rule says of one slot."""

    prefill_blocks: float
    decode_blocks: float
    times: Times


class Columns(msgspec.Struct, frozen=True, gc=False):
    """What a rule says of one leg, with an entry per slot, eligible or not; the ``cost`` is multiplied later,
    in place. A column that would be the same nothing everywhere is None.

    ``timed`` has the blocks to prefill and to decode of a slot that holds so many leading blocks, and its
    times, where the columns of blocks are not made. ``is_masked``: slots that may not take the leg cost
    infinity already.
    """

    cost: FloatColumn
    prefill_blocks: FloatColumn | None = None
    decode_blocks: FloatColumn | None = None
    timed: Callable[[Slot, int], Timed] | None = None
    is_masked: bool = False


class Costs(msgspec.Struct, frozen=True, gc=False):
    """The columns of one leg: a rule's, and what is the same under every rule."""

    overlap_blocks: IntColumn | None
    transfer_blocks: FloatColumn | None
    multiplier: FloatColumn | None
    columns: Columns

    @property
    def cost(self) -> FloatColumn:
        """What the leg costs at each slot."""
        return self.columns.cost


class LegInput(msgspec.Struct, frozen=True, gc=False):
    """One leg of one request, as a cost rule is asked for it; columns have an entry per slot.

    ``prefill_slot`` is where a decode leg's KV comes from, ``transfer_s`` the seconds that it travels, where
    links are weighed, and ``transfer_blocks`` these times ``kv_transfer_weight``. Slots that are not
    ``among`` these may cost infinity; None: all of them need a cost. ``stalls``: it is for decode workers
    that prefill for themselves.
    """

    request: RouteRequest
    view: View
    leg: Leg
    overlap_score_weight: float
    overlap_blocks: IntColumn | None
    transfer_s: FloatColumn | None
    transfer_blocks: FloatColumn | None
    among: BoolColumn | None
    prefill_slot: Slot | None
    stalls: bool


class Needs(NamedTuple):
    """What a cost rule reads beyond tokens and blocks.

    ``requests``: how many there are at each rank (:class:`CostInput`). ``learned``: the speeds of ranks and
    links, which a router learns from its requests under such a rule, beginning with links that are assumed.
    """

    requests: bool = False
    learned: bool = False


class CostRule(ABC):
    """What a rank costs, where the cheapest is picked."""

    needs: ClassVar[Needs] = Needs()

    @abstractmethod
    def columns(self, given: LegInput) -> Columns:
        """Return what the leg costs at each slot, in arrays of its own."""

    @abstractmethod
    def own_cost(self, request: RouteRequest, view: View, leg: Leg, overlap_score_weight: float) -> float:
        """Return what the leg of such a request adds to the cost of a rank that holds nothing of it."""


class PickInput(NamedTuple):
    """What a rule picks among. ``allowed``: the slots that may take the leg, at least one, in the order of
    ranks; ``draw`` is 64 random bits.
    """

    request: RouteRequest
    leg: Leg
    allowed: SlotColumn
    draw: int


class PickingRule(CostRule):
    """A cost rule that picks by itself, and knows no preferred taints; the masks, pins and domains are the
    same for every rule.
    """

    @abstractmethod
    def pick(self, cost: FloatColumn, given: PickInput) -> Slot:
        """Return one of the allowed slots."""


@cache
def cost_rule(name: str) -> CostRule:
    """Return the rule of this name; the same one again."""
    rule: CostRule = import_module(COST_RULES[name]).RULE
    return rule


class Pick(msgspec.Struct, frozen=True, gc=False):
    """The worker rank that takes one leg, with the parts of its cost, in blocks.

    Under the blocks rule cost = (overlap_score_weight · prefill_blocks + decode_blocks + transfer_blocks) ·
    multiplier; the other rules' costs are in :mod:`kvrouter.kernel.routing.costs`. ``times`` is None unless
    the cost is time. ``candidates`` counts the ranks that could have taken the leg. ``unseen`` is how many
    requests like this one were taken to be on their way, from other routers, to the ranks that are cheapest.
    """

    slot: Slot
    rank: WorkerRank
    leg: Leg
    overlap_blocks: int
    prefill_blocks: float
    decode_blocks: float
    transfer_blocks: float
    multiplier: float
    cost: float
    candidates: int
    unseen: int = 0
    times: Times | None = None


class Candidate(msgspec.Struct, frozen=True):
    """One row of an explanation: one worker rank that was asked for the leg, and its first refusal if any.

    Those are the ranks of the leg's role, or all ranks where none has it. The parts of the cost are those of
    :class:`Pick`; a refused rank has them too.

    Where pairs are chosen together, ``pair_cost`` is what the whole request costs here: with ``partner``, the
    best decode rank for a prefill rank and the best prefill rank for a decode rank; without one where a
    decode rank would prefill for itself. None where it may not go.
    """

    slot: Slot
    rank: WorkerRank
    leg: Leg
    overlap_blocks: int
    prefill_blocks: float
    decode_blocks: float
    transfer_blocks: float
    multiplier: float
    cost: float
    refused: Reason | None
    picked: bool
    times: Times | None = None
    pair_cost: float | None = None
    partner: WorkerRank | None = None


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where one attempt of a request goes.

    ``prefill`` is None when the request is not split: ``decode`` then takes all of it, or its prefill leg
    where that is all that is decided, as ``decode.leg`` says. ``constraint`` is what the prefill worker asks
    of any decode worker, and holds when decode is picked again. ``fallback_used`` says that no decode worker
    of the domain could take it; ``cross_domain`` that the pair is not known to share the policy's domain
    value; ``last_resort`` that nobody was left whose circuit is closed; ``together`` that pairs, and decode
    workers that prefill for themselves, were compared by what they cost together. ``rows`` is empty unless an
    explanation was asked for.
    """

    request_id: RequestId
    attempt: int
    mode: RouterMode
    decode: Pick
    prefill: Pick | None = None
    constraint: TransferConstraint | None = None
    fallback_used: bool = False
    cross_domain: bool = False
    last_resort: bool = False
    together: bool = False
    rows: tuple[Candidate, ...] = ()
