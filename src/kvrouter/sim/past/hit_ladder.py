"""The ladder of the hit rate: its rungs, the losses between them, their causes and remedies."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec


class Rung(StrEnum):
    """A share of the prompt tokens that could be found, or was found, in caches; each is at most the one
    above, except ``ENGINES``, which may exceed ``EXPECTED``.
    """

    PROMPTS = "prompts"
    """All prompt tokens."""
    ENDLESS = "endless"
    """An endless cache shared by all: every full block that an earlier request had."""
    FLEET = "fleet"
    """One cache of the size of all workers' KV blocks together."""
    PERFECT = "perfect"
    """The workers' own caches, each request at its longest cached prefix, whatever the load."""
    NEAREST = "nearest"
    """The workers' own caches as the recorded placements filled them, at the one with the longest prefix."""
    CHOSEN = "chosen"
    """The same caches, at the chosen worker."""
    EXPECTED = "expected"
    """The hits that the router expected at its decision."""
    ENGINES = "engines"
    """The hits that engines counted; the expected ones for engines without a count."""


class Cause(StrEnum):
    """Why tokens that one rung has are not in the next."""

    FIRST_SEEN = "first_seen"
    NOT_A_BLOCK = "not_a_block"
    CACHE_SIZE = "cache_size"
    APART = "apart"
    COPIES = "copies"
    AWAY = "away"
    CONSTRAINTS = "constraints"
    TRANSFER_POLICY = "transfer_policy"
    ROUTER_MODE = "router_mode"
    PASSED_OVER = "passed_over"
    INDEX = "index"
    LOAD = "load"
    UNEXPLAINED = "unexplained"
    UNSEEN = "unseen"
    EVICTED = "evicted"
    NOT_REPORTED = "not_reported"
    STALE = "stale"


class CauseText(NamedTuple):
    """A cause in plain words, and its remedy."""

    why: str
    remedy: str


_INDEX_REMEDY = (
    "kv-events, feeds and predictions of `kvrouter doctor` say whether KV events are on, arrive and are "
    "right; kvrouter_feed_state, kvrouter_kv_events_missing, kvrouter_kv_events_skipped_total"
)

CAUSES: Mapping[Cause, CauseText] = {
    Cause.FIRST_SEEN: CauseText(
        "no earlier request of the recording had these blocks",
        "nothing in the router; stable text first in prompts: system prompt, tools, documents, then the rest",
    ),
    Cause.NOT_A_BLOCK: CauseText(
        "ends of prompts that fill no block, and the last token, which is always computed",
        "a smaller block size in the engines",
    ),
    Cause.CACHE_SIZE: CauseText(
        "evicted before it was asked for again: all KV blocks of the fleet together are too few",
        "more KV blocks: the engines' share of memory, more workers, a CPU or disk tier",
    ),
    Cause.APART: CauseText(
        "the blocks are in caches that are apart: one worker's is full while another has room, and a worker "
        "that leaves takes its own",
        "fewer and larger workers; fewer restarts; a cache that workers share",
    ),
    Cause.COPIES: CauseText(
        "earlier placements put requests with the same beginning on several workers: each computes and "
        "keeps a copy, and other blocks go for it",
        "what keeps requests from the worker that has their prefix, below",
    ),
    Cause.AWAY: CauseText(
        "the worker that had most did not take requests: silent, draining, or its engine silent",
        "worker_silent, engine_silent and drains in the log at that time; `kvrouter doctor`",
    ),
    Cause.CONSTRAINTS: CauseText(
        "the request's own constraints kept it away: required taints, pins, adapter, context, prompt length",
        "fewer required_taints and pins in nvext; preferred_taints instead; --prompt-tokens-min and -max",
    ),
    Cause.TRANSFER_POLICY: CauseText(
        "the transfer policy kept it away: no decode worker in the domain of the worker that had most",
        "decode workers in that domain; --kv-transfer-enforcement fallback or preferred, "
        "--kv-transfer-mismatch-policy fallback",
    ),
    Cause.ROUTER_MODE: CauseText(
        "the router mode does not ask what is cached: round-robin or random",
        "--router-mode kv",
    ),
    Cause.PASSED_OVER: CauseText(
        "fewer workers were candidates than took requests: busy, an open circuit, far from the frontend, or "
        "failed in an earlier attempt",
        "--active-decode-blocks-threshold, --active-prefill-tokens-threshold; kvrouter_worker_circuit; "
        "--router-prefill-enforcement preferred",
    ),
    Cause.INDEX: CauseText(
        "the router did not know that another worker had it: events were lost or are off, so requests of "
        "about the same time found there what was not expected",
        _INDEX_REMEDY,
    ),
    Cause.LOAD: CauseText(
        "load moved it: the worker that had most had more requests or blocks in use than the one that got it",
        "more workers; --kv-overlap-score-weight higher under --router-cost blocks; `kvrouter replay` with "
        "--compare tells what that costs in TTFT",
    ),
    Cause.UNEXPLAINED: CauseText(
        "another worker was chosen with no more load there: --router-temperature, a worker learned to be "
        "slow, the cost of a KV transfer, preferred taints, or an index that did not know",
        "`kvrouter explain --request-id`, --router-temperature 0; kvrouter_rank_slowness",
    ),
    Cause.UNSEEN: CauseText(
        "engines found it and the router had not expected it: it was being computed at the decision, or "
        "events came late or were lost",
        _INDEX_REMEDY,
    ),
    Cause.EVICTED: CauseText(
        "the chosen worker should have had it by its size; neither the router expected it nor the engine "
        "found it: evicted earlier, or caching is off there",
        "check the KV blocks of the worker's card against its engine, and that prefix caching is on",
    ),
    Cause.NOT_REPORTED: CauseText(
        "the chosen worker should have had it by its size; the router did not expect it, and the engine "
        "reports no count: evicted, or an index that did not know",
        "engines that count: vLLM with --enable-prompt-tokens-details; then as for the index",
    ),
    Cause.STALE: CauseText(
        "the router expected it and the engine did not find it: evicted while the request waited, or "
        "removals that the router did not hear of",
        "kvrouter_index_wrong_total, kvrouter_feed_staleness_seconds; `kvrouter doctor`",
    ),
}

