"""From a fleet file to cards, engines, links and tokenizers."""

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace
from pydantic import ValidationError

from kvrouter.config import (
    AttachedEngineSpec,
    Document,
    FleetFile,
    HandoffKind,
    LinkSpec,
    MockEngineSpec,
    ModelSpec,
    TopologySpec,
    WorkerGroup,
)
from kvrouter.config.problems import Problem, config_error, problem_of
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, ModelName, Taint, WorkerId
from kvrouter.core.workers import ModelRuntimeConfig, ModelType, Role, WorkerCard
from kvrouter.mock import Links, MockConfig, Peer, Timing
from kvrouter.text.model import FIRST_WORD_ID, TextModel, mock_words
from kvrouter.text.source import MOCK_TOKENIZER, tokenizer_folder
from kvrouter.text.tokenizer import EncodePool
from kvrouter.topology import Link, LinkTable
from kvrouter.worker.topology_env import TopologyEnv, parse_topology_env


def numbered_workers(fleet: FleetFile) -> Iterator[tuple[WorkerId, WorkerGroup]]:
    """Every worker of the file with its id: they count from 1 in the order of the file."""
    number = 0
    for group in fleet.workers:
        for _ in range(group.n_workers):
            number += 1
            yield WorkerId(number), group


def mock_workers(fleet: FleetFile) -> Iterator[tuple[WorkerId, WorkerGroup]]:
    """Those of the file's workers whose engines are mock engines."""
    for worker_id, group in numbered_workers(fleet):
        if isinstance(group.engine, MockEngineSpec):
            yield worker_id, group


def mock_engine(group: WorkerGroup) -> MockEngineSpec:
    """The group's engine, where it is known to be a mock engine."""
    if not isinstance(group.engine, MockEngineSpec):
        raise TypeError(f"group {group.name!r} has no mock engines")
    return group.engine


def said_context_length(fleet: FleetFile, model: ModelSpec) -> int | None:
    """Tokens of prompt and answer together that the file says every engine of ``model`` takes."""
    return model.mock_context_length if fleet.has_mocks(model) else model.context_length


def tokenizer_folders(fleet: FleetFile) -> dict[ModelName, Path]:
    """The folders that the file names for models of engines that run already. Raises ConfigError."""
    folders: dict[ModelName, Path] = {}
    for position, model in enumerate(fleet.models):
        is_attached = any(isinstance(each.engine, AttachedEngineSpec) for each in fleet.groups_of(model))
        said = fleet.said_tokenizer(model) if is_attached else None
        if said is not None:
            folders[ModelName(model.name)] = _folder_of(said, position)
    return folders


def load_texts(fleet: FleetFile, pool: EncodePool) -> dict[ModelName, TextModel]:
    """Tokenizer and chat template of each model that mock engines serve; raise ConfigError for a folder that
    has none.
    """
    served = {fleet.model_of(group).name for _, group in mock_workers(fleet)}
    return {
        ModelName(model.name): TextModel.load(
            _folder_of(model.mock_tokenizer, position),
            context_length_tokens=model.mock_context_length,
            pool=pool,
        )
        for position, model in enumerate(fleet.models)
        if model.name in served
    }


def _folder_of(source: str, position: int) -> Path:
    try:
        return tokenizer_folder(source)
    except ConfigError as error:
        field = f"models[{position}].tokenizer"
        raise ConfigError(f"{field}: {error.message}", param=field) from error


def bootstraps(group: WorkerGroup) -> bool:
    """Whether the group's mock workers hand KV on at a meeting place that both legs are given."""
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
    """What a mock worker publishes; ``bootstrap`` is where its handoffs meet, where they do."""
    model, engine = fleet.model_of(group), mock_engine(group)
    return WorkerCard(
        worker_id=worker_id,
        incarnation=incarnation,
        model=ModelName(model.name),
        role=group.role,
        block_size=model.mock_block_size,
        context_length=model.mock_context_length,
        address=address,
        dp_size=group.dp_size or 1,
        component="prefill" if group.role is Role.PREFILL else "backend",
        serves=ModelType.Prefill if group.role is Role.PREFILL else ModelType.Chat | ModelType.Completions,
        publishes_kv_events=engine.kv_events,
        engine="mock",
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


def contract_of(group: WorkerGroup) -> TopologyEnv | None:
    """The topology contract of a group's workers, where the file has one. Raises ConfigError."""
    contract = {str(name): value for name, value in group.topology_env.items()}
    return parse_topology_env(contract) if contract else None


def contract_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Yield what is wrong with the topology contracts of a file, variable by variable."""
    for position, group in enumerate(fleet.workers):
        contract = {str(name): value for name, value in group.topology_env.items()}
        while contract:
            try:
                parse_topology_env(contract)
                break
            except ConfigError as error:
                name = error.param or ""
                must = error.message.removeprefix(f"{name}: ")
                yield Problem(("workers", position, "topology_env", name), must)
                if contract.pop(name, None) is None:
                    break  # it is missing: what else would be wrong with it is not known


def tokenizer_problems(fleet: FleetFile) -> Iterator[Problem]:
    """Read every tokenizer and chat template that the file names; yield those that cannot be read."""
    pool = EncodePool()
    for position, model in enumerate(fleet.models):
        said = fleet.said_tokenizer(model)
        if said is None:
            continue
        try:
            folder = tokenizer_folder(said)
            TextModel.load(folder, context_length_tokens=model.mock_context_length, pool=pool)
        except ConfigError as error:
            yield Problem(("models", position, "tokenizer"), error.message)


def mock_config(
    fleet: FleetFile, group: WorkerGroup, worker_id: WorkerId, text: TextModel, *, bootstrap: Peer | None
) -> MockConfig:
    """The engine that the file describes; it answers in words where the tokenizer is the mock's."""
    engine = mock_engine(group)
    eos_ids = sorted(text.tokenizer.eos_ids)
    return MockConfig(
        role=group.role,
        block_size=fleet.model_of(group).mock_block_size,
        dp_size=group.dp_size or 1,
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
    if fleet.model_of(group).mock_tokenizer == MOCK_TOKENIZER:
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
