"""All that a replay is reported with, as it is written to JSON."""

import msgspec

from kvrouter.sim.summary import Objective, Summary


class VariantReport(msgspec.Struct, frozen=True):
    """One variant: its rule's source, and a summary for each seed."""

    name: str
    source: str
    seeds: tuple[int, ...]
    summaries: tuple[Summary, ...]


class ReplayReport(msgspec.Struct, frozen=True):
    """All of a replay, as it is written to JSON."""

    version: str
    trace: str
    format: str
    dispatch: str
    objective: Objective
    is_whole: bool
    variants: tuple[VariantReport, ...]
