"""The process of Dynamo's side; started by the runner, which gives it a socket."""

from importlib.metadata import version

import uvloop

from benchmarks.peers.dynamo.blocks import Apply, Hashing, Memory, Overlap
from benchmarks.peers.dynamo.decision import Deciding
from benchmarks.side import MakeBench, serve

BENCHES: dict[str, MakeBench] = {
    "decision": Deciding,
    "hash": Hashing,
    "overlap": Overlap,
    "apply": Apply,
    "memory": Memory,
}
PACKAGE = "ai-dynamo-runtime"

if __name__ == "__main__":
    uvloop.run(serve(BENCHES, {PACKAGE: version(PACKAGE)}))
