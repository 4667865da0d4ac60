"""Who is there: worker ranks as dense slots, with columns of what each one is and does."""

from kvrouter.fleet.circuit import Circuit, CircuitSettings, CircuitState, Fault
from kvrouter.fleet.columns import UNKNOWN, BoolColumn, Columns, FloatColumn, IntColumn, SlotColumn
from kvrouter.fleet.fleet import MAX_SLOTS, Change, Fleet
from kvrouter.fleet.mixing import hash_rank, mix64
from kvrouter.fleet.pairs import Pair
from kvrouter.fleet.places import UNKNOWN_VALUE

__all__ = [
    "MAX_SLOTS",
    "UNKNOWN",
    "UNKNOWN_VALUE",
    "BoolColumn",
    "Change",
    "Circuit",
    "CircuitSettings",
    "CircuitState",
    "Columns",
    "Fault",
    "Fleet",
    "FloatColumn",
    "IntColumn",
    "Pair",
    "SlotColumn",
    "hash_rank",
    "mix64",
]
