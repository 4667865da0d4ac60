"""``python -m benchmarks.frontend.upstream TICK_S``: a process with an OpenAI server that only ticks.

What stands behind gateways. Its first line on standard output is a JSON object with its port; it ends with
its standard input.
"""

import sys

import uvloop

from benchmarks.frontend.backend import Backend
from benchmarks.frontend.processes import say_and_wait


async def main(tick_s: float) -> None:
    """Serve until standard input ends."""
    backend = Backend(tick_s)
    await say_and_wait({"port": await backend.serve()})
    backend.close()


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1])))
