"""The input and output types of routing: settings, request, view, cost rule, pick and decision."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from importlib import import_module
from math import inf, isfinite
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
from kvrouter.core.requests import Leg, ServiceLevel
from kvrouter.core.timing import Timing
from kvrouter.core.workers import KvPeer
from kvrouter.kernel.fleet.columns import BoolColumn, FloatColumn, IntColumn, SlotColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.topology.link_table import LinkState, LinkTable
from kvrouter.kernel.topology.policy import NearFrontend, RouterTopologyDefault, TransferConstraint


class RoutingSettings(msgspec.Struct, frozen=True):
    """The decision's settings for one model; a request may override three of them.

    ``active_decode_blocks_threshold`` is a fraction of a worker's blocks, ``active_prefill_tokens_threshold``
    a number of tokens; a worker above either is busy. ``kv_transfer_weight`` is in blocks per second of
    transfer, and has an effect only with ``links``. ``timing`` is the assumed duration of an engine's step
    before any measurement; ``decode_weight`` the number of answer tokens whose decode steps count;
    ``price_weight`` the seconds per unit of links' prices. These three have an effect only if ``cost`` is
    time, and ``pd_selection`` may be joint only then. ``cost`` is a name of
    :data:`~kvrouter.core.cost_rules.COST_RULES`, and ``cost_reason`` says why it is in use. With
    ``prefill_alone`` only the prefill leg is decided: another program picks decode. ``slo_ttft_s``: the time
    to the first token within which a request's answer is of use; None for any. Raises ConfigError naming the
    setting.
    """

    mode: RouterMode = RouterMode.KV
    cost: str = BLOCKS
    cost_reason: str = ""
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
    slo_ttft_s: float | None = None

    def ttft_limit_s(self, level: ServiceLevel) -> float:
        """Return the time to the first token within which an answer is of use; infinity for any."""
        return level.ttft_slo_s or self.slo_ttft_s or inf

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
    """Routing's input for one attempt of a request.

    ``total_blocks`` counts a partial tail. ``pin`` is for the decode leg or an aggregated request;
    ``prefill_pin`` for the prefill leg. ``excluded`` workers have failed this request before. ``aggregated``
    asks for one worker for the full request even if there are prefill workers, so that no KV is transferred.
    ``aggregated_if_broken`` asks for that when KV was lost lately between every possible pair.
    ``last_resort``: workers with an open circuit may take it too, because no other worker may.
    ``context_tokens``: the context that the answering worker needs, 0 when unknown. ``near``: the prefill
    worker must be near the frontend, or is cheaper there. ``kv_sender`` computed the KV that waits for a
    decode rank that is picked again. ``is_guess``: engines report none of its blocks by these names, or none
    beyond the text before the first media, so that decisions predict them. ``shape``: the kind of call from
    which an engine builds this prompt; empty when no engine does. ``is_prompt_unknown``: the tokens are
    unknown, and ``isl_tokens`` is an estimate.
    ``soonest``: of the time rule's cost only the seconds to the first token count.
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
    aggregated: bool = False
    aggregated_if_broken: bool = False
    last_resort: bool = False
    is_guess: bool = False
    shape: str = ""
    is_prompt_unknown: bool = False
    context_tokens: int = 0
    near: NearFrontend | None = None
    kv_sender: KvPeer | None = None
    soonest: bool = False


class Speeds(msgspec.Struct, frozen=True, gc=False):
    """The learned speeds of worker ranks, by slot.

    ``slowness`` and ``decode_slowness``: the duration of prompts and of decode steps, over the settings'
    timing. ``turnover``: the natural logarithm of the rate at which the cache is replaced, over a calm
    cache's; 0 or more. ``step_began_s``: when the step that runs began, as far as first tokens show;
    negative infinity where that is unknown. ``now_s`` is on its clock. ``answer_s``: the seconds that an
    answer holds its blocks at slowness 1.
    ``interference``: the share of other requests' decode steps that a prompt waits for, 0 to 1.
    """

    slowness: FloatColumn
    decode_slowness: FloatColumn
    turnover: FloatColumn
    step_began_s: FloatColumn
    now_s: float
    answer_s: float
    interference: float = 1.0


