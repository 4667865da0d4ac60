"""Worker registration: makes a worker's card from the arguments of ``register_llm`` and publishes it."""

import secrets

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WORKER_IDS, Epoch, ModelName, WorkerId
from kvrouter.core.workers import (
    EventSource,
    EventTransport,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    Role,
    WorkerCard,
)
from kvrouter.kernel.topology.policy import validate_runtime_config
from kvrouter.settings.setting import installed_version
from kvrouter.transports.records.port import Discovery


def new_incarnation() -> Epoch:
    """Return a random epoch, so that a restart is never taken for the same start."""
    return Epoch(secrets.randbits(63))


def role_of(model_type: ModelType, *, disaggregated: bool) -> Role:
    """Return the role of a registration. Raises ConfigError for a type that mixes roles or has none."""
    if model_type is ModelType.Prefill:
        return Role.PREFILL
    if not model_type & (ModelType.Chat | ModelType.Completions) or model_type & ModelType.Prefill:
        raise ConfigError(
            "model_type: either ModelType.Prefill, or ModelType.Chat and ModelType.Completions",
            param="model_type",
        )
    return Role.DECODE if disaggregated else Role.BOTH


async def register_llm(
    discovery: Discovery,
    *,
    worker_id: int,
    model: str,
    model_input: ModelInput,
    model_type: ModelType,
    address: str,
    block_size: int,
    context_length: int,
    dp_size: int = 1,
    dp_start: int = 0,
    disaggregated: bool = False,
    namespace: str = "default",
    component: str = "backend",
    endpoint: str = "generate",
    runtime_config: ModelRuntimeConfig | None = None,
    publishes_kv_events: bool = True,
    event_source: EventSource | None = None,
    tokenizer: str | None = None,
    engine: str = "",
    incarnation: Epoch | None = None,
) -> WorkerCard:
    """Publish a worker of ``model`` and return its card.

    ``address`` is where routers reach the worker; ``block_size`` and ``context_length`` are in tokens.
    Prefill workers register ``ModelType.Prefill``, all others ``ModelType.Chat | ModelType.Completions``; of
    these, ``disaggregated`` ones take decode legs only. KV routing needs ``ModelInput.Tokens``.
    ``event_source`` is where the worker publishes its events, None for this process; ``tokenizer`` the
    model's folder, for frontends without a tokenizer of their own; ``engine`` the engine and its version,
    such as ``vllm 0.32.0``.

    Raises ConfigError, whose ``param`` names the argument, for a card that cannot be routed to.
    """
    for name, number in (
        ("block_size", block_size),
        ("context_length", context_length),
        ("dp_size", dp_size),
    ):
        if number < 1:
            raise ConfigError(f"{name}: must be at least 1, not {number}", param=name)
    if not 0 <= worker_id < WORKER_IDS:
        raise ConfigError(f"worker_id: must be in 0..2**63-1, not {worker_id}", param="worker_id")
    if not model:
        raise ConfigError("model: must not be empty", param="model")
    validate_runtime_config(runtime_config or ModelRuntimeConfig())
    card = WorkerCard(
        worker_id=WorkerId(worker_id),
        incarnation=new_incarnation() if incarnation is None else incarnation,
        model=ModelName(model),
        role=role_of(model_type, disaggregated=disaggregated),
        block_size=block_size,
        context_length=context_length,
        address=address,
        dp_size=dp_size,
        dp_start=dp_start,
        namespace=namespace,
        component=component,
        endpoint=endpoint,
        model_input=model_input,
        serves=model_type,
        publishes_kv_events=publishes_kv_events,
        event_source=event_source or EventSource(EventTransport.MEMORY),
        tokenizer=tokenizer,
        engine=engine,
        version=installed_version(),
        runtime_config=runtime_config or ModelRuntimeConfig(),
    )
    await discovery.publish(card)
    return card
