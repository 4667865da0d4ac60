"""What a client would measure of a mock engine that is sent an engine's load, without waiting."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from kvrouter.core.timing import Timing
from kvrouter.sim.calibrate.client_run import ClientRequest
from kvrouter.sim.calibrate.engine_load import EngineLoad, LoadPhase, LoadRequest
from kvrouter.sim.calibrate.engine_run import engine_config, simulate
from kvrouter.sim.calibrate.measured_run import EngineFlags, MeasuredRun, RunMeta, Stamps

META = RunMeta(
    model="mock",
    vllm_version="0.19.0",
    engine_kwargs=EngineFlags(max_num_seqs=64, max_num_batched_tokens=2_048, num_gpu_blocks_override=20_000),
)
BETWEEN_PHASES_S = 1.0


def client_requests(
    load: EngineLoad, timing: Timing, *, way_s: float = 0.0, with_times: bool = False
) -> list[ClientRequest]:
    """The requests of ``load`` as a client sees them: each takes ``way_s`` to the engine and none back.

    ``with_times``: the engine's metrics say how long the ones that ran alone waited and prefilled.
    """
    found: list[ClientRequest] = []
    now = 100.0
    for phase in load.phases:
        sent, stamps = _closed_loop(phase, timing, now + way_s, way_s)
        known = with_times and phase.concurrency == 1
        found += [
            ClientRequest(
                request.prompt_tokens,
                request.answer_tokens,
                sent_s=float(sent[at]) - way_s,
                first_s=float(stamps.first[at]),
                last_s=float(stamps.last[at]),
                queue_s=float(stamps.scheduled[at] - stamps.queued[at]) if known else None,
                prefill_s=float(stamps.first[at] - stamps.scheduled[at]) if known else None,
            )
            for at, request in enumerate(phase.requests)
        ]
        now = float(np.max(stamps.last)) + BETWEEN_PHASES_S
    return sorted(found, key=lambda request: request.sent_s)


def _closed_loop(
    phase: LoadPhase, timing: Timing, began_s: float, way_s: float
) -> tuple[list[float], Stamps]:
    """Return when each request of a phase reaches the engine, and the stamps of all."""
    arrivals = [began_s] * min(phase.concurrency, len(phase.requests))
    while True:
        stamps = _stamps(phase.requests[: len(arrivals)], arrivals, timing)
        if len(arrivals) == len(phase.requests):
            return arrivals, stamps
        ended = np.sort(stamps.last)
        arrivals.append(float(ended[len(arrivals) - phase.concurrency]) + way_s)


def _stamps(requests: Sequence[LoadRequest], arrivals: Sequence[float], timing: Timing) -> Stamps:
    unknown = np.full(len(requests), np.nan)
    run = MeasuredRun(
        meta=META,
        hardware=None,
        input_tokens=np.array([request.prompt_tokens for request in requests], np.int64),
        output_tokens=np.array([request.answer_tokens for request in requests], np.int64),
        stamps=Stamps(np.array(arrivals), unknown, unknown, unknown, unknown),
    )
    return simulate(run, replace(engine_config(run, 320_000), timing=timing))
