"""Fleets, traces and loads that policies are compared on."""

from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import yaml

from kvrouter.settings.problems import Document, parse_document
from kvrouter.sim.traces.read import Trace, open_trace
from kvrouter.sim.traces.trace_request import TraceRequest

HERE = Path(__file__).parent
DATA = HERE.parents[1] / "data"

NEAR_BYTES_PER_S = 12.5e9
"""100 Gbit/s within a zone; between zones it is a ratio of that."""

RATIOS = (1.0, 4.0, 20.0)
BLOCK = 512
BLOCKS = 4096

LATE_S = 0.01
"""A seed delays each request by up to so much, as a network does. Most rules draw nothing, and one replay of
such a rule is one of many that its choices might have led to.
"""


class Case(NamedTuple):
    """One trace; for each load everything in it but the answers is as many times as fast as it says.

    ``is_closed``: a turn follows the answer before it after its think time. Else requests arrive by time
    stamp.
    """

    name: str
    path: Path
    loads: tuple[float, ...]
    is_closed: bool = False


CASES = (
    Case("conversation", DATA / "mooncake-conversation.jsonl.gz", (1.0, 2.0, 3.0)),
    Case("coding agents", DATA / "agentic-coding-sessions.jsonl.gz", (1.0, 3.0, 10.0), is_closed=True),
    Case("many tenants", HERE / "tenants.yaml", (1.0, 2.0, 3.0)),
    Case("long sessions", HERE / "sessions.yaml", (1.0, 2.0, 3.0)),
)


class Rows:
    """The first rows of a case's trace at one load, held, so that every replay has the same."""

    def __init__(self, case: Case, load: float, rows_max: int) -> None:
        trace: Trace = open_trace(case.path, rows_max=rows_max)
        self.piece_tokens = trace.info.piece_tokens
        self.is_closed = case.is_closed
        self.rows = [
            msgspec.structs.replace(
                row,
                at_s=row.at_s / load,
                not_before_s=row.not_before_s / load,
                waits=tuple(msgspec.structs.replace(wait, think_s=wait.think_s / load) for wait in row.waits),
            )
            for row in islice(trace, rows_max)
        ]
        self.half = len(self.rows) // 2
        """How many of them rules are tuned on; figures are of the others."""

    def delayed(self, seed: int) -> list[TraceRequest]:
        """Return the rows, each as late as the seed says, of LATE_S at most."""
        draw, replace = Random(seed), msgspec.structs.replace
        rows = []
        for row in self.rows:
            late_s = LATE_S * draw.random()
            waits = tuple(replace(wait, think_s=wait.think_s + late_s) for wait in row.waits)
            moments = {"at_s": row.at_s + late_s, "not_before_s": row.not_before_s + late_s}
            rows.append(replace(row, waits=waits, **moments))
        return rows if self.is_closed else sorted(rows, key=lambda row: row.at_s)

    def share(self, number: int, of: int) -> list[TraceRequest]:
        """Return every ``of``-th row from ``number`` on, as a gateway that takes turns would send them."""
        return self.rows[number::of]


@lru_cache(maxsize=2)
def rows_of(case: Case, load: float, rows_max: int) -> Rows:
    """Read a case's rows once in a process."""
    return Rows(case, load, rows_max)


def fleet(zones: str, ratio: float, *, policy: str | None, workers: int = 2) -> Document:
    """A fleet file: in each zone so many prefill and so many decode workers."""
    engine = {"total_kv_blocks": BLOCKS}
    content: dict[str, object] = {
        "version": 1,
        "models": [{"name": "m", "block_size": BLOCK, "context_length": 1_000_000}],
        "topology": {
            "levels": ["zone"],
            "links": {
                "within": {"zone": {"latency_s": 1e-4, "bandwidth_bytes_per_s": NEAR_BYTES_PER_S}},
                "across": {
                    "latency_s": 1e-3 if ratio > 1 else 1e-4,
                    "bandwidth_bytes_per_s": NEAR_BYTES_PER_S / ratio,
                },
            },
        },
        "workers": [
            {
                "name": f"{role}-{zone}",
                "role": role,
                "replicas": workers,
                "domains": {"zone": zone},
                "engine": engine,
            }
            for zone in zones
            for role in ("prefill", "decode")
        ],
    }
    if policy is not None:
        content["kv_transfer"] = {"domain": "zone", "enforcement": policy}
        if policy == "preferred":
            content["kv_transfer"] = {"domain": "zone", "enforcement": policy, "preferred_weight": 0.85}
    return parse_document(yaml.safe_dump(content), f"{len(zones)} zones")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What came of replays: of every seed, in the order of seeds."""

    ttft_ms: tuple[float, ...]
    ttft_p99_ms: tuple[float, ...]
    good: tuple[float, ...]
    good_per_s: tuple[float, ...]
    cached: tuple[float, ...]
    failed: tuple[int, ...]


class Tried(msgspec.Struct, frozen=True):
    """One point of a policy's grid, on the first half of the rows."""

    policy: str
    failed: int
    ttft_ms: float


class Cell(Figures, frozen=True, kw_only=True):
    """The figures of one policy in one case, with those points that it was chosen from."""

    policy: str
    case: str
    load: float
    ratio: float
    crossing_gb: tuple[float, ...]
    tried: tuple[Tried, ...] = ()


class ZoneCell(Figures, frozen=True, kw_only=True):
    """One deployment over all zones, or one for each behind a gateway that takes turns."""

    zones: int
    setup: str
    loses_decoders: bool
    ratio: float
