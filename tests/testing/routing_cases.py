"""Drawn fleets with loads and requests, and what routing's rules say of them by a brute force over all ranks.

The brute force shares no code with the decision.
"""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import numpy as np

from kvrouter.core.constraints import Pin, RouterConfigOverride, RouterMode, RoutingConstraints
from kvrouter.core.errors import Reason
from kvrouter.core.ids import DpRank, RequestId, Taint, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.core.workers import Enforcement, LoadReport, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import Candidate, RouteRequest, RoutingSettings, View
from kvrouter.kernel.topology.policy import MismatchPolicy, RouterTopologyDefault
from tests.testing.plain_fleets import fleet_of, worker_card

ZONES = ("a", "b", "c")
OWN_TAINTS = ("gpu", "fast")


class RankLoad(NamedTuple):
    overlap_blocks: int
    prefill_tokens: int
    active_blocks: int
    not_active: int
    tokens_at_report: int
    blocks_at_report: int


class RoutingCase(NamedTuple):
    """Everything that a decision depends on, apart from the order in which workers joined."""

    cards: tuple[WorkerCard, ...]
    dead: frozenset[WorkerId]
    reports: tuple[LoadReport, ...]
    loads: dict[WorkerRank, RankLoad]
    settings: RoutingSettings
    request: RouteRequest
    seed: int
    turn: int


def is_drawn(rng: Random, chance: float) -> bool:
    return rng.random() < chance


def draw_card(rng: Random, worker_id: int) -> WorkerCard:
    domains = {name: rng.choice(ZONES) for name in ("zone", "rack") if is_drawn(rng, 0.8)}
    policy = rng.choice([None, *Enforcement]) if is_drawn(rng, 0.8) else None
    config = ModelRuntimeConfig(
        topology_domains=domains,
        kv_transfer_domain=rng.choice(("zone", "zone", "rack", None)),
        kv_transfer_enforcement=policy,
        kv_transfer_preferred_weight=0.5 if policy is Enforcement.PREFERRED else None,
        taints=frozenset(Taint(taint) for taint in OWN_TAINTS if is_drawn(rng, 0.6)),
        total_kv_blocks=rng.choice((None, 10, 20)),
    )
    return worker_card(
        worker_id,
        rng.choice((Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH)),
        config,
        dp_size=rng.choice((1, 1, 2)),
        draining=is_drawn(rng, 0.1),
        engine_silent=is_drawn(rng, 0.1),
    )


