"""Where a request went, as its client sees it: response headers, and ``nvext`` when it asks."""

from collections.abc import Collection, Mapping
from functools import lru_cache
from urllib.parse import quote

from kvrouter.core.ids import WorkerRank
from kvrouter.routing.decision import Decision
from kvrouter.service.generation import Generation

QUOTED_MAX = 4096
"""How many domains and values are kept as headers write them: a fleet has few, and answers repeat them."""


def placed_headers(generation: Generation) -> tuple[tuple[bytes, bytes], ...]:
    """The workers that answered, their domains, and the overlap that was counted on."""
    placement = generation.placement
    if placement is None:
        return ()
    decision = placement.decision
    served = decision.decode if decision.prefill is None else decision.prefill
    headers = [
        *_rank_headers(b"decode", decision.decode.rank),
        (b"x-kvrouter-decode-domain", _domains(placement.decode_domains)),
        (b"x-kvrouter-overlap-blocks", str(served.overlap_blocks).encode()),
    ]
    if decision.prefill is not None:
        headers.extend(_rank_headers(b"prefill", decision.prefill.rank))
        headers.append((b"x-kvrouter-prefill-domain", _domains(placement.prefill_domains)))
    return tuple(headers)


def placed_nvext(generation: Generation, extra_fields: Collection[str]) -> Mapping[str, object] | None:
    """``nvext`` of the answer: what ``nvext.extra_fields`` asked for, None when it asked for nothing."""
    placement = generation.placement
    if placement is None or not extra_fields:
        return None
    nvext: dict[str, object] = {}
    if "worker_id" in extra_fields:
        nvext["worker_id"] = _workers(placement.decision)
    if "timing" in extra_fields:
        nvext["timing"] = _timing(generation)
    return nvext


def query_workers(decision: Decision) -> Mapping[str, object]:
    """The workers that a request would go to; one that serves all of it is named for both legs."""
    workers = _workers(decision)
    rank = decision.decode.rank
    return {"prefill_worker_id": rank.worker_id, "prefill_dp_rank": rank.dp_rank} | workers


def _workers(decision: Decision) -> dict[str, object]:
    workers: dict[str, object] = {
        "decode_worker_id": decision.decode.rank.worker_id,
        "decode_dp_rank": decision.decode.rank.dp_rank,
    }
    if decision.prefill is not None:
        workers["prefill_worker_id"] = decision.prefill.rank.worker_id
        workers["prefill_dp_rank"] = decision.prefill.rank.dp_rank
    return workers


def _timing(generation: Generation) -> dict[str, object]:
    times, usage = generation.times, generation.usage
    timing: dict[str, object] = {"kv_hit_rate": round(usage.cached_tokens / max(1, usage.prompt_tokens), 4)}
    for name, moment_s in (
        ("queue_ms", times.placed_s),
        ("ttft_ms", times.first_token_s),
        ("total_time_ms", times.ended_s),
    ):
        if moment_s is not None:
            timing[name] = round(1e3 * (moment_s - times.begun_s), 3)
    return timing


def _rank_headers(leg: bytes, rank: WorkerRank) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"x-kvrouter-%s-worker" % leg, b"%d" % rank.worker_id),
        (b"x-kvrouter-%s-dp-rank" % leg, b"%d" % rank.dp_rank),
    )


def _domains(domains: Mapping[str, str]) -> bytes:
    """``zone=a,rack=r1``; what a header cannot carry is percent-encoded, and so are ``,`` and ``=``."""
    text = ",".join(f"{_quoted(domain)}={_quoted(value)}" for domain, value in domains.items())
    return text.encode()


@lru_cache(maxsize=QUOTED_MAX)
def _quoted(text: str) -> str:
    return quote(text, safe="-._~:/@+ ")
