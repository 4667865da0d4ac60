"""Pairs chosen together, as plain loops over all of them: what the decision has to equal."""

from collections.abc import Iterable, Mapping
from math import exp, tanh
from typing import NamedTuple

from kvrouter.core.constraints import Pin
from kvrouter.core.ids import Taint, WorkerId
from kvrouter.core.requests import Leg
from kvrouter.core.taints import topology_taint
from kvrouter.core.workers import KvFormat, Role, can_transfer
from kvrouter.kernel.routing.costs.time import CHUNK_TOKENS, STALLS_WEIGHT
from kvrouter.kernel.routing.interface import RouteRequest, RoutingSettings, Times
from kvrouter.kernel.topology.link_table import LinkState, SharedLink, distance
from kvrouter.kernel.topology.policy import Fallback, Preferred, Required, TransferPolicy
from tests.oracles.prediction import RankLoad, predicted


class Worker(NamedTuple):
    """One worker of one rank."""

    worker_id: WorkerId
    role: Role
    domains: Mapping[str, str]
    levels: tuple[str, ...]
    policy: TransferPolicy | None
    taints: frozenset[Taint]
    kv_bytes_per_token: int
    decode_only: bool
    is_alive: bool
    prompts: tuple[int, float]
    load: RankLoad
    kv_format: KvFormat


class Option(NamedTuple):
    """Where a request may go, and what that costs."""

    prefill: Worker | None
    decode: Worker
    cost: float


class Refused(Exception):
    """Nobody may take the request."""


