"""Our server's process: the whole front door and router, over engines that tick.

Its first line on standard output is a JSON object: the port, and the CPU that the ticking engines alone take
a token in this process.
"""

import asyncio
import json
import os
import sys
import time
from array import array
from pathlib import Path

import uvloop

from benchmarks.frontend.ticker import TickingPlane, drain
from benchmarks.ours.workers import EPOCH, QuietWorkers
from kvrouter.assembly.router import build_service
from kvrouter.config import FrontendSettings, KvRouterConfig
from kvrouter.core.ids import ModelName, RequestId, WorkerId
from kvrouter.core.requests import EngineRequest, Leg, Sampling
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.frontend.app import FrontDoor
from kvrouter.planes.discovery.memory import MemoryDiscovery
from kvrouter.telemetry import Telemetry, configure_logging
from kvrouter.text.encode_pool import EncodePool
from kvrouter.text.model import TextModel

MODEL = ModelName("mock")
N_WORKERS = 4
STREAMS = 32
DRAINED_TOKENS = 200
BLOCK_SIZE = 16


async def main(tick_s: float) -> None:
    """Serve until standard input ends."""
    plane, discovery = TickingPlane(tick_s), MemoryDiscovery()
    engine_us = await _engine_us(plane)
    telemetry, frontend = Telemetry(), FrontendSettings(http_port=0)
    service = build_service(
        KvRouterConfig(), plane=plane, discovery=discovery, subscriber=QuietWorkers(), telemetry=telemetry
    )
    await service.start()
    for worker in range(N_WORKERS):
        await discovery.publish(_card(worker))
    pool = EncodePool(off_loop_chars=frontend.tokenize_inline_max_chars)
    texts = {MODEL: TextModel.load_mock(pool=pool)}
    server = FrontDoor(service, texts, settings=frontend, telemetry=telemetry).server()
    await server.serve("127.0.0.1", 0)
    sys.stdout.write(json.dumps({"port": server.addresses[0][1], "engine_us": engine_us}) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.drain(0.0)
    service.stop()


async def _engine_us(plane: TickingPlane) -> float:
    """CPU a token, in microseconds, of the ticking engines and of a task that wakes for each of them."""
    requests = [
        EngineRequest(
            request_id=RequestId(f"drained-{number}"),
            attempt=0,
            leg=Leg.AGGREGATED,
            model=MODEL,
            token_ids=array("I"),
            sampling=Sampling(max_tokens=DRAINED_TOKENS),
        )
        for number in range(STREAMS)
    ]
    began_s = time.process_time()
    await drain(plane, requests)
    return (time.process_time() - began_s) * 1e6 / (STREAMS * DRAINED_TOKENS)


def _card(worker: int) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(worker),
        incarnation=EPOCH,
        model=MODEL,
        role=Role.BOTH,
        block_size=BLOCK_SIZE,
        context_length=131_072,
        address=f"tick://{worker}",
    )


if __name__ == "__main__":
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        configure_logging("info", log_format="text", stream=nowhere)  # as kvrouter up logs, to nowhere
        uvloop.run(main(float(sys.argv[1])))
