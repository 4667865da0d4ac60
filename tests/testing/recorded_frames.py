"""The recorded engine events in ``tests/data/engine-events``."""

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrouter.core.events import Medium
from kvrouter.core.ids import EngineHash
from kvrouter.engines.kv_events.engine_events import CacheGroup, Decode, EngineStored, MmHashes
from kvrouter.engines.sglang.attach import decode as decode_sglang
from kvrouter.engines.trtllm.events import decode as decode_trtllm
from kvrouter.engines.vllm.events import decode as decode_vllm

FOLDER = Path(__file__).parents[1] / "data" / "engine-events"

DECODERS: dict[str, Decode] = {
    "vllm": decode_vllm,
    "sglang": decode_sglang,
    "trtllm": decode_trtllm,
}


@dataclass(frozen=True)
class Sample:
    """One message, and what is in it; ``frames`` has only the payload where no message was recorded."""

    name: str
    frames: tuple[bytes, ...]
    topic: str
    seq: int
    published_s: float
    events: tuple[object, ...]
    dp_rank: int

    @property
    def payload(self) -> bytes:
        return self.frames[-1]

    @property
    def decode(self) -> Decode:
        return DECODERS[next((engine for engine in DECODERS if self.name.startswith(engine)), "vllm")]

    @property
    def block_size(self) -> int:
        return 16 if self.name.startswith("sglang") or "arrays" in self.name else 32


def samples() -> list[Sample]:
    return [_sample(path) for path in sorted(FOLDER.glob("*.json"))]


def _sample(path: Path) -> Sample:
    reported = json.loads(path.read_text())
    published_s, events, dp_rank = reported["decoded"]
    frames = [path.with_name(f"{path.stem}.frame{i}.bin") for i in range(3)]
    return Sample(
        name=path.stem,
        frames=tuple(frame.read_bytes() for frame in frames if frame.exists()),
        topic=reported.get("topic", ""),
        seq=reported.get("seq", 0),
        published_s=published_s,
        events=tuple(events),
        dp_rank=dp_rank,
    )


def stored(
    names: Sequence[int],
    *,
    parent: int | None = None,
    tokens: Iterable[int] | None = None,
    block_size: int = 4,
    medium: Medium = Medium.GPU,
    group: CacheGroup | None = None,
    cache_salt: str | None = None,
    lora_id: int | None = None,
    lora_name: str | None = None,
    mm_hashes: MmHashes | None = None,
) -> EngineStored:
    """A store; without ``tokens``, each block has its own name over and over as tokens."""
    if tokens is None:
        tokens = (name % 2**32 for name in names for _ in range(block_size))
    return EngineStored(
        names=tuple(map(EngineHash, names)),
        parent=None if parent is None else EngineHash(parent),
        token_ids=array("I", tokens),
        block_size=block_size,
        medium=medium,
        group=group,
        lora_name=lora_name,
        lora_id=lora_id,
        cache_salt=cache_salt,
        mm_hashes=mm_hashes,
    )