class NaivePairs:
    """All options of one request."""

    def __init__(
        self,
        workers: list[Worker],
        request: RouteRequest,
        settings: RoutingSettings,
        *,
        block_size: int,
        answer_s: float,
        loads: LinkState,
        broken: frozenset[tuple[WorkerId, WorkerId]],
    ) -> None:
        self.workers, self.request, self.settings = workers, request, settings
        self.block_size, self.answer_s, self.loads, self.broken = block_size, answer_s, loads, broken
        assert settings.links is not None
        self.table = settings.links

    def options(self) -> list[Option]:
        """Every pair and every decode worker alone that may take the request. Raises Refused for none."""
        found = [
            Option(sender, receiver, self.pair_cost(sender, receiver))
            for sender in self.senders()
            for receiver in self.receivers_of(sender)
        ]
        found += [Option(None, worker, self.local_cost(worker)) for worker in self.alone()]
        if not found:
            raise Refused
        return found

    def senders(self) -> list[Worker]:
        able = [each for each in self.able(Leg.PREFILL) if self.is_free(each)]
        receivers = self.receivers()
        legal = self.home(able, receivers) or self.away(able, receivers)
        reaching = [each for each in legal if self.reached(each)]
        return reaching or legal

    def reached(self, sender: Worker) -> bool:
        usual = self.followers(sender, self.receivers())
        return any((sender.worker_id, each.worker_id) not in self.broken for each in usual)

    def receivers(self) -> list[Worker]:
        return [each for each in self.able(Leg.DECODE) if self.is_free(each)]

    def receivers_of(self, sender: Worker) -> list[Worker]:
        receivers = self.receivers()
        whole = [each for each in receivers if (sender.worker_id, each.worker_id) not in self.broken]
        return self.followers(sender, whole) or self.followers(sender, receivers)

    def followers(self, sender: Worker, receivers: list[Worker]) -> list[Worker]:
        policy = self.policy_of(sender)
        receivers = self.takers(sender, receivers)
        if not isinstance(policy, Required | Fallback):
            return receivers
        near = [each for each in receivers if self.is_near(sender, each, policy.domain)]
        return receivers if isinstance(policy, Fallback) and not near else near

    def home(self, able: list[Worker], receivers: list[Worker]) -> list[Worker]:
        return [
            each
            for each in able
            if any(
                not isinstance(policy := self.policy_of(each), Required | Fallback)
                or self.is_near(each, receiver, policy.domain)
                for receiver in self.takers(each, receivers)
            )
        ]

    def away(self, able: list[Worker], receivers: list[Worker]) -> list[Worker]:
        return [
            each
            for each in able
            if self.takers(each, receivers) and isinstance(self.policy_of(each), Fallback)
        ]

    def takers(self, sender: Worker, receivers: list[Worker]) -> list[Worker]:
        return [each for each in receivers if can_transfer(sender.kv_format, each.kv_format)]

    def alone(self) -> list[Worker]:
        if self.request.prefill_pin is not None:
            return []
        able, receivers = self.able(Leg.PREFILL), self.able(Leg.DECODE)
        has_pairs = self.home(able, receivers) or self.away(able, receivers)
        if not has_pairs and all(isinstance(self.policy_of(each), Required) for each in able):
            return []
        whole = self.able(Leg.AGGREGATED)
        return [each for each in whole if self.is_free(each) and not each.decode_only]

    def able(self, leg: Leg) -> list[Worker]:
        request = self.request
        pin = request.prefill_pin if leg is Leg.PREFILL else request.pin
        required = request.constraints.required_taints
        if leg is not Leg.PREFILL:
            required = required | request.constraints.required_decode_taints
        return [
            each
            for each in self.workers
            if (each.role is Role.PREFILL) is (leg is Leg.PREFILL)
            and each.is_alive
            and each.worker_id not in request.excluded
            and (pin is None or pin == Pin(each.worker_id))
            and required <= self.taints(each)
            and (leg is Leg.DECODE or self.is_allowed_here(each))
            and (leg is Leg.DECODE or each.prompts[0] <= request.isl_tokens <= each.prompts[1])
        ]

    def is_allowed_here(self, worker: Worker) -> bool:
        """Whether it may prefill for this frontend."""
        near = self.settings.near
        if near is None or not near.is_required:
            return True
        return near.value is not None and worker.domains.get(near.domain) == near.value

    def taints(self, worker: Worker) -> frozenset[Taint]:
        return worker.taints | {topology_taint(*place) for place in worker.domains.items()}

    def is_free(self, worker: Worker) -> bool:
        limit = self.settings.active_prefill_tokens_threshold
        return limit is None or worker.load.prefill_tokens <= limit

    def policy_of(self, worker: Worker) -> TransferPolicy | None:
        default = self.settings.topology_default
        return worker.policy or (None if default is None else default.policy)

    def is_near(self, sender: Worker, receiver: Worker, domain: str) -> bool:
        value = sender.domains.get(domain)
        return value is not None and receiver.domains.get(domain) == value

    def pair_cost(self, sender: Worker, receiver: Worker) -> float:
        prefill, decode = self.times(sender, Leg.PREFILL), self.times(receiver, Leg.DECODE)
        own_s = prefill.queue_s + prefill.prefill_s
        cached = receiver.load.overlap_blocks * self.block_size
        tokens = max(0, self.request.isl_tokens - cached)
        transfer_s, price_s = self.transfer(sender, receiver, tokens * sender.kv_bytes_per_token)
        weight = self.settings.overlap_score_weight
        after_s = max(0.0, decode.memory_s - own_s) + transfer_s + price_s
        after_s += self.prompts_s(receiver)
        after_s += decode.decode_s + decode.others_s + decode.turnover_s
        first_s = weight * own_s + prefill.others_s + prefill.turnover_s
        first_s *= self.multiplier(sender, None, prefills=True)
        return first_s + after_s * self.multiplier(receiver, sender, prefills=False)

    def prompts_s(self, worker: Worker) -> float:
        """The step of prompts that a decode worker is in."""
        token_s = self.settings.timing.prefill_ms(CHUNK_TOKENS) / 1e3 / CHUNK_TOKENS
        return worker.load.slowness * min(worker.load.prefill_tokens, CHUNK_TOKENS) * token_s

    def local_cost(self, worker: Worker) -> float:
        times = self.times(worker, Leg.AGGREGATED)
        running = max(0, worker.load.requests - worker.load.waiting)
        stalls_s = 0.0
        if running and times.decode_s:
            lasts_s = worker.load.decode_slowness * self.answer_s
            share = min(1.0, times.decode_s / lasts_s) if lasts_s else 1.0
            stalls_s = STALLS_WEIGHT * running * times.prefill_s * share
        weight = self.settings.overlap_score_weight
        rest_s = times.memory_s + times.decode_s + times.others_s + times.turnover_s + stalls_s
        return (weight * (times.queue_s + times.prefill_s) + rest_s) * self.multiplier(
            worker, None, prefills=True
        )

    def times(self, worker: Worker, leg: Leg) -> Times:
        return predicted(
            worker.load,
            self.settings.timing,
            leg,
            isl_tokens=self.request.isl_tokens,
            block_size=self.block_size,
            answer_s=self.answer_s,
            decode_weight=self.settings.decode_weight,
        )

    def transfer(self, sender: Worker, receiver: Worker, kv_bytes: float) -> tuple[float, float]:
        table = self.table
        link, level = table.decided(sender.domains, receiver.domains, sender.levels)
        load = self.loads.on(shared) if (shared := self.shared(sender, receiver, level)) else (0.0, 0)
        transfer_s = link.transfer_s(kv_bytes + min(load[0], load[1] * kv_bytes))
        return transfer_s, (link.cost(kv_bytes) or 0.0) * self.settings.price_weight

    def shared(self, sender: Worker, receiver: Worker, decided: str | None) -> SharedLink | None:
        table = self.table
        for domain, one, other in table.pairs:
            ends = sender.domains.get(domain), receiver.domains.get(domain)
            if ends in ((one, other), (other, one)):
                return SharedLink(((domain, ends[0]),), ends[1])
        level = decided or self.differing(sender, receiver)
        level = level or distance(sender.domains, receiver.domains, sender.levels).level
        if level is None:
            return None
        around = sender.levels[: sender.levels.index(level) + 1]
        source = tuple((each, sender.domains.get(each)) for each in around)
        return SharedLink(source, receiver.domains.get(level))

    def differing(self, sender: Worker, receiver: Worker) -> str | None:
        for level in sender.levels:
            ends = sender.domains.get(level), receiver.domains.get(level)
            if None not in ends and ends[0] != ends[1]:
                return level
        return None

    def multiplier(self, worker: Worker, sender: Worker | None, *, prefills: bool) -> float:
        pin = self.request.prefill_pin if worker.role is Role.PREFILL else self.request.pin
        if pin is not None:
            return 1.0
        weights = dict(self.request.constraints.preferred_taints)
        near = self.settings.near
        if prefills and near is not None and near.value is not None and not near.is_required:
            weights[topology_taint(near.domain, near.value)] = near.weight
        policy = None if sender is None else self.policy_of(sender)
        if sender is not None and isinstance(policy, Preferred):
            value = sender.domains.get(policy.domain)
            if value is not None:
                weights[topology_taint(policy.domain, value)] = policy.weight
        return exp(-tanh(total(weights[taint] for taint in sorted(weights) if taint in self.taints(worker))))


def total(numbers: Iterable[float]) -> float:
    return sum(numbers, 0.0)
