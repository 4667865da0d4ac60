"""Recorded pasts, made by hand: workers, requests, and where these went."""

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvrouter.recording.schema import (
    AttemptRecord,
    Constraints,
    FleetChange,
    FleetRecord,
    LegRecord,
    RequestRecord,
    Status,
    Worker,
)
from kvrouter.sim.past.fleet_history import FleetNote, Span, fleet_history
from kvrouter.sim.traces.recorded_trace import Past, PastRequest

FILE = Path("recording.jsonl.gz")
BLOCK = 4

Change = tuple[float, FleetChange, Sequence[Worker]]


def worker(name: int, role: str = "both", zone: str = "", **more: Any) -> Worker:
    """A worker with 1,000 KV blocks."""
    fields: dict[str, Any] = {
        "worker": str(name), "model": "m", "role": role, "block_size": BLOCK, "context_length": 4096,
        "domains": {"zone": zone} if zone else {}, "kv_blocks": 1000,
    }  # fmt: skip
    return Worker(**fields | more)


def leg(
    rank: str, name: str = "aggregated", *, overlap: int = 0, found: int | None = None, **more: Any
) -> LegRecord:
    """A leg that was sent 1 ms after its request came; ``overlap`` and ``found`` are blocks."""
    fields: dict[str, Any] = {
        "leg": name, "worker": rank, "overlap_blocks": overlap, "sent_s": 0.001, "last_s": 0.5,
        "cached_tokens": None if found is None else found * BLOCK,
    }  # fmt: skip
    return LegRecord(**fields | more)


def attempt(*legs: LegRecord, mode: str = "kv", **more: Any) -> AttemptRecord:
    fields: dict[str, Any] = {"shape": "x", "mode": mode, "placed_s": 0.0005, "legs": legs}
    return AttemptRecord(**fields | more)


def request(
    at_s: float, names: Iterable[int], *attempts: AttemptRecord, tail: int = 1, **more: Any
) -> tuple[float, RequestRecord, Sequence[int]]:
    """A prompt of these blocks and ``tail`` tokens more; without an attempt it was placed nowhere."""
    blocks = list(names)
    fields: dict[str, Any] = {
        "at_s": at_s, "model": "m", "input_tokens": BLOCK * len(blocks) + tail, "output_tokens": 4,
        "max_tokens": 4, "block_size": BLOCK, "blocks": b"", "status": Status.FINISHED,
        "attempts": attempts, "ended_s": 0.5,
    }  # fmt: skip
    return at_s, RequestRecord(**fields | more), blocks


def past(
    workers: Sequence[Worker],
    requests: Iterable[tuple[float, RequestRecord, Sequence[int]]],
    changes: Sequence[Change] = (),
    *,
    from_s: float = 600.0,
) -> Past:
    """What a recording with these would say; the workers are there before the first request.

    ``from_s`` is its beginning, in seconds of the Unix epoch.
    """
    found = sorted(requests, key=lambda each: each[0])
    begin_s = found[0][0]
    all_changes: list[Change] = [(begin_s - 1.0, FleetChange.ALL, workers), *changes]
    notes = [
        FleetNote(
            "r", from_s + at_s, FleetRecord(at_s=at_s, change=change, workers=tuple(who)), FILE, line + 1
        )
        for line, (at_s, change, who) in enumerate(all_changes)
    ]
    span = Span(from_s + begin_s, from_s + found[-1][0] + 1000.0)
    history = fleet_history(notes, {"r": span}, model="m", block_size=BLOCK, from_serving=False)
    made = [
        PastRequest(number, at_s - begin_s, record, array("Q", names), FILE, 100 + number)
        for number, (at_s, record, names) in enumerate(found)
    ]
    return Past(from_s + begin_s, made, history)


def constraints(**more: Any) -> Constraints:
    return Constraints(**more)
