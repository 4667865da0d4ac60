"""How busy vLLM says that it is, and what KV it has fetched, from its metrics page."""

from collections.abc import Mapping

from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import KvTransfers, LoadReport
from kvrouter.engines.openai.metrics import Samples
from kvrouter.engines.vllm.facts import NIXL_METRIC, RankFacts

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USED = "vllm:kv_cache_usage_perc"
USED_BEFORE = "vllm:gpu_cache_usage_perc"
"""What versions before 0.11 call it."""

FETCHED = NIXL_METRIC
FETCHED_BYTES = "vllm:nixl_bytes_transferred_sum"
FETCHED_SECONDS = "vllm:nixl_xfer_time_seconds_sum"
FETCHED_FAILED = "vllm:nixl_num_failed_transfers_total"
"""What NixlConnector tells from the engine's start on, also where it never fetched. Each tensor-parallel rank
of an engine counts its own part; handshakes and notifications that failed count as failed transfers.
"""

FIGURE_MAX = float(2**53)
"""What is larger is no count, and would not be exact."""

TRANSFER_METRICS = (FETCHED, FETCHED_BYTES, FETCHED_SECONDS, FETCHED_FAILED)
LOAD_METRICS = (RUNNING, WAITING, USED, USED_BEFORE, *TRANSFER_METRICS)


def load_reports(
    samples: Samples, ranks: Mapping[DpRank, RankFacts], worker_id: WorkerId
) -> list[LoadReport]:
    """Return a report for each rank that the page tells of."""
    used = _by_rank(samples, USED) or _by_rank(samples, USED_BEFORE)
    running, waiting = _by_rank(samples, RUNNING), _by_rank(samples, WAITING)
    transfers = _transfers(samples)
    return [
        LoadReport(
            rank=WorkerRank(worker_id, rank),
            active_blocks=round(used[rank] * facts.total_blocks),
            total_blocks=facts.total_blocks,
            running_requests=int(running.get(rank, 0)),
            waiting_requests=int(waiting.get(rank, 0)),
            kv_transfers=transfers.get(rank),
        )
        for rank, facts in ranks.items()
        if rank in used
    ]


def _transfers(samples: Samples) -> dict[DpRank, KvTransfers]:
    """What each rank has fetched; a rank whose page lacks one of the three sums does not tell."""
    counts, sizes, times, failed = (_by_rank(samples, name) for name in TRANSFER_METRICS)
    return {
        rank: KvTransfers(
            transfers=int(counts[rank]),
            bytes=int(sizes[rank]),
            seconds=times[rank],
            failed=int(failed.get(rank, 0)),
        )
        for rank in counts.keys() & sizes.keys() & times.keys()
    }


def _by_rank(samples: Samples, name: str) -> dict[DpRank, float]:
    return {
        DpRank(int(sample.labels["engine"])): sample.value
        for sample in samples.get(name, ())
        if sample.labels.get("engine", "").isdecimal() and 0 <= sample.value < FIGURE_MAX
    }