OF_THE_TRAFFIC = frozenset((Cause.FIRST_SEEN, Cause.NOT_A_BLOCK))
"""Causes that no cache and no router can change."""

RUNG_BEFORE: Mapping[Cause, Rung] = {
    Cause.FIRST_SEEN: Rung.PROMPTS,
    Cause.NOT_A_BLOCK: Rung.PROMPTS,
    Cause.CACHE_SIZE: Rung.ENDLESS,
    Cause.APART: Rung.FLEET,
    Cause.COPIES: Rung.PERFECT,
    Cause.AWAY: Rung.NEAREST,
    Cause.CONSTRAINTS: Rung.NEAREST,
    Cause.TRANSFER_POLICY: Rung.NEAREST,
    Cause.ROUTER_MODE: Rung.NEAREST,
    Cause.PASSED_OVER: Rung.NEAREST,
    Cause.INDEX: Rung.NEAREST,
    Cause.LOAD: Rung.NEAREST,
    Cause.UNEXPLAINED: Rung.NEAREST,
    Cause.UNSEEN: Rung.CHOSEN,
    Cause.EVICTED: Rung.CHOSEN,
    Cause.NOT_REPORTED: Rung.CHOSEN,
    Cause.STALE: Rung.EXPECTED,
}
"""The last rung before the loss of each cause."""


class RungFigure(msgspec.Struct, frozen=True):
    """One rung. ``simulated_tokens`` is the result of the rung's model, if a rung below shows more to be
    possible; else None.
    """

    rung: Rung
    tokens: int
    share: float
    simulated_tokens: int | None = None


class Loss(msgspec.Struct, frozen=True):
    """Tokens that ``after`` still has and the next rung has not, for one cause."""

    after: Rung
    cause: Cause
    tokens: int
    share: float
    why: str
    remedy: str


class Larger(msgspec.Struct, frozen=True):
    """The hits of one cache of the fleet's size times ``factor``."""

    factor: int
    tokens: int
    share: float


class HitCounts(msgspec.Struct, frozen=True):
    """Counts that explain the ladder. They are requests and tokens of prompts, unless stated otherwise."""

    requests: int
    prompt_tokens: int
    left_out: int
    """Requests that reached no worker; no rung counts them."""
    unreported: int
    """Requests without a count of hits from the engine."""
    unreported_tokens: int
    media: int
    adapters: int
    warm_up_tokens: int
    """First seen in the first three quarters of the time, beyond the rate of the last one."""
    beyond_tokens: int
    """Found, or expected, although no recorded request had it: caches were warm at the start, and answers are
    the beginning of a next turn. All rungs count it.
    """
    found_unexpected_tokens: int
    """Hits of engines beyond the router's expectation, by which their rung may exceed the router's."""
    workers_left: int
    blocks_left: int
    """Blocks that workers that left, or started again, are taken to have had cached."""
    fleet_blocks: int | None
    """KV blocks of all ranks that compute prompts, at most at any time; None where a card has no number."""
    workers_without_size: int
    """Workers without a known number of KV blocks: their caches are taken to be endless."""


class HitLadder(msgspec.Struct, frozen=True):
    """All of it. ``largest`` is the largest loss that something can be done about, None without any."""

    rungs: tuple[RungFigure, ...]
    losses: tuple[Loss, ...]
    larger: tuple[Larger, ...]
    largest: Cause | None
    facts: HitCounts


def losses_of(tokens: Mapping[Cause, int], prompt_tokens: int) -> tuple[Loss, ...]:
    """Return the losses that there are, rung by rung, and of each rung the largest first."""
    order = {rung: at for at, rung in enumerate(Rung)}
    found = [
        Loss(RUNG_BEFORE[cause], cause, count, count / prompt_tokens, CAUSES[cause].why, CAUSES[cause].remedy)
        for cause, count in tokens.items()
        if count > 0
    ]
    return tuple(sorted(found, key=lambda loss: (order[loss.after], -loss.tokens)))


def largest_of(losses: Sequence[Loss]) -> Cause | None:
    """Return the cause of the largest loss that something can be done about."""
    found = [loss for loss in losses if loss.cause not in OF_THE_TRAFFIC]
    return max(found, key=lambda loss: loss.tokens).cause if found else None
