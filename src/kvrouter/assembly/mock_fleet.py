"""A fleet file's workers, each a mock engine in this process, on memory planes."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from kvrouter.config import FleetFile, Handoff, LinkSpec, ModelSpec, WorkerGroup
from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import ModelName, Taint, WorkerId
from kvrouter.core.workers import ModelRuntimeConfig, ModelType, Role, WorkerCard
from kvrouter.engines.mock import MockCluster, MockEngineHandle
from kvrouter.mock import Links, MockConfig, Timing
from kvrouter.planes.discovery.memory import MemoryDiscovery
from kvrouter.planes.events.memory import MemoryEventPlane
from kvrouter.planes.requests.memory import MemoryRequestPlane, memory_address
from kvrouter.text.encode_pool import EncodePool
from kvrouter.text.model import TextModel
from kvrouter.text.words import FIRST_WORD_ID, MOCK_FOLDER, mock_words
from kvrouter.topology import Link, LinkTable
from kvrouter.worker import Worker, new_incarnation
from kvrouter.worker.topology import wait_for_topology
from kvrouter.worker.topology_env import TopologyEnv, parse_topology_env

MOCK_TOKENIZER = "mock"
BOOTSTRAP_PORT = 8998
"""Mock engines of one process meet by host, port and room; nothing listens there."""


class MockFleet:
    """All workers of a fleet file. Use it as an async context manager: inside, they serve."""

    def __init__(self, fleet: FleetFile) -> None:
        self.fleet = fleet
        self.discovery = MemoryDiscovery()
        self.events = MemoryEventPlane()
        self.requests = MemoryRequestPlane()
        self._encode_pool = EncodePool(off_loop_chars=fleet.frontend.tokenize_inline_max_chars)
        self.texts = load_texts(fleet, self._encode_pool)
        self.cluster = MockCluster(speedup=fleet.speedup, links=mock_links(fleet))
        self.workers: dict[WorkerId, Worker] = {}
        self._engines: dict[WorkerId, MockEngineHandle] = {}

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.TaskGroup() as starting:
                for worker_id, group in numbered_workers(self.fleet):
                    starting.create_task(self._start(worker_id, group))
        except* KvrouterError as group_error:
            await self._stop()
            raise group_error.exceptions[0] from None
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        for worker in self.workers.values():
            await worker.stop()
        await self.requests.close()
        self._encode_pool.close()

    async def _start(self, worker_id: WorkerId, group: WorkerGroup) -> None:
        contract = {str(name): value for name, value in group.topology_env.items()}
        topology = parse_topology_env(contract) if contract else None
        domains = group.domains if topology is None else (await wait_for_topology(topology)).domains
        worker = self._make_worker(worker_id, group, domains, topology)
        await worker.start()
        self.workers[worker_id] = worker

    async def kill(self, worker_id: WorkerId, why: str = "killed") -> None:
        """Let a worker die at once; its card goes as soon as discovery would notice, which here is now."""
        worker = self.workers.pop(worker_id)
        self._engines[worker_id].kill(why)
        worker.die(why)
        await self.discovery.withdraw(worker_id, worker.card.incarnation)

    def check_integrity(self) -> list[str]:
        """What is wrong with the engines' books; nothing may be left over once they are idle."""
        return self.cluster.check_integrity()

    def _make_worker(
        self,
        worker_id: WorkerId,
        group: WorkerGroup,
        domains: Mapping[str, str],
        topology: TopologyEnv | None,
    ) -> Worker:
        model = self.fleet.model_of(group)
        domain = domains.get(link_level(self.fleet) or "", "")
        config = mock_config(self.fleet, group, worker_id, self.texts[ModelName(model.name)])
        engine = self._engines[worker_id] = self.cluster.add(config, worker_id=worker_id, domain=domain)
        return Worker(
            engine,
            worker_card(self.fleet, group, model, worker_id),
            discovery=self.discovery,
            events=self.events,
            requests=self.requests,
            recovery=self.events,
            topology=topology,
        )


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


def worker_card(fleet: FleetFile, group: WorkerGroup, model: ModelSpec, worker_id: WorkerId) -> WorkerCard:
    """What the worker publishes."""
    incarnation = new_incarnation()
    bootstraps = group.role is Role.PREFILL and group.engine.handoff is Handoff.BOOTSTRAP
    policy = fleet.kv_transfer
    return WorkerCard(
        worker_id=worker_id,
        incarnation=incarnation,
        model=ModelName(model.name),
        role=group.role,
        block_size=model.block_size,
        context_length=model.context_length,
        address=memory_address(worker_id, incarnation),
        dp_size=group.dp_size,
        component="prefill" if group.role is Role.PREFILL else "backend",
        serves=ModelType.Prefill if group.role is Role.PREFILL else ModelType.Chat | ModelType.Completions,
        publishes_kv_events=group.engine.kv_events,
        runtime_config=ModelRuntimeConfig(
            topology_domains=dict(group.domains),
            topology_levels=fleet.topology.levels if group.domains else (),
            kv_transfer_domain=None if policy is None else policy.domain,
            kv_transfer_enforcement=None if policy is None else policy.enforcement,
            kv_transfer_preferred_weight=None if policy is None else policy.preferred_weight,
            taints=frozenset(map(Taint, group.taints)),
            total_kv_blocks=group.engine.total_kv_blocks,
            max_num_seqs=group.engine.max_num_seqs,
            max_num_batched_tokens=group.engine.max_num_batched_tokens,
            kv_bytes_per_token=group.engine.kv_bytes_per_token,
            bootstrap_host=_bootstrap_host(worker_id) if bootstraps else None,
            bootstrap_port=BOOTSTRAP_PORT if bootstraps else None,
        ),
    )


def mock_config(fleet: FleetFile, group: WorkerGroup, worker_id: WorkerId, text: TextModel) -> MockConfig:
    """The engine that the file describes; it answers in words where the tokenizer is the mock's."""
    engine = group.engine
    bootstraps = group.role is Role.PREFILL and engine.handoff is Handoff.BOOTSTRAP
    eos_ids = sorted(text.tokenizer.eos_ids)
    return MockConfig(
        role=group.role,
        block_size=fleet.model_of(group).block_size,
        dp_size=group.dp_size,
        timing=Timing(**engine.timing.model_dump()),
        bootstrap_host=_bootstrap_host(worker_id) if bootstraps else None,
        bootstrap_port=BOOTSTRAP_PORT if bootstraps else None,
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


def _bootstrap_host(worker_id: WorkerId) -> str:
    return f"mock-{worker_id}"


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


def link_table(fleet: FleetFile) -> LinkTable:
    """The links as the decision weighs them."""
    table = fleet.topology.link_table
    return LinkTable(
        by_level={level: _link(spec) for level, spec in table.within.items()},
        otherwise=_link(table.across),
        pairs={(pair.level, pair.between[0], pair.between[1]): _link(pair) for pair in table.pairs},
    )


def _link(spec: LinkSpec) -> Link:
    return Link(spec.latency_s, spec.bandwidth_bytes_per_s)
