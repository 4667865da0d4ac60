"""Times of an engine's requests, sizes of its cache and its running requests, from its metrics page by each
engine's names; and the times in an answer.

Histograms have a sum and a count: between two pages in which one request ended, the sum grew by its own time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.json import Unreadable, parsed
from kvrouter.core.workers import ENGINE_SIZE_MAX
from kvrouter.engines.openai.metrics import Sample, Samples, read_metrics
from kvrouter.engines.openai.pages import count_of

QUEUE = ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds")
"""From where the scheduler sees a request until it is in a step."""

PREFILL = ("vllm:request_prefill_time_seconds", "sglang:per_stage_req_latency_seconds")
"""From there to the first token."""

PREFILL_STAGE = "prefill_forward"
"""The label ``stage`` of SGLang's times, which has a sum for each stage of a request."""

TTFT = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
"""From where the server has the request to its first token."""

TOKEN = (
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "sglang:inter_token_latency_seconds",
    "sglang:time_per_output_token_seconds",
)
"""From one token to the next; the second name of each engine is that of its older versions."""

RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
"""Requests in steps, and waiting ones. SGLang's figures of this kind may be half a minute old."""

CACHE = "vllm:cache_config_info"

_ENDS = ("_sum", "_count")

TIMES = tuple(f"{name}{end}" for names in (QUEUE, PREFILL, TTFT, TOKEN) for name in names for end in _ENDS)
"""The metrics that :func:`read_request_times` reads."""


@dataclass(frozen=True, slots=True)
class TimeSum:
    """Seconds that ``count`` requests, or tokens, took together."""

    seconds: float
    count: int

    @property
    def mean_s(self) -> float | None:
        """The mean in seconds; None without a request."""
        return self.seconds / self.count if self.count else None


class RequestTimes(NamedTuple):
    """Sums since the engine began, or between two pages; None if the page does not have one."""

    queue: TimeSum | None
    prefill: TimeSum | None
    ttft: TimeSum | None
    token: TimeSum | None


class CacheSize(NamedTuple):
    """Tokens in a block, blocks of one data-parallel rank, and the number of ranks."""

    block_size: int
    blocks: int
    n_ranks: int


class OwnTimes(NamedTuple):
    """The times in an answer: seconds in the queue, and from there to the first token."""

    queue_s: float
    prefill_s: float


class _Metrics(msgspec.Struct, frozen=True):
    """``metrics`` in the last event of a vLLM with ``--enable-per-request-metrics``, in milliseconds. Its
    time to the first token begins when the scheduler takes the request.
    """

    queue_time_ms: float
    time_to_first_token_ms: float


class _LastEvent(msgspec.Struct, frozen=True):
    metrics: _Metrics


_last_event = msgspec.json.Decoder(_LastEvent)


def read_own_times(data: bytes) -> OwnTimes | None:
    """Return the times in a stream's last event; None without them, or if they are not in vLLM's form."""
    try:
        found = parsed(_last_event, data).metrics
    except Unreadable:
        return None
    if found.queue_time_ms < 0.0 or found.time_to_first_token_ms <= 0.0:
        return None
    return OwnTimes(found.queue_time_ms / 1e3, found.time_to_first_token_ms / 1e3)


def read_running(page: bytes) -> int | None:
    """Return how many requests an engine runs or queues; None if its page does not report it.

    Raises ProtocolError for an unreadable page.
    """
    samples = read_metrics(page, RUNNING)
    if not samples:
        return None
    return int(sum(each.value for name in RUNNING for each in samples.get(name, ())))


def read_request_times(page: bytes) -> RequestTimes:
    """Return the sums of a metrics page; raise ProtocolError for one that cannot be read."""
    samples = read_metrics(page, TIMES)
    return RequestTimes(*(_sum(samples, names) for names in (QUEUE, PREFILL, TTFT, TOKEN)))


def times_between(before: RequestTimes, after: RequestTimes) -> RequestTimes:
    """Return the increase of the sums; None if one of the pages has no sum."""
    return RequestTimes(*(_grown(*each) for each in zip(before, after, strict=True)))


def read_cache_size(page: bytes) -> CacheSize | None:
    """Return the sizes on the metrics page of a vLLM; None for other engines' pages.

    Raises ProtocolError for sizes that are no numbers from 1 to :data:`ENGINE_SIZE_MAX`.
    """
    samples = read_metrics(page, (CACHE,)).get(CACHE, ())
    if not samples:
        return None
    labels = samples[0].labels
    return CacheSize(
        _number(labels.get("block_size", ""), "block_size"),
        _number(labels.get("num_gpu_blocks", ""), "num_gpu_blocks"),
        len(samples),
    )


def _sum(samples: Samples, names: Sequence[str]) -> TimeSum | None:
    for name in names:
        seconds, counts = (
            [each for each in samples.get(f"{name}{end}", ()) if _is_wanted(each)] for end in _ENDS
        )
        if seconds and counts:
            return TimeSum(sum(each.value for each in seconds), int(sum(each.value for each in counts)))
    return None


def _is_wanted(sample: Sample) -> bool:
    return sample.labels.get("stage", PREFILL_STAGE) == PREFILL_STAGE


def _grown(before: TimeSum | None, after: TimeSum | None) -> TimeSum | None:
    if before is None or after is None:
        return None
    return TimeSum(after.seconds - before.seconds, after.count - before.count)


def _number(text: str, field: str) -> int:
    number = count_of(text)
    if number is None or number > ENGINE_SIZE_MAX:
        raise ProtocolError(
            f"{CACHE}: {field} must be a number from 1 to {ENGINE_SIZE_MAX}, not {text[:20]!r}", param=field
        )
    return number
