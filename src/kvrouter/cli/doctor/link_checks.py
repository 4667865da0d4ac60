"""Checks of how fast things are: links, transfers, handoffs that lose their KV, ranks."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from kvrouter.api.fleet_schema import Model, Rank, Worker
from kvrouter.cli.doctor.findings import Check, Compared, NotEnough, NotMade, Outcome, Problem, Severity
from kvrouter.cli.doctor.reading import ANSWERS_COMPARED, Reading, counted, first_of
from kvrouter.core.requests import KvLoss
from kvrouter.core.workers import Role

SLOW = 1.5
"""A rank that takes this many times as long as the median of its peers is slow;"""

RANKS_COMPARED = 3
"""with fewer measured ranks of a kind there is no telling which of them is."""

ALIKE_BLOCKS = 1.25
"""Ranks of one kind of hardware have numbers of KV blocks that differ by no larger factor."""

FAILED_SHARE = 0.01
"""A smaller share of all transfers is a note, and no warning."""

NETWORK_REMEDY = (
    "look at the network between the two ends: is it congested, and did the engines' connector fall back "
    "from "
    "RDMA or NVLink to TCP (its log says so)? "
)


def links(reading: Reading) -> Iterator[Outcome]:
    """Links that are slower than their table or than others of their kind."""
    known = [link for model in reading.fleet.models if model.links for link in model.links.learned]
    transfers = sum(link.transfers for link in known)
    yield Compared(f"{counted(len(known), 'link')} by {counted(transfers, 'transfer')}")
    for model in reading.fleet.models:
        if model.links is None:
            if any(worker.role == Role.PREFILL for worker in reading.fleet.workers_of(model)):
                yield NotMade(
                    f"model {model.model}",
                    f"links are learned under --router-cost time alone, and it is {model.router_cost}",
                )
            continue
        yield from _learned(model)
        handing = any(worker.role == Role.PREFILL for worker in reading.fleet.workers_of(model))
        if handing and not any(link.transfers for link in model.links.learned):
            yield NotEnough(f"model {model.model}", "no transfer was measured yet")


def _learned(model: Model) -> Iterator[Outcome]:
    learned = model.links
    if learned is None:
        return
    for link in learned.learned:
        if link.slow:
            yield Problem(
                Severity.WARNING,
                f"{link.link} ({model.model})",
                f"KV takes {link.slowness:.3g} times as long as it should, by {link.transfers} transfers: "
                f"{link.bandwidth_bytes_per_s / 1e9:.3g} GB/s",
                "first tokens of prompts that a pair serves come later, and the link is avoided",
                NETWORK_REMEDY + "Where it was never faster, correct topology.links or --router-links",
            )
    sums = learned.engines
    if sums is not None and not sums.agree:
        yield Problem(
            Severity.WARNING,
            f"first tokens after transfers ({model.model})",
            f"they come {sums.ratio:.3g} times as late as the engines' own transfers take: the engines count "
            f"{sums.bandwidth_bytes_per_s / 1e9:.3g} GB/s, the router sees "
            f"{sums.seen_bytes_per_s / 1e9:.3g} GB/s",
            "something else than the links holds up first tokens of requests whose KV is there",
            "look at decode engines: a full batch, preemption, or a scheduler that waits",
        )


def transfers(reading: Reading) -> Iterator[Outcome]:
    """Ranks to which KV travels slowly or in vain, by their engines' own count, and KV that was lost."""
    lost, handoffs = (reading.counts.total(f"kvrouter_{name}_total") for name in ("kv_lost", "handoffs"))
    all_ranks = [rank for worker in reading.fleet.workers for rank in worker.ranks]
    counts = [rank.kv_transfers for rank in all_ranks if rank.kv_transfers is not None]
    n_transfers = sum(each.transfers + each.failed for each in counts)
    yield Compared(
        f"{counted(n_transfers, 'transfer')} by engines' count, "
        f"{counted(handoffs, 'handoff')} {reading.period}"
    )
    if reading.hands_over and not n_transfers and not handoffs:
        yield NotEnough("transfers", f"none {reading.period}")
    for worker in reading.fleet.workers:
        for rank in worker.ranks:
            carried = rank.kv_transfers
            if carried is None:
                continue
            if carried.slow:
                yield Problem(
                    Severity.WARNING,
                    f"{worker}, rank {rank.dp_rank}",
                    f"KV travels to it at {carried.gb_per_s} GB/s, and has at {carried.shown_gb_per_s} GB/s",
                    "first tokens of what it decodes come later",
                    NETWORK_REMEDY + "Restart its engine where its neighbours are well",
                )
            if carried.failed:
                share = carried.failed / (carried.failed + carried.transfers)
                yield Problem(
                    Severity.WARNING if share >= FAILED_SHARE else Severity.NOTE,
                    f"{worker}, rank {rank.dp_rank}",
                    f"{carried.failed} of {carried.failed + carried.transfers} transfers of KV to it failed "
                    "since its engine began",
                    "such prompts are computed again",
                    NETWORK_REMEDY + "The log of its KV connector has the reason",
                )
    if lost:
        pairs = {
            (labels.get("prefill_worker", ""), labels.get("decode_worker", ""), labels.get("reason", "")): n
            for labels, n in reading.counts.of("kvrouter_kv_lost_total")
        }
        (prefill, decode, reason), most = max(pairs.items(), key=lambda each: each[1])
        yield Problem(
            Severity.WARNING if lost >= FAILED_SHARE * handoffs else Severity.NOTE,
            f"workers {prefill} and {decode}",
            f"{lost:g} of {handoffs:g} handoffs lost their KV {reading.period}, {most:g} of them from "
            f"{prefill} to {decode} ({reason})",
            "such prompts are computed again, by another pair or by a decode worker alone",
            "their engines do not fit together: see formats"
            if reason == KvLoss.REFUSED
            else "mend the network between the hosts (ports of the KV connector, NetworkPolicy, RDMA), or "
            "restart the end that the losses have in common: kvrouter_kv_lost_total has all pairs",
        )


