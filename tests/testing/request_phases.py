"""A fleet slow enough to be met in the middle of things, and how to know that it is there.

A moment is observed, never slept for: by what ``/v1/fleet`` says of the workers, and by what the client has.
"""

import asyncio
from enum import StrEnum

from tests.testing.processes import Frontend
from tests.testing.streaming_client import StreamingClient

_FLEET = """
version: 1
models: [{name: mock, block_size: 64}]
topology:
  levels: [zone]
  links: {within: {zone: {latency_s: 2.0, bandwidth_bytes_per_s: 1.0e+12}}}
kv_transfer: {domain: zone, enforcement: required}
workers:
  - {name: prefill, role: prefill, replicas: 2, domains: {zone: a}, engine: &engine {
      handoff: HANDOFF, kv_wait_expiry_s: 5, max_num_batched_tokens: 128,
      timing: {
        prefill_base: 20, prefill_linear: 0.7, decode_base: 12, decode_linear: 0, decode_quadratic: 0}}}
  - {name: decode, role: decode, replicas: 2, domains: {zone: a}, engine: *engine}
  - {name: away, role: decode, replicas: 1, domains: {zone: b}, engine: *engine}
"""

ANSWER_TOKENS = 64
STREAM_TOKENS = 640
"""Almost eight seconds: an answer that is met in mid-stream goes on while a test kills something."""

TRIES = 30
"""A machine that does other work lets many pass unmet."""
CHECK_EACH_S = 0.02


class RequestPhase(StrEnum):
    """What is under way."""

    PREFILL = "mid-prefill"
    EVENT = "mid-event"
    TRANSFER = "mid-transfer"
    STREAM = "mid-stream"


def slow_fleet(handoff: str = "bootstrap") -> str:
    """A fleet file of two zones: what is prefilled in zone a may not be decoded in zone b, whoever dies."""
    return _FLEET.replace("HANDOFF", handoff)


async def wait_for_phase(moment: RequestPhase, frontend: Frontend) -> StreamingClient:
    """Begin an answer and return its client when the answer has come to ``moment``.

    An answer that was too quick to be met is read to its end, and another one begun.
    """
    for _ in range(TRIES):
        if moment is RequestPhase.STREAM:
            client = StreamingClient(frontend, max_tokens=STREAM_TOKENS)
            await client.until(pieces=3)
            return client
        client = StreamingClient(frontend, max_tokens=ANSWER_TOKENS)
        if await _comes_to(moment, client, frontend):
            return client
        await client.end()
        assert client.is_whole, client.error
    raise AssertionError(f"{TRIES} answers were too quick to be met {moment}")


async def _comes_to(moment: RequestPhase, client: StreamingClient, frontend: Frontend) -> bool:
    was_prefilling = False
    blocks_before: int | None = None
    n_blocks = len(client.prompt) // 64
    while not client.pieces:
        assert not client.has_ended, client.error
        workers = await client.workers()
        if not workers:
            await asyncio.sleep(CHECK_EACH_S)
            continue
        page = await frontend.fleet()
        rank = next(each["ranks"][0] for each in page["workers"] if each["worker_id"] == workers["prefill"])
        if blocks_before is None:
            blocks_before = rank["index_blocks"] or 0
        stored = (rank["index_blocks"] or 0) - blocks_before
        is_prefilling = rank["prefill_tokens"] > 0 and stored < n_blocks
        if moment is RequestPhase.PREFILL and is_prefilling and (rank["report"] or {}).get("active_blocks"):
            return True
        if moment is RequestPhase.EVENT and is_prefilling and 0 < stored < n_blocks:
            return True
        if moment is RequestPhase.TRANSFER and was_prefilling and not rank["prefill_tokens"]:
            return not client.pieces
        was_prefilling = was_prefilling or rank["prefill_tokens"] > 0
        await asyncio.sleep(CHECK_EACH_S)
    return False
