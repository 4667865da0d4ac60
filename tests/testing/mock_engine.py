"""One mock engine with round figures, and what its outputs say of one request."""

from array import array
from collections.abc import Iterable, Mapping

from kvrouter.core.ids import DpRank, ModelName, RequestId, WorkerId
from kvrouter.core.requests import Bootstrap, EngineRequest, Leg, Sampling
from kvrouter.core.timing import Timing
from kvrouter.core.workers import Role
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.mock_engine.engine import MockEngine, Outputs
from kvrouter.engines.mock_engine.mock_links import Links, Place
from kvrouter.kernel.topology.link_table import ACROSS_LINK, SAME_LEVEL_LINK, Link, LinkTable


def zone_links(
    *,
    same: Link = SAME_LEVEL_LINK,
    cross: Link = ACROSS_LINK,
    pairs: Mapping[tuple[str, str], Link] | None = None,
) -> Links:
    """Links inside a zone and between two; ``pairs`` holds two zones in either order, and wins."""
    measured = {("zone", one, other): link for (one, other), link in (pairs or {}).items()}
    table = LinkTable(by_level={"zone": same}, otherwise=cross, pairs=measured)
    return Links(table=table, levels=("zone",), report_level="zone")


def zone(name: str, worker_id: int = 0) -> Place:
    """A worker in a zone."""
    return Place({"zone": name}, WorkerId(worker_id))


# Round figures: a step takes 100 ms for its prefill part and 1 ms a token, and 10 ms for its decode part.
TIMING = Timing(
    prefill_quadratic=0.0,
    prefill_linear=1.0,
    prefill_base=100.0,
    decode_quadratic=0.0,
    decode_linear=0.0,
    decode_base=10.0,
)


def config(
    *,
    role: Role = Role.BOTH,
    block_size: int = 4,
    total_kv_blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_waiting_seqs: int = 16,
    prefix_caching: bool = True,
    chunked_prefill: bool = True,
    dp_size: int = 1,
    dp_start: int = 0,
    eos_every: int | None = None,
    bootstrap_port: int | None = None,
) -> MockConfig:
    return MockConfig(
        role=role,
        block_size=block_size,
        total_kv_blocks=total_kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting_seqs=max_waiting_seqs,
        prefix_caching=prefix_caching,
        chunked_prefill=chunked_prefill,
        dp_size=dp_size,
        dp_start=dp_start,
        eos_every=eos_every,
        bootstrap_host=None if bootstrap_port is None else "10.0.0.1",
        bootstrap_port=bootstrap_port,
        timing=TIMING,
    )


def engine(of: MockConfig) -> MockEngine:
    return MockEngine(of, worker_id=WorkerId(1), engine_id="mock-1")


def request(
    name: str,
    tokens: Iterable[int],
    *,
    max_tokens: int = 1,
    leg: Leg = Leg.AGGREGATED,
    sampling: Sampling | None = None,
    dp_rank: int = 0,
    bootstrap: Bootstrap | None = None,
    cache_namespace: str | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        attempt=0,
        leg=leg,
        model=ModelName("m"),
        token_ids=array("I", tokens),
        sampling=sampling or Sampling(max_tokens=max_tokens),
        dp_rank=DpRank(dp_rank),
        bootstrap=bootstrap,
        cache_namespace=cache_namespace,
    )


def tokens_of(outputs: Outputs, name: str) -> tuple[int, ...]:
    return tuple(t for key, chunk in outputs.chunks if key.startswith(f"{name}-#") for t in chunk.token_ids)


def cached_tokens_of(outputs: Outputs, name: str) -> list[int]:
    chunks = [chunk for key, chunk in outputs.chunks if key.startswith(f"{name}-#")]
    return [chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None]
