"""One side of a comparison: a process that measures what it is reported to, a round at a time.

Standard library alone, for the peers' side runs it too. Messages are JSON lines over an inherited socket.
"""

import json
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

Facts = Mapping[str, object]
"""What a side says about its state, which must be the same on both sides."""

Params = Mapping[str, int]


class Bench(Protocol):
    """One row, prepared once and then measured in rounds that alternate with the other side's."""

    async def prepare(self) -> Facts:
        """Build what is measured on; return what the other side must agree to."""

    async def round(self, variant: str, n_calls: int) -> list[float]:
        """Measure; return a sample a call, in the row's unit. Raises KeyError for an unknown variant."""

    async def close(self) -> None:
        """Let go of everything."""


MakeBench = Callable[[Params], Bench]


async def serve(benches: Mapping[str, MakeBench], versions: Mapping[str, str]) -> None:
    """Answer the runner until it is gone; the socket's descriptor is this process's first argument."""
    bench: Bench | None = None
    with socket.socket(fileno=int(sys.argv[1])) as wire, wire.makefile("rwb") as lines:
        for line in lines:
            asked = json.loads(line)
            answer: object = None
            try:
                match asked:
                    case {"do": "versions"}:
                        answer = dict(versions)
                    case {"do": "prepare", "bench": name, "params": params}:
                        bench = benches[name](params)
                        answer = await bench.prepare()
                    case {"do": "round", "variant": variant, "calls": n_calls} if bench is not None:
                        answer = await bench.round(variant, n_calls)
                    case {"do": "close"} if bench is not None:
                        await bench.close()
                        bench = None
                    case _:
                        raise ValueError(f"not understood: {asked}")
                reply = {"answer": answer}
            except Exception:  # noqa: BLE001 - whatever went wrong is asked to the runner, which stops
                reply = {"error": traceback.format_exc()}
            lines.write(json.dumps(reply).encode() + b"\n")
            lines.flush()
