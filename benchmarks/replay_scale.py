"""What a replayed request costs over a fleet of some size: one process, from the generator to its figures.

``python -m benchmarks.replay_scale WORKERS REQUESTS OUT``: a generated trace whose prompts have 12,000 tokens
on average and whose answers have 340, at the same load for each worker whatever their number. The time of
decisions (:meth:`kvrouter.kernel.placement.placer.Placer.place`, from the view of the fleet to the booking)
is taken apart: what a decision costs grows with the fleet, all else must not.
"""

import json
import resource
import sys
import time
from pathlib import Path
from unittest.mock import patch

import yaml

from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.kernel.placement.placement import AttemptRequest, Draw, Placement
from kvrouter.kernel.placement.placer import Placer
from kvrouter.settings.problems import parse_document
from kvrouter.sim.replay.dispatch import ByTimeStamp
from kvrouter.sim.replay.simulation import Simulation
from kvrouter.sim.replay.summary import Objective, summarize
from kvrouter.sim.traces.generated import generate, generated_info, parse_generator

RATE_OF_A_WORKER = 0.4
"""Requests a second; about half of what a worker sustains."""

SESSIONS_OF_A_WORKER = 125
"""Open at a time: with as many in all, whatever the number of workers, sessions of a large fleet would end
before their second turn, and its prompts would share less.
"""

BLOCK = 512
BLOCKS = 4096


def replay(workers: int, requests: int) -> dict[str, float]:
    """Replay; return seconds of CPU in all and in decisions, seconds of wall, bytes of memory at most, the
    requests and their mean TTFT.
    """
    spec = parse_generator(
        parse_document(
            yaml.safe_dump(
                {
                    "generate": {
                        "requests": requests,
                        "rate_per_s": RATE_OF_A_WORKER * workers,
                        "input": {"mean": 12_000, "sigma": 0.8, "max": 100_000},
                        "output": {"mean": 340},
                        "tenants": 20,
                        "system_tokens": 1024,
                        "turn_share": 0.6,
                        "open_sessions": SESSIONS_OF_A_WORKER * workers,
                    }
                }
            ),
            "generator",
        )
    )
    fleet = load_fleet(
        parse_document(
            yaml.safe_dump(
                {
                    "version": 1,
                    "models": [{"name": "m", "block_size": BLOCK, "context_length": 131_072}],
                    "workers": [{"name": "a", "replicas": workers, "engine": {"total_kv_blocks": BLOCKS}}],
                }
            ),
            f"{workers} workers",
        )
    ).fleet
    decisions = 0.0
    place = Placer.place

    def timed(placer: Placer, request: AttemptRequest, draw: Draw, *, now_s: float) -> Placement:
        nonlocal decisions
        begun_s = time.thread_time()
        try:
            return place(placer, request, draw, now_s=now_s)
        finally:
            decisions += time.thread_time() - begun_s

    simulation = Simulation(
        fleet,
        generate(spec),
        config=fleet.router,
        dispatch=ByTimeStamp(),
        piece_tokens=generated_info(spec).piece_tokens,
    )
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    with patch.object(Placer, "place", timed):
        result = simulation.run()
    summary = summarize(result, Objective(ttft_s=2.0, itl_s=0.05))
    return {
        "cpu_s": time.process_time() - cpu_s,
        "decisions_s": decisions,
        "wall_s": time.perf_counter() - wall_s,
        "bytes_max": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        "requests": float(len(result.outcomes)),
        "ttft_mean_ms": summary.ttft_ms.mean or 0.0,
    }


if __name__ == "__main__":
    _, n_workers, n_requests, out = sys.argv
    Path(out).write_text(json.dumps(replay(int(n_workers), int(n_requests))), encoding="utf-8")
