"""What a fleet file describes, in the words of the other rooms: cards, engines, links, tokenizers."""

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace
from pydantic import ValidationError

from kvrouter.assembly.texts import MOCK_TOKENIZER
from kvrouter.config import Document, FleetFile, Handoff, LinkSpec, TopologySpec, WorkerGroup
from kvrouter.config.problems import config_error, problem_of
from kvrouter.core.ids import Epoch, ModelName, Taint, WorkerId
from kvrouter.core.workers import ModelRuntimeConfig, ModelType, Role, WorkerCard
from kvrouter.mock import Links, MockConfig, Peer, Timing
from kvrouter.text.encode_pool import EncodePool
from kvrouter.text.model import TextModel
from kvrouter.text.words import FIRST_WORD_ID, MOCK_FOLDER, mock_words
from kvrouter.topology import Link, LinkTable


def numbered_workers(fleet: FleetFile) -> Iterator[tuple[WorkerId, WorkerGroup]]:
    """Every worker of the file with its id: they count from 1 in the order of the file."""
    number = 0
    for group in fleet.workers:
        for _ in range(group.replicas):
            number += 1
            yield WorkerId(number), group


def load_texts(fleet: FleetFile, pool: EncodePool) -> dict[ModelName, TextModel]:
    """Tokenizer and chat template of each model; raise ConfigError for a folder that has none."""
    return {
        ModelName(model.name): TextModel.load(
            MOCK_FOLDER if model.tokenizer == MOCK_TOKENIZER else Path(model.tokenizer),
            context_length_tokens=model.context_length,
            pool=pool,
        )
        for model in fleet.models
    }


def bootstraps(group: WorkerGroup) -> bool:
    """Whether the group's workers hand KV on at a meeting place that both legs are told."""
    return group.role is Role.PREFILL and group.engine.handoff is Handoff.BOOTSTRAP


def worker_card(
    fleet: FleetFile,
    group: WorkerGroup,
    worker_id: WorkerId,
    *,
    incarnation: Epoch,
    address: str,
    bootstrap: Peer | None,
) -> WorkerCard:
    """What the worker publishes; ``bootstrap`` is where its handoffs meet, where they do."""
    model = fleet.model_of(group)
    return WorkerCard(
        worker_id=worker_id,
        incarnation=incarnation,
        model=ModelName(model.name),
        role=group.role,
        block_size=model.block_size,
        context_length=model.context_length,
        address=address,
        dp_size=group.dp_size,
        component="prefill" if group.role is Role.PREFILL else "backend",
        serves=ModelType.Prefill if group.role is Role.PREFILL else ModelType.Chat | ModelType.Completions,
        publishes_kv_events=group.engine.kv_events,
        runtime_config=replace(
            placed_config(fleet, group),
            total_kv_blocks=group.engine.total_kv_blocks,
            max_num_seqs=group.engine.max_num_seqs,
            max_num_batched_tokens=group.engine.max_num_batched_tokens,
            kv_bytes_per_token=group.engine.kv_bytes_per_token,
            bootstrap_host=None if bootstrap is None else bootstrap.host,
            bootstrap_port=None if bootstrap is None else bootstrap.port,
        ),
    )


def placed_config(fleet: FleetFile, group: WorkerGroup) -> ModelRuntimeConfig:
    """What a group's workers publish of their place, their taints and their transfer policy."""
    policy = fleet.kv_transfer
    return ModelRuntimeConfig(
        topology_domains=dict(group.domains),
        topology_levels=fleet.topology.levels if group.domains else (),
        kv_transfer_domain=None if policy is None else policy.domain,
        kv_transfer_enforcement=None if policy is None else policy.enforcement,
        kv_transfer_preferred_weight=None if policy is None else policy.preferred_weight,
        taints=frozenset(map(Taint, group.taints)),
    )


def mock_config(
    fleet: FleetFile, group: WorkerGroup, worker_id: WorkerId, text: TextModel, *, bootstrap: Peer | None
) -> MockConfig:
    """The engine that the file describes; it answers in words where the tokenizer is the mock's."""
    engine = group.engine
    eos_ids = sorted(text.tokenizer.eos_ids)
    return MockConfig(
        role=group.role,
        block_size=fleet.model_of(group).block_size,
        dp_size=group.dp_size,
        timing=Timing(**engine.timing.model_dump()),
        bootstrap_host=None if bootstrap is None else bootstrap.host,
        bootstrap_port=None if bootstrap is None else bootstrap.port,
        vocab_size=text.tokenizer.vocab_size,
        allowed_token_ids=_answer_ids(fleet, group, text),
        eos_token_id=eos_ids[0] if eos_ids else 0,
        model_seed=fleet.seed,
        seed=worker_id,
        **engine.model_dump(exclude={"kind", "kv_events", "handoff", "timing"}),
    )


def _answer_ids(fleet: FleetFile, group: WorkerGroup, text: TextModel) -> tuple[int, ...]:
    if fleet.model_of(group).tokenizer == MOCK_TOKENIZER:
        return tuple(range(FIRST_WORD_ID, FIRST_WORD_ID + len(mock_words())))
    return tuple(sorted(set(range(text.tokenizer.vocab_size)) - text.tokenizer.special_ids))


def link_level(fleet: FleetFile) -> str | None:
    """The level that mock links are between: that of the transfer policy, else the broadest."""
    if fleet.kv_transfer is not None:
        return fleet.kv_transfer.domain
    return fleet.topology.levels[0] if fleet.topology.levels else None


def mock_links(fleet: FleetFile) -> Links:
    """The links that mock transfers share."""
    table, level = fleet.topology.link_table, link_level(fleet)
    across = _link(table.across)
    same = table.within.get(level or "")
    return Links(
        same=across if same is None else _link(same),
        cross=across,
        pairs={
            (pair.between[0], pair.between[1]): _link(pair) for pair in table.pairs if pair.level == level
        },
    )


def links_of(document: Document) -> LinkTable | None:
    """The links of a fleet file, or of a part of one; None when it has none. Raises ConfigError."""
    topology = document.content.get("topology")
    if topology is None:
        return None
    try:
        return _link_table(TopologySpec.model_validate(topology))
    except ValidationError as error:
        raise config_error(
            [problem_of(item, TopologySpec) for item in error.errors()], document.place
        ) from error


def link_table(fleet: FleetFile) -> LinkTable:
    """The links as the decision weighs them."""
    return _link_table(fleet.topology)


def _link_table(topology: TopologySpec) -> LinkTable:
    table = topology.link_table
    return LinkTable(
        by_level={level: _link(spec) for level, spec in table.within.items()},
        otherwise=_link(table.across),
        pairs={(pair.level, pair.between[0], pair.between[1]): _link(pair) for pair in table.pairs},
    )


def _link(spec: LinkSpec) -> Link:
    return Link(spec.latency_s, spec.bandwidth_bytes_per_s)
