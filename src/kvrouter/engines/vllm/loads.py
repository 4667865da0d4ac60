"""How busy vLLM says that it is, from its metrics page."""

from collections.abc import Mapping
from math import isfinite

from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.engines.openai.metrics import Samples
from kvrouter.engines.vllm.facts import RankFacts

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USED = "vllm:kv_cache_usage_perc"
USED_BEFORE = "vllm:gpu_cache_usage_perc"
"""What versions before 0.11 call it."""

LOAD_METRICS = (RUNNING, WAITING, USED, USED_BEFORE)


def load_reports(
    samples: Samples, ranks: Mapping[DpRank, RankFacts], worker_id: WorkerId
) -> list[LoadReport]:
    """Return a report for each rank that the page tells of."""
    used = _by_rank(samples, USED) or _by_rank(samples, USED_BEFORE)
    running, waiting = _by_rank(samples, RUNNING), _by_rank(samples, WAITING)
    return [
        LoadReport(
            rank=WorkerRank(worker_id, rank),
            active_blocks=round(used[rank] * facts.total_blocks),
            total_blocks=facts.total_blocks,
            running_requests=int(running.get(rank, 0)),
            waiting_requests=int(waiting.get(rank, 0)),
        )
        for rank, facts in ranks.items()
        if rank in used
    ]


def _by_rank(samples: Samples, name: str) -> dict[DpRank, float]:
    return {
        DpRank(int(sample.labels["engine"])): sample.value
        for sample in samples.get(name, ())
        if sample.labels.get("engine", "").isdecimal() and isfinite(sample.value)
    }
