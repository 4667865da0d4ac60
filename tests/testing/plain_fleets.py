"""Plain workers, fleets of them, and views of these without load."""

from typing import Any

import numpy as np
from msgspec.structs import replace

from kvrouter.core.ids import Epoch, ModelName, WorkerId
from kvrouter.core.workers import ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import RoutingSettings, View


def worker_card(
    worker_id: int, role: Role = Role.BOTH, config: ModelRuntimeConfig | None = None, **fields: Any
) -> WorkerCard:
    """A worker of the model ``m``, with blocks of 4 tokens unless ``fields`` say otherwise."""
    plain = WorkerCard(
        WorkerId(worker_id),
        Epoch(1),
        ModelName("m"),
        role,
        block_size=4,
        context_length=100_000,
        address="here",
        runtime_config=config or ModelRuntimeConfig(),
    )
    return replace(plain, **fields)


def fleet_of(*cards: WorkerCard, block_size: int = 4) -> Fleet:
    """A fleet that these workers joined."""
    fleet = Fleet(ModelName("m"), block_size)
    for card in cards:
        fleet.join(card)
    return fleet


def idle_view(fleet: Fleet, settings: RoutingSettings | None = None, **fields: Any) -> View:
    """A view in which no rank has load or cached blocks, but for what ``fields`` say."""
    zeros = np.zeros(fleet.n_slots, np.int64)
    return replace(View(fleet, settings or RoutingSettings(), None, zeros, zeros, None), **fields)