class Times(NamedTuple):
    """The predicted seconds of one leg at one rank. The first three are the request's own waiting time."""

    queue_s: float
    """Until the prompts queued at the rank are prefilled."""
    prefill_s: float
    """To prefill the prompt tokens that are not cached at the rank."""
    memory_s: float
    """Until the rank has free KV memory and a free seat."""
    decode_s: float
    """Of ``decode_weight`` decode steps of the answer."""
    others_s: float
    """The delay of other requests at the rank."""
    turnover_s: float
    """The loss of later requests, because the rank replaces cached KV sooner than a calm cache."""
    transfer_s: float
    """To transfer the KV to the rank."""
    price_s: float = 0.0
    """The price of that transfer, weighed in seconds."""

    @property
    def expected_s(self) -> float:
        """The predicted seconds from placing the leg to its first token."""
        return self.queue_s + self.prefill_s + self.memory_s + self.transfer_s


class CostInput(msgspec.Struct, frozen=True, gc=False):
    """Input of cost rules beyond tokens and blocks: the ledger's requests by slot, those without a first
    token, the learned speeds of ranks, and the loads of links; None when they are not kept.
    """

    requests: IntColumn
    waiting: IntColumn
    speeds: Speeds | None = None
    transfers: LinkState | None = None


class View(msgspec.Struct, frozen=True):
    """One reading of all state that a decision depends on. Each column has a slot's entry at its index and at
    least ``fleet.n_slots`` entries. The columns that the time rule reads are C-contiguous; an index's blocks
    and ``not_active`` are unsigned 32-bit, other counts 64-bit.

    ``overlap_blocks``: the leading blocks of the request that the slot holds; None without an index.
    ``prefill_tokens``, ``active_blocks``: the ledger's load. ``not_active``: the request's blocks that are
    not active at the slot; None: all of them are new everywhere. ``seed`` is for draws, ``turn`` counts
    requests for round-robin. ``unseen`` is the expected number of requests that other routers have placed and
    that are not in the load yet. ``tokens_at_report``, ``blocks_at_report``: the ledger's load when the
    slot's latest load report was taken; None: reports include all bookings. ``rule`` replaces the settings'
    cost and mode. ``cost_input`` is None under rules that do not need it. ``not_busy``: the slots below every
    busy threshold, where that was computed before; None: it is computed from the loads.
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
    not_busy: BoolColumn | None = None


class Timed(msgspec.Struct, frozen=True, gc=False):
    """The time rule's blocks and times of one slot."""

    prefill_blocks: float
    decode_blocks: float
    times: Times


class Columns(msgspec.Struct, frozen=True, gc=False):
    """A rule's result for one leg, with an entry per slot, eligible or not; the multiplier is later applied
    to ``cost`` in place. A column that would be 0 everywhere is None.

    ``timed(slot, overlap_blocks)`` returns the blocks and times of one slot, for a rule that does not compute
    the columns of blocks.
    """

    cost: FloatColumn
    prefill_blocks: FloatColumn | None = None
    decode_blocks: FloatColumn | None = None
    timed: Callable[[Slot, int], Timed] | None = None


class Costs(msgspec.Struct, frozen=True, gc=False):
    """The cost columns of one leg: the rule's, and those that are the same under every rule."""

    overlap_blocks: IntColumn | None
    transfer_blocks: FloatColumn | None
    multiplier: FloatColumn | None
    columns: Columns

    @property
    def cost(self) -> FloatColumn:
        """The cost of the leg at each slot."""
        return self.columns.cost


