"""``python -m benchmarks.instructions.counted_decisions FD``: a router that decides when it is asked.

FD is a socket over which the counting process asks, a JSON object in a line: ``{"prepare": RANKS, "cost":
COST}`` or ``{"decide": REQUESTS}``.
"""

import gc
import itertools
import json
import socket
import sys
import time

CLOCK_STEP_S = 1e-4
"""What a look at the clock moves it on by."""

# A cost of time depends on how long ago things were, so the clock is replaced before any module reads it.
# It stays a function of C, which adds no call of a Python function.
time.monotonic = itertools.count(time.monotonic(), CLOCK_STEP_S).__next__

import uvloop  # noqa: E402

from benchmarks.instructions.marks import Marks, say  # noqa: E402
from benchmarks.ours.decision import Deciding  # noqa: E402
from kvrouter.config import KvRouterConfig  # noqa: E402

BLOCKS_HELD = 16_384
"""Of other prompts, in the index: enough that it is not empty, and soon published."""


async def decide(wire: socket.socket, marks: Marks) -> None:
    """Prepare and decide until the counting process is gone."""
    bench: Deciding | None = None
    number = 0
    with wire.makefile("rb") as lines:
        for line in lines:
            asked = json.loads(line)
            if "prepare" in asked:
                gc.enable()
                if bench is not None:
                    await bench.close()
                config = KvRouterConfig(router_cost=asked["cost"])
                bench = Deciding({"n_workers": asked["prepare"], "blocks_held": BLOCKS_HELD}, config)
                await bench.prepare()
                gc.disable()
            elif bench is None:
                raise ValueError(f"nothing is prepared: {asked}")
            else:
                requests = [bench.request(each) for each in range(number, number + asked["decide"])]
                number += len(requests)
                marks.mark()
                for request in requests:
                    await bench.place_and_release(request)
            say(wire, marks.mark())


if __name__ == "__main__":
    uvloop.run(decide(socket.socket(fileno=int(sys.argv[1])), Marks()))
