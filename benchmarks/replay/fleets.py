"""The fleets that policies are compared on, as fleet files."""

from typing import NamedTuple

import yaml

from kvrouter.core.timing import Timing
from kvrouter.kernel.topology.link_table import Link
from kvrouter.settings.problems import Document, parse_document

BLOCK = 512
BLOCKS = 4096
MEMORY_TOKENS = BLOCK * BLOCKS
"""The KV memory of a worker where it is ample."""

NEAR_BYTES_PER_S = 12.5e9
"""100 Gbit/s within a zone; between zones it is a ratio of that."""

BANDWIDTHS = {"host": 50e9, "rack": 12.5e9, "zone": 6.25e9, "far": 2.5e9}
LATENCIES_S = {"host": 5e-5, "rack": 1e-4, "zone": 2e-4, "far": 1e-3}
ALIKE = Link(1e-4, 12.5e9)
LEVELS = ("zone", "rack", "host")
KV_BYTES_PER_TOKEN = 262_144
PRICE_PER_GB = 0.02

SLOWER = 2.0
"""How many times as long the slow half of the workers takes."""

TIERS, SAME_LINKS, AGGREGATED, HALF_SLOW = "links in tiers", "links alike", "aggregated", "half of them slow"
PAIRED = (TIERS, SAME_LINKS)


class Workers(NamedTuple):
    """What a fleet is made of: ``size`` hosts with a prefill and a decode worker, or aggregated workers."""

    kind: str
    size: int
    block: int = BLOCK
    memory_tokens: int = MEMORY_TOKENS

    @property
    def is_paired(self) -> bool:
        """Whether prefill and decode workers are apart."""
        return self.kind in PAIRED

    def document(self) -> Document:
        """The fleet file."""
        engine: dict[str, object] = {"total_kv_blocks": self.memory_tokens // self.block}
        if self.is_paired:
            return tiers(self.size, alike=self.kind == SAME_LINKS, block=self.block, engine=engine)
        groups = [{"name": "worker", "role": "both", "replicas": self.size, "engine": engine}]
        if self.kind == HALF_SLOW:
            usual = Timing()
            slower = {
                name: getattr(usual, name) * SLOWER
                for name in usual.__struct_fields__
                if getattr(usual, name) != 0.0
            }
            groups = [
                {"name": name, "role": "both", "replicas": self.size // 2, "engine": each}
                for name, each in (("fast", engine), ("slow", {**engine, "timing": slower}))
            ]
        return _document({"workers": groups}, self.kind, self.block)


def tiers(
    hosts: int,
    *,
    alike: bool,
    priced: bool = False,
    block: int = BLOCK,
    engine: dict[str, object] | None = None,
) -> Document:
    """Hosts in racks in two zones, with links as far apart as BANDWIDTHS, or all the same."""

    def link(tier: str) -> dict[str, float]:
        latency_s, bandwidth = LATENCIES_S[tier], BANDWIDTHS[tier]
        if alike:
            latency_s, bandwidth = ALIKE.latency_s, ALIKE.bandwidth_bytes_per_s
        price = {"price_per_gb": PRICE_PER_GB} if priced and tier == "far" else {}
        return {"latency_s": latency_s, "bandwidth_bytes_per_s": bandwidth, **price}

    engine = {"total_kv_blocks": BLOCKS, **(engine or {}), "kv_bytes_per_token": KV_BYTES_PER_TOKEN}
    a_rack, a_zone = max(2, hosts // 8), hosts // 2
    content: dict[str, object] = {
        "topology": {
            "levels": list(LEVELS),
            "links": {"within": {level: link(level) for level in LEVELS}, "across": link("far")},
        },
        "workers": [
            {
                "name": f"{role}-{host}",
                "role": role,
                "domains": {"zone": f"z{host // a_zone}", "rack": f"r{host // a_rack}", "host": f"h{host}"},
                "engine": engine,
            }
            for host in range(hosts)
            for role in ("prefill", "decode")
        ],
    }
    return _document(content, "tiers", block)


def zoned(zones: str, ratio: float, *, is_bound: bool = False, workers: int = 2) -> Document:
    """In each zone so many prefill and so many decode workers; ``is_bound``: KV stays in its zone."""
    content: dict[str, object] = {
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
                "engine": {"total_kv_blocks": BLOCKS},
            }
            for zone in zones
            for role in ("prefill", "decode")
        ],
    }
    if is_bound:
        content["kv_transfer"] = {"domain": "zone", "enforcement": "required"}
    return _document(content, f"{len(zones)} zones", BLOCK)


def _document(content: dict[str, object], name: str, block: int) -> Document:
    model = {"name": "m", "block_size": block, "context_length": 1_000_000}
    return parse_document(yaml.safe_dump({"version": 1, "models": [model], **content}), name)
