"""The workers that a fleet file describes: their cards, their mock engines, and the links between them."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from kvrouter.core.ids import Epoch, ModelName, Taint, WorkerId
from kvrouter.core.timing import Timing
from kvrouter.core.workers import (
    FORMAT_UNKNOWN,
    KvFormat,
    ModelRuntimeConfig,
    ModelType,
    Role,
    WorkerCard,
    component_of,
)
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.mock_engine.mock_links import Links
from kvrouter.engines.mock_engine.remote import Peer
from kvrouter.fleetfile.fleet_engines import HandoffKind, MockEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile, LinkSpec, LinksSpec, TopologySpec, WorkerGroup
from kvrouter.kernel.topology.link_table import ACROSS_LINK, Link, LinkTable
from kvrouter.settings.setting import installed_version

BOOTSTRAP_PORT = 8998
"""Mock engines of one process hand over by host, port and room; no process listens at this port."""


def numbered_workers(fleet: FleetFile) -> Iterator[tuple[WorkerId, WorkerGroup]]:
    """Every worker of the file with its id: they count from 1 in the order of the file."""
    number = 0
    for group in fleet.workers:
        for _ in range(group.n_workers):
            number += 1
            yield WorkerId(number), group


def mock_workers(fleet: FleetFile) -> Iterator[tuple[WorkerId, WorkerGroup]]:
    """Yield the file's workers with mock engines."""
    for worker_id, group in numbered_workers(fleet):
        if isinstance(group.engine, MockEngineSpec):
            yield worker_id, group


def mock_engine(group: WorkerGroup) -> MockEngineSpec:
    """The group's engine, where it is known to be a mock engine."""
    if not isinstance(group.engine, MockEngineSpec):
        raise TypeError(f"group {group.name!r} has no mock engines")
    return group.engine


def bootstraps(group: WorkerGroup) -> bool:
    """Whether the group's mock workers hand KV over by bootstrap values, which both legs get."""
    return group.role is Role.PREFILL and mock_engine(group).handoff is HandoffKind.BOOTSTRAP


def worker_card(
    fleet: FleetFile,
    group: WorkerGroup,
    worker_id: WorkerId,
    *,
    incarnation: Epoch,
    address: str,
    bootstrap: Peer | None,
) -> WorkerCard:
    """Return the card of a mock worker; ``bootstrap`` is the address of its handoffs, if it has them."""
    model, engine = fleet.model_of(group), mock_engine(group)
    return WorkerCard(
        worker_id=worker_id,
        incarnation=incarnation,
        model=ModelName(model.mock_name),
        role=group.role,
        block_size=model.mock_block_size,
        context_length=model.mock_context_length,
        address=address,
        dp_size=group.dp_size or 1,
        namespace=fleet.planes.namespace,
        component=component_of(group.role),
        serves=ModelType.Prefill if group.role is Role.PREFILL else ModelType.Chat | ModelType.Completions,
        publishes_kv_events=engine.kv_events,
        bidirectional_kv=engine.bidirectional_kv,
        engine="mock",
        version=installed_version(),
        runtime_config=replace(
            placed_config(fleet, group),
            total_kv_blocks=engine.total_kv_blocks,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            kv_bytes_per_token=engine.kv_bytes_per_token,
            bootstrap_host=None if bootstrap is None else bootstrap.host,
            bootstrap_port=None if bootstrap is None else bootstrap.port,
        ),
    )


def placed_config(fleet: FleetFile, group: WorkerGroup) -> ModelRuntimeConfig:
    """Return the place, taints and transfer policy that a group's workers publish."""
    policy, prompts = fleet.kv_transfer, group.prompt_tokens
    return ModelRuntimeConfig(
        topology_domains=dict(group.domains),
        topology_levels=fleet.topology.levels if group.domains else (),
        kv_transfer_domain=None if policy is None else policy.domain,
        kv_transfer_enforcement=None if policy is None else policy.enforcement,
        kv_transfer_preferred_weight=None if policy is None else policy.preferred_weight,
        taints=frozenset(map(Taint, group.taints)),
        prompt_tokens_min=None if prompts is None else prompts.min,
        prompt_tokens_max=None if prompts is None else prompts.max,
        kv_format=KvFormat(**group.kv_format) if group.kv_format else FORMAT_UNKNOWN,
    )


def mock_config(
    fleet: FleetFile,
    group: WorkerGroup,
    worker_id: WorkerId,
    *,
    bootstrap: Peer | None,
    vocab_size: int,
    answer_ids: Sequence[int] | None,
    eos_token_id: int,
) -> MockConfig:
    """The engine that the file describes; it answers in ``answer_ids``, or in all of its vocabulary."""
    engine = mock_engine(group)
    return MockConfig(
        role=group.role,
        block_size=fleet.model_of(group).mock_block_size,
        dp_size=group.dp_size or 1,
        timing=Timing(**engine.timing.model_dump()),
        bootstrap_host=None if bootstrap is None else bootstrap.host,
        bootstrap_port=None if bootstrap is None else bootstrap.port,
        vocab_size=vocab_size,
        allowed_token_ids=answer_ids,
        eos_token_id=eos_token_id,
        model_seed=fleet.seed,
        seed=worker_id,
        **engine.model_dump(exclude={"kind", "kv_events", "handoff", "bidirectional_kv", "timing"}),
    )


def link_level(fleet: FleetFile) -> str | None:
    """The level that transfers are reported by: that of the transfer policy, else the broadest."""
    if fleet.kv_transfer is not None:
        return fleet.kv_transfer.domain
    return fleet.topology.levels[0] if fleet.topology.levels else None


def mock_links(fleet: FleetFile) -> Links:
    """The links that mock transfers share."""
    return Links(table=link_table(fleet), levels=tuple(fleet.topology.levels), report_level=link_level(fleet))


def link_table(fleet: FleetFile) -> LinkTable:
    """The links as the decision weighs them."""
    return table_of(fleet.topology)


def table_of(topology: TopologySpec) -> LinkTable:
    """The links of a part of a file, as the decision weighs them."""
    return table_of_links(topology.link_table)


def table_of_links(table: LinksSpec) -> LinkTable:
    """The links as the decision weighs them."""
    by_level = {level: _link(spec) for level, spec in table.within.items()}
    return LinkTable(
        by_level=by_level,
        otherwise=_slowest((ACROSS_LINK, *by_level.values()))
        if table.across is None
        else _link(table.across),
        pairs={(pair.level, pair.between[0], pair.between[1]): _link(pair) for pair in table.pairs},
        assumes_otherwise=table.across is None,
    )


def _slowest(links: Sequence[Link]) -> Link:
    return Link(max(link.latency_s for link in links), min(link.bandwidth_bytes_per_s for link in links))


def _link(spec: LinkSpec) -> Link:
    return Link(spec.latency_s, spec.bandwidth_bytes_per_s, spec.price_per_gb)
