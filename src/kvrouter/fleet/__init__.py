"""The workers of one model: worker ranks as dense slots, with columns of what each is and does."""

from kvrouter.fleet.circuit import Circuit, CircuitSettings, CircuitState, Fault, Pair, Suspicion
from kvrouter.fleet.columns import (
    UNKNOWN,
    UNKNOWN_VALUE,
    BoolColumn,
    Columns,
    FloatColumn,
    IntColumn,
    SlotColumn,
    hash_rank,
)
from kvrouter.fleet.fleet import MAX_SLOTS, Fleet, FleetChange

__all__ = [
    "MAX_SLOTS",
    "UNKNOWN",
    "UNKNOWN_VALUE",
    "BoolColumn",
    "Circuit",
    "CircuitSettings",
    "CircuitState",
    "Columns",
    "Fault",
    "Fleet",
    "FleetChange",
    "FloatColumn",
    "IntColumn",
    "Pair",
    "SlotColumn",
    "Suspicion",
    "hash_rank",
]
