"""The process of our side; started by the runner, which gives it a socket."""

from importlib.metadata import version

import uvloop

from benchmarks.ours.blocks import Apply, Hashing, Memory, Overlap
from benchmarks.ours.decision import Deciding
from benchmarks.side import MakeBench, serve

BENCHES: dict[str, MakeBench] = {
    "decision": Deciding,
    "hash": Hashing,
    "overlap": Overlap,
    "apply": Apply,
    "memory": Memory,
}

if __name__ == "__main__":
    uvloop.run(serve(BENCHES, {"kvrouter": version("kvrouter"), "numpy": version("numpy")}))
