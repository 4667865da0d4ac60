"""Registering a model: the card that routers see."""

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import DpRank, Epoch, Taint, WorkerId
from kvrouter.core.workers import (
    Enforcement,
    EventSource,
    EventTransport,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    Role,
    WorkerCard,
)
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.worker.register import new_incarnation, register_llm


async def register(
    discovery: MemoryDiscovery,
    model_type: ModelType = ModelType.Chat | ModelType.Completions,
    *,
    model: str = "m",
    worker_id: int = 3,
    block_size: int = 16,
    context_length: int = 1024,
    dp_size: int = 1,
    disaggregated: bool = False,
    runtime_config: ModelRuntimeConfig | None = None,
    incarnation: Epoch | None = None,
) -> WorkerCard:
    return await register_llm(
        discovery,
        model=model,
        worker_id=worker_id,
        model_input=ModelInput.Tokens,
        model_type=model_type,
        address="test://3",
        block_size=block_size,
        context_length=context_length,
        dp_size=dp_size,
        disaggregated=disaggregated,
        runtime_config=runtime_config,
        incarnation=incarnation,
    )


@pytest.mark.parametrize(
    ("model_type", "disaggregated", "role"),
    [
        (ModelType.Chat | ModelType.Completions, False, Role.BOTH),
        (ModelType.Chat, True, Role.DECODE),
        (ModelType.Completions, False, Role.BOTH),
        (ModelType.Prefill, False, Role.PREFILL),
    ],
)
async def test_the_role_follows_from_the_model_type(
    model_type: ModelType, disaggregated: bool, role: Role
) -> None:
    card = await register(MemoryDiscovery(), model_type, disaggregated=disaggregated)
    assert (card.role, card.serves) == (role, model_type)


async def test_the_card_has_the_event_source_and_the_tokenizer() -> None:
    source = EventSource(EventTransport.ZMQ, "tcp://h:1", "tcp://h:2")
    card = await register_llm(
        MemoryDiscovery(),
        model="m",
        worker_id=3,
        model_input=ModelInput.Tokens,
        model_type=ModelType.Chat,
        address="test://3",
        block_size=16,
        context_length=1024,
        event_source=source,
        tokenizer="/models/m",
    )
    assert (card.event_source, card.tokenizer) == (source, "/models/m")
    alone = await register(MemoryDiscovery())
    assert (alone.event_source.transport, alone.tokenizer) == (EventTransport.MEMORY, None)


async def test_a_registered_worker_is_discovered() -> None:
    discovery = MemoryDiscovery()
    card = await register(discovery, incarnation=Epoch(8), dp_size=2)
    found: list[WorkerCard] = []
    await discovery.watch(found.append, lambda *_: None)
    assert found == [card]
    assert card.incarnation == 8
    assert card.ranks() == ((WorkerId(3), DpRank(0)), (WorkerId(3), DpRank(1)))


def test_each_new_incarnation_is_different() -> None:
    assert len({new_incarnation() for _ in range(100)}) == 100


@pytest.mark.parametrize("model_type", [ModelType.Prefill | ModelType.Chat, ModelType(0)])
async def test_a_model_type_mixing_legs_or_empty_is_refused(model_type: ModelType) -> None:
    with pytest.raises(ConfigError, match=r"^model_type: "):
        await register(MemoryDiscovery(), model_type)


async def test_an_invalid_registration_is_refused_by_name() -> None:
    discovery = MemoryDiscovery()
    for name, refused in {
        "block_size": register(discovery, block_size=0),
        "context_length": register(discovery, context_length=0),
        "dp_size": register(discovery, dp_size=0),
        "worker_id": register(discovery, worker_id=-1),
        "model": register(discovery, model=""),
        "kv_transfer_preferred_weight": register(
            discovery, runtime_config=ModelRuntimeConfig(kv_transfer_enforcement=Enforcement.PREFERRED)
        ),
        "taints": register(
            discovery, runtime_config=ModelRuntimeConfig(taints=frozenset({Taint("dynamo.topology/zone=a")}))
        ),
    }.items():
        with pytest.raises(ConfigError) as error:
            await refused
        assert error.value.param == name
    found: list[WorkerCard] = []
    await discovery.watch(found.append, lambda *_: None)
    assert found == []
