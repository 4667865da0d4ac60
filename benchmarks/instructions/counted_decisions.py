"""``python -m benchmarks.instructions.counted_decisions FD``: a router that decides when it is asked.

FD is a socket over which the counting process asks, a JSON object in a line: ``{"prepare": RANKS, "cost":
COST}`` or ``{"decide": REQUESTS}``. The cost ``dynamo`` is that of Dynamo's own selector, which is imported
alone, for kvrouter is not in its environment.
"""

import gc
import json
import socket
import sys
from typing import Any, Protocol

from benchmarks.instructions.marks import DYNAMO, Marks, say, step_clocks

step_clocks()

import uvloop  # noqa: E402

from benchmarks.side import Facts  # noqa: E402

BLOCKS_HELD = 16_384
"""Of other prompts, in the index: enough that it is not empty, and soon published."""


class DecisionBench(Protocol):
    """A router, prepared to decide."""

    async def prepare(self) -> Facts: ...
    async def close(self) -> None: ...
    def request(self, number: int, /) -> Any: ...
    async def place_and_release(self, request: Any, /) -> None: ...


def bench_of(cost: str, n_ranks: int) -> "DecisionBench":
    """Return what decides among so many ranks by a cost."""
    params = {"n_workers": n_ranks, "blocks_held": BLOCKS_HELD}
    if cost == DYNAMO:
        from benchmarks.peers.dynamo import decision as theirs  # noqa: PLC0415

        return theirs.Deciding(params)
    from benchmarks.ours.decision import Deciding  # noqa: PLC0415
    from kvrouter.settings.router_settings import KvRouterConfig  # noqa: PLC0415

    return Deciding(params, KvRouterConfig.model_validate({"router_cost": cost}))


async def decide(wire: socket.socket, marks: Marks) -> None:
    """Prepare and decide until the counting process is gone."""
    bench: DecisionBench | None = None
    number = 0
    with wire.makefile("rb") as lines:
        for line in lines:
            asked = json.loads(line)
            if "prepare" in asked:
                gc.enable()
                if bench is not None:
                    await bench.close()
                bench = bench_of(asked["cost"], asked["prepare"])
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
