"""Answers of ``POST /v1/route/explain`` and ``GET /v1/decisions``: decisions, candidates, costs."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvrouter.api.fleet_schema import Policy


class Times(Struct, frozen=True, kw_only=True):
    """The parts of a predicted time, and the expected time of the leg itself, in milliseconds."""

    expected_ms: float
    queue_ms: float
    prefill_ms: float
    memory_ms: float
    decode_ms: float
    others_ms: float
    turnover_ms: float
    transfer_ms: float
    price_ms: float = 0.0


class RankId(Struct, frozen=True, kw_only=True):
    """A worker rank that was picked, or the partner in a pair."""

    worker_id: int
    dp_rank: int


class Candidate(RankId, frozen=True, kw_only=True):
    """One candidate worker rank of a decision, with the parts of its cost in blocks."""

    eligible: bool
    reason: str | None
    domains: Mapping[str, str]
    overlap_blocks: int
    prefill_blocks: float
    decode_blocks: float
    transfer_blocks: float
    multiplier: float
    cost: float | None
    times: Times | None = None
    pair_cost: float | None = None
    partner: RankId | None = None
    chosen: bool


class Leg(Struct, frozen=True, kw_only=True):
    """One leg: its candidates, and the picked one."""

    chosen: RankId | None
    candidates: Sequence[Candidate]


class Legs(Struct, frozen=True, kw_only=True):
    """The candidates of each leg."""

    prefill: Leg | None
    decode: Leg | None
    local_prefill: Leg | None = None


class Constraint(Policy, frozen=True, kw_only=True, omit_defaults=True):
    """The prefill worker's transfer policy as a constraint on the decode worker."""

    value: str | None


class Refusal(Struct, frozen=True, kw_only=True):
    """The reason for a refusal; ``refusals`` counts worker ranks by reason."""

    code: str
    message: str
    refusals: Mapping[str, int] = {}


class Explanation(Struct, frozen=True, kw_only=True):
    """``POST /v1/route/explain``. ``error`` has the refusal when no worker may take the request."""

    request_id: str
    model: str
    mode: str
    isl_tokens: int
    blocks: int
    prefill: Leg | None
    decode: Leg | None
    local_prefill: Leg | None = None
    constraint: Constraint | None
    fallback_used: bool
    last_resort: bool = False
    error: Refusal | None


class Pick(RankId, frozen=True, kw_only=True):
    """The picked worker rank of a leg, with the parts of its cost in blocks, out of ``candidates`` ranks. Of
    the prompt's first ``pulled_blocks`` a prefill rank fetches what it lacks from the decode rank.
    """

    overlap_blocks: int
    prefill_blocks: float = 0.0
    decode_blocks: float = 0.0
    transfer_blocks: float = 0.0
    multiplier: float = 1.0
    cost: float = 0.0
    times: Times | None = None
    candidates: int
    unseen: int = 0
    pulled_blocks: int = 0


class Attempt(Struct, frozen=True, kw_only=True):
    """One decision. ``decided_at`` is in seconds since 1970. ``trace_id`` is None for a request without a
    trace, ``table`` when candidates are not kept, ``decode`` when only prefill was decided. ``error`` has the
    refusal when no worker could take the request; then nothing was picked.
    """

    attempt: int
    decided_at: float
    trace_id: str | None = None
    mode: str
    prefill: Pick | None
    decode: Pick | None
    pair_cost: float | None = None
    constraint: Constraint | None
    fallback_used: bool
    cross_domain: bool
    last_resort: bool = False
    table: Legs | None = None
    error: Refusal | None = None


class Decisions(Struct, frozen=True, kw_only=True):
    """``GET /v1/decisions/{request_id}``: the kept decisions of a request, in order."""

    request_id: str
    attempts: Sequence[Attempt]


class LastDecision(Struct, frozen=True, kw_only=True):
    """The last decision of a request: an :class:`Attempt` without candidates; ``has_table`` says whether
    they are kept. ``expected_cached_tokens`` is None where the router does not know the prompt,
    ``cached_tokens``, which the engine counts, and ``ttft_ms``, which is measured, before they are known.
    """

    request_id: str
    model: str
    attempt: int
    decided_at: float
    trace_id: str | None = None
    mode: str = ""
    prefill: Pick | None
    decode: Pick | None
    pair_cost: float | None = None
    constraint: Constraint | None = None
    fallback_used: bool
    cross_domain: bool
    last_resort: bool = False
    isl_tokens: int = 0
    expected_cached_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    has_table: bool = False


class LastDecisions(Struct, frozen=True, kw_only=True):
    """``GET /v1/decisions``: the last decision of each request, newest first, of the ``kept`` requests."""

    decisions: Sequence[LastDecision]
    kept: int = 0