class LegInput(msgspec.Struct, frozen=True, gc=False):
    """A cost rule's input for one leg of one request; columns have an entry per slot.

    ``prefill_slot`` is the source of a decode leg's KV, ``transfer_s`` the seconds of its transfer, when
    links are weighed, and ``transfer_blocks`` these times ``kv_transfer_weight``. Slots that are not
    ``among`` the given ones may cost infinity; None: every slot needs a cost. ``stalls``: the leg is for
    decode workers that prefill for themselves.
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
    """The input that a cost rule needs beyond tokens and blocks.

    ``requests``: the requests at each rank (:class:`CostInput`). ``learned``: the speeds of ranks and links,
    which a router learns from its requests under this rule, starting from assumed links.
    """

    requests: bool = False
    learned: bool = False


class CostRule(ABC):
    """A rule for the cost of a leg at each rank; the rank with the lowest cost is picked."""

    needs: ClassVar[Needs] = Needs()

    @abstractmethod
    def columns(self, leg_input: LegInput) -> Columns:
        """Return the cost of the leg at each slot, in new arrays."""

    @abstractmethod
    def own_cost(self, request: RouteRequest, view: View, leg: Leg, overlap_score_weight: float) -> float:
        """Return the cost that a leg of this kind adds to a rank without any of its blocks."""


class PickInput(NamedTuple):
    """A rule's input for a pick. ``allowed``: the slots that may take the leg, at least one, in the order of
    ranks; ``draw`` is 64 random bits.
    """

    request: RouteRequest
    leg: Leg
    allowed: SlotColumn
    draw: int


class PickingRule(CostRule):
    """A cost rule with its own pick, without preferred taints; masks, pins and domains still apply."""

    @abstractmethod
    def pick(self, cost: FloatColumn, pick_input: PickInput) -> Slot:
        """Return one of the allowed slots."""


@cache
def cost_rule(name: str) -> CostRule:
    """Return the rule of this name; always the same object."""
    rule: CostRule = import_module(COST_RULES[name]).RULE
    return rule


class Pick(msgspec.Struct, frozen=True, gc=False):
    """The worker rank that takes one leg, with the parts of its cost, in blocks.

    Under the blocks rule cost = (overlap_score_weight · prefill_blocks + decode_blocks + transfer_blocks) ·
    multiplier; the other rules' costs are in :mod:`kvrouter.kernel.routing.costs`. ``times`` is None unless
    the cost is time. ``candidates`` counts the ranks that could have taken the leg. ``unseen`` is the number
    of requests from other routers that were assumed to be in flight to the cheapest ranks. ``pulled_blocks``
    are the prompt's first blocks of which a prefill rank fetches what it lacks from the decode rank; 0 where
    it computes.
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
    pulled_blocks: int = 0


class Candidate(msgspec.Struct, frozen=True):
    """One row of an explanation: one candidate rank of the leg, and its first refusal if any.

    The candidates are the ranks of the leg's role, or all ranks when no rank has it. The parts of the cost
    are those of :class:`Pick`; a refused rank has them too.

    For jointly chosen pairs, ``pair_cost`` is the cost of the full request with this rank: with ``partner``,
    the best decode rank for a prefill rank and the best prefill rank for a decode rank; without one for a
    decode rank that would prefill for itself. None when the rank is refused.
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
    """The destination of one attempt of a request.

    ``prefill`` is None when the request is not split: ``decode`` then takes all of it, or its prefill leg if
    only that is decided, as ``decode.leg`` says. ``constraint`` is the prefill worker's constraint on the
    decode worker, which also holds when decode is picked again. ``fallback_used``: no decode worker of the
    domain could take it; ``cross_domain``: the pair is not known to share the policy's domain value;
    ``last_resort``: only workers with an open circuit were left; ``together``: pairs, and decode workers that
    prefill for themselves, were compared by their joint cost. ``rows`` is empty unless an explanation was
    asked for.
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

    @property
    def prefilling(self) -> Pick:
        """The pick that prefills: the prefill worker of a pair, else the one worker."""
        return self.decode if self.prefill is None else self.prefill