def draw_request(rng: Random, n_workers: int, number: int) -> RouteRequest:
    def pin(chance: float) -> Pin | None:
        if not is_drawn(rng, chance):
            return None
        return Pin(WorkerId(rng.randrange(n_workers + 1)), DpRank(0) if is_drawn(rng, 0.3) else None)

    places = [f"dynamo.topology/{domain}={zone}" for domain in ("zone", "rack") for zone in ZONES]
    required = [taint for taint in (*OWN_TAINTS, rng.choice(places)) if is_drawn(rng, 0.1)]
    preferred = {Taint(taint): rng.uniform(-1, 1) for taint in (*OWN_TAINTS, *places) if is_drawn(rng, 0.1)}
    isl_tokens = rng.randrange(1, 40)
    return RouteRequest(
        RequestId(f"r{number}"),
        isl_tokens,
        -(-isl_tokens // 4),
        RoutingConstraints(frozenset(map(Taint, required)), preferred),
        RouterConfigOverride(),
        pin(0.1),
        pin(0.1),
        frozenset(WorkerId(worker_id) for worker_id in range(n_workers) if is_drawn(rng, 0.05)),
    )


def draw_settings(rng: Random) -> RoutingSettings:
    default = RouterTopologyDefault(rng.choice(("zone", "rack")), rng.choice(list(MismatchPolicy)))
    return RoutingSettings(
        mode=rng.choice((RouterMode.KV, RouterMode.KV, RouterMode.ROUND_ROBIN, RouterMode.RANDOM)),
        overlap_score_weight=rng.choice((0.0, 1.0, 1.0, 2.5)),
        temperature=rng.choice((0.0, 0.0, 0.7)),
        active_decode_blocks_threshold=rng.choice((None, 0.3, 0.7)),
        active_prefill_tokens_threshold=rng.choice((None, None, 8)),
        topology_default=default if is_drawn(rng, 0.3) else None,
    )


def routing_cases(rng: Random, n_requests: int) -> Iterator[RoutingCase]:
    """Some requests, each with its own loads, on one fleet."""
    n_workers = rng.randrange(1, 9)
    cards = tuple(draw_card(rng, worker_id) for worker_id in range(n_workers))
    dead = frozenset(card.worker_id for card in cards if is_drawn(rng, 0.1))
    ranks = [rank for card in cards for rank in card.ranks()]
    reports = tuple(
        LoadReport(rank, rng.randrange(20), 20, rng.choice((None, 3))) for rank in ranks if is_drawn(rng, 0.3)
    )
    chosen = draw_settings(rng)
    for number in range(n_requests):
        loads = {
            rank: RankLoad(*(rng.randrange(below) for below in (4, 12, 12, 3, 12, 12))) for rank in ranks
        }
        request = draw_request(rng, n_workers, number)
        yield RoutingCase(
            cards, dead, reports, loads, chosen, request, rng.getrandbits(64), rng.randrange(100)
        )


def case_fleet(case: RoutingCase, cards: tuple[WorkerCard, ...]) -> Fleet:
    fleet = fleet_of(*cards)
    for worker_id in case.dead:
        fleet.set_alive(worker_id, alive=False)
    for report in case.reports:
        fleet.report(report)
    return fleet


def view_of(case: RoutingCase, fleet: Fleet) -> View:
    columns = np.zeros((6, fleet.n_slots), np.int64)
    for rank, load in case.loads.items():
        slot = fleet.slot_of(rank)
        assert slot is not None
        columns[:, slot] = load
    overlap, prefill_tokens, active_blocks, not_active, tokens_at_report, blocks_at_report = columns
    return View(
        fleet,
        case.settings,
        overlap,
        prefill_tokens,
        active_blocks,
        not_active,
        case.seed,
        case.turn,
        tokens_at_report=tokens_at_report,
        blocks_at_report=blocks_at_report,
    )


class BruteForceRouter:
    """Who may take which leg of the scene's request, worked out one worker rank at a time."""

    def __init__(self, case: RoutingCase) -> None:
        self.scene = case
        self.card = {rank: card for card in case.cards for rank in card.ranks()}
        self.report = {report.rank: report for report in case.reports}
        there = [c for c in case.cards if c.worker_id not in case.dead]
        ready = [c for c in there if not c.draining and not c.engine_silent]
        split = any(card.role is Role.PREFILL for card in ready)
        self.is_pair = split or case.request.prefill_pin is not None

    def role(self, leg: Leg) -> list[WorkerRank]:
        prefill = leg is Leg.PREFILL
        return [rank for rank, card in self.card.items() if (card.role is Role.PREFILL) == prefill]

    def refused(self, rank: WorkerRank, leg: Leg) -> Reason | None:
        card, request = self.card[rank], self.scene.request
        pin = request.prefill_pin if leg is Leg.PREFILL else request.pin
        if rank.worker_id in self.scene.dead:
            return Reason.NOT_ALIVE
        if card.draining:
            return Reason.DRAINING
        if card.engine_silent:
            return Reason.ENGINE_SILENT
        if rank.worker_id in request.excluded:
            return Reason.EXCLUDED
        if pin is not None and (pin.worker_id != rank.worker_id or pin.dp_rank not in (None, rank.dp_rank)):
            return Reason.PINNED_ELSEWHERE
        config = card.runtime_config
        carried = set(config.taints) | {
            f"dynamo.topology/{domain}={value}" for domain, value in config.topology_domains.items()
        }
        return None if request.constraints.required_taints <= carried else Reason.TAINT_MISSING

    def busy(self, rank: WorkerRank) -> bool:
        fraction = self.scene.settings.active_decode_blocks_threshold
        tokens = self.scene.settings.active_prefill_tokens_threshold
        load, report = self.scene.loads[rank], self.report.get(rank)
        total = self.card[rank].runtime_config.total_kv_blocks if report is None else report.total_blocks
        blocks, prefill_tokens = load.active_blocks, load.prefill_tokens
        if report is not None:
            blocks = max(blocks, report.active_blocks + load.active_blocks - load.blocks_at_report)
            reported = report.active_prefill_tokens
            if reported is not None:
                prefill_tokens = max(prefill_tokens, reported + prefill_tokens - load.tokens_at_report)
        if fraction is not None and total is not None and blocks / total > fraction:
            return True
        return tokens is not None and prefill_tokens > tokens

    def able(self, leg: Leg, *, even_busy: bool = False) -> list[WorkerRank]:
        return [
            rank
            for rank in self.role(leg)
            if self.refused(rank, leg) is None and (even_busy or not self.busy(rank))
        ]

    def policy(self, prefill: WorkerRank) -> tuple[str, str] | None:
        config, default = self.card[prefill].runtime_config, self.scene.settings.topology_default
        if config.kv_transfer_domain is not None:
            return config.kv_transfer_domain, config.kv_transfer_enforcement or "required"
        if default is None:
            return None
        kind = "required" if default.kv_transfer_mismatch_policy is MismatchPolicy.FAIL else "fallback"
        return default.kv_transfer_topology_level, kind

    def together(self, prefill: WorkerRank, decode: WorkerRank, domain: str) -> bool:
        value = self.card[prefill].runtime_config.topology_domains.get(domain)
        return value is not None and value == self.card[decode].runtime_config.topology_domains.get(domain)

    def may_pair(self, row: Candidate, mate: WorkerRank) -> bool:
        """Whether KV may go between the row's rank and ``mate``, of the other leg, whatever it prefers."""
        prefill, decode = (row.rank, mate) if row.leg is Leg.PREFILL else (mate, row.rank)
        policy = self.policy(prefill)
        if policy is None or policy[1] != "required":
            return True
        return self.together(prefill, decode, policy[0])

    def pairs(self, *, even_busy: bool = False) -> set[tuple[WorkerRank, WorkerRank]]:
        """Every pair that breaks no rule; of fallback's, those that cross only where none need to."""
        decodes = self.able(Leg.DECODE, even_busy=even_busy)
        home, away = set(), set()
        for prefill in self.able(Leg.PREFILL, even_busy=even_busy):
            policy = self.policy(prefill)
            if policy is None or policy[1] == "preferred":
                home |= {(prefill, decode) for decode in decodes}
                continue
            near = {(prefill, decode) for decode in decodes if self.together(prefill, decode, policy[0])}
            home |= near
            if not near and policy[1] == "fallback":
                away |= {(prefill, decode) for decode in decodes}
        return home or away
