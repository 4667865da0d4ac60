"""Checks of how fast things are: links, transfers, handoffs that lose their KV, ranks."""

from collections.abc import Iterator

from kvrouter.api.fleet_schema import Model
from kvrouter.cli.doctor.findings import Check, NotMade, Outcome, Problem, Severity
from kvrouter.cli.doctor.reading import Reading
from kvrouter.core.workers import Role

FAILED_SHARE = 0.01
"""A smaller share of all transfers is a note, and no warning."""

NETWORK_REMEDY = (
    "look at the network between the two ends: is it congested, and did the engines' connector fall back "
    "from "
    "RDMA or NVLink to TCP (its log says so)? "
)


def links(reading: Reading) -> Iterator[Outcome]:
    """Links that are slower than their table or than others of their kind."""
    for model in reading.fleet.models:
        if model.links is None:
            if any(worker.role == Role.PREFILL for worker in reading.fleet.workers_of(model)):
                yield NotMade(
                    f"model {model.model}",
                    f"links are learned under --router-cost time alone, and it is {model.router_cost}",
                )
            continue
        yield from _learned(model)


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
    for worker in reading.fleet.workers:
        for rank in worker.ranks:
            counted = rank.kv_transfers
            if counted is None:
                continue
            if counted.slow:
                yield Problem(
                    Severity.WARNING,
                    f"{worker}, rank {rank.dp_rank}",
                    f"KV travels to it at {counted.gb_per_s} GB/s, and has at {counted.shown_gb_per_s} GB/s",
                    "first tokens of what it decodes come later",
                    NETWORK_REMEDY + "Restart its engine where its neighbours are well",
                )
            if counted.failed:
                share = counted.failed / (counted.failed + counted.transfers)
                yield Problem(
                    Severity.WARNING if share >= FAILED_SHARE else Severity.NOTE,
                    f"{worker}, rank {rank.dp_rank}",
                    f"{counted.failed} of {counted.failed + counted.transfers} transfers of KV to it failed "
                    "since its engine began",
                    "such prompts are computed again",
                    NETWORK_REMEDY + "The log of its KV connector has the reason",
                )
    lost, handoffs = (reading.counts.total(f"kvrouter_{name}_total") for name in ("kv_lost", "handoffs"))
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
            "mend the network between the hosts (ports of the KV connector, NetworkPolicy, RDMA), or restart "
            "the end that the losses have in common: kvrouter_kv_lost_total has all pairs",
        )


def ranks(reading: Reading) -> Iterator[Outcome]:
    """Ranks that take longer for a prompt than the others."""
    for worker in reading.fleet.workers:
        for rank in worker.ranks:
            if rank.speed is not None and rank.speed.slow:
                yield Problem(
                    Severity.WARNING,
                    f"{worker}, rank {rank.dp_rank}",
                    f"it takes {rank.speed.relative:.3g} times as long for a prompt as half of the ranks do",
                    "it gets fewer requests, and those that it gets start later",
                    "look at its accelerator's clocks, temperature and neighbours, and at its engine's "
                    "flags; "
                    "replace its host",
                )


CHECKS = (
    Check("links", "KV travels as fast as the links allow", links),
    Check("transfers", "transfers of KV arrive", transfers),
    Check("slow-ranks", "no rank is much slower than the others", ranks),
)