def ranks(reading: Reading) -> Iterator[Outcome]:
    """Ranks that take longer for a prompt than the others of the same model, role, engine and hardware."""
    timed = [model for model in reading.fleet.models if model.router_cost == "time"]
    prefilling = [[each for each in reading.fleet.workers_of(model) if each.prefills] for model in timed]
    kinds = [group for workers in prefilling for group in _alike(workers)]
    groups = [group for group in kinds if len(group) >= RANKS_COMPARED]
    judged = [group for group in groups if sum(each.is_measured for each in group) >= RANKS_COMPARED]
    n_judged = sum(each.is_measured for group in judged for each in group)
    yield Compared(
        f"{counted(n_judged, 'rank')} with {ANSWERS_COMPARED} requests or more, in "
        f"{counted(len(judged), 'group')} of the same model, role, engine, taints and KV blocks"
    )
    for model in reading.fleet.models:
        if model not in timed:
            yield NotMade(
                f"model {model.model}",
                f"speeds are learned under --router-cost time alone, and it is {model.router_cost}",
            )
    few = dict.fromkeys(str(each.worker) for group in kinds if len(group) < RANKS_COMPARED for each in group)
    if few:
        yield NotMade(
            first_of(few, 3),
            f"fewer than {RANKS_COMPARED} ranks of a kind cannot show which of them is slow",
        )
    for group in groups:
        measured = [each for each in group if each.is_measured]
        if len(measured) < RANKS_COMPARED:
            yield NotEnough(
                first_of((str(each.worker) for each in group), 3),
                f"{ANSWERS_COMPARED} requests were answered by {len(measured)} of "
                f"{counted(len(group), 'rank')} of the same kind: {RANKS_COMPARED} ranks with so many are "
                "needed to say which is slow",
            )
            continue
        for each in measured:
            peers = [other.slowness for other in measured if other is not each]
            relative = each.slowness / median(peers)
            if relative >= SLOW and each.is_surely_slow:
                yield Problem(
                    Severity.WARNING,
                    f"{each.worker}, rank {each.rank.dp_rank}",
                    f"a prompt takes {relative:.3g} times the median of {len(peers)} like ranks",
                    "it gets fewer requests, and those that it gets start later",
                    "look at its accelerator's clocks, temperature and neighbours, and at its engine's "
                    "flags; replace its host if it stays so",
                )


class _MeasuredRank(NamedTuple):
    """A rank and its worker."""

    worker: Worker
    rank: Rank

    @property
    def is_measured(self) -> bool:
        return self.rank.speed is not None and self.rank.speed.requests >= ANSWERS_COMPARED

    @property
    def is_surely_slow(self) -> bool:
        """Whether the router says so, which rules out noise."""
        return self.rank.speed is not None and self.rank.speed.slow

    @property
    def slowness(self) -> float:
        return 1.0 if self.rank.speed is None else self.rank.speed.slowness


def _alike(workers: Sequence[Worker]) -> Iterator[list[_MeasuredRank]]:
    """Yield groups of ranks that should be equally fast: of one role, engine, and hardware, as far as taints
    and the number of KV blocks show it.
    """
    kinds: dict[tuple[object, ...], list[_MeasuredRank]] = {}
    for worker in workers:
        for rank in worker.ranks:
            kind = worker.role, worker.engine, frozenset(worker.taints)
            kinds.setdefault(kind, []).append(_MeasuredRank(worker, rank))
    for ranks_of_kind in kinds.values():
        ranks_of_kind.sort(key=lambda each: each.rank.total_blocks or 0)
        group: list[_MeasuredRank] = []
        for each in ranks_of_kind:
            least = (group[0].rank.total_blocks or 0) if group else 0
            if group and (each.rank.total_blocks or 0) > ALIKE_BLOCKS * least:
                yield group
                group = []
            group.append(each)
        yield group


CHECKS = (
    Check("links", "KV travels as fast as the links allow", links),
    Check("transfers", "transfers of KV arrive", transfers),
    Check("slow-ranks", "no rank is much slower than the others", ranks),
)
